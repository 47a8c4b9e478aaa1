"""The life that all roles share: started, ready, drained, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from holdfast.broker import Broker
from holdfast.config import ConnectionConfig, DispatcherConfig, SchedulerConfig
from holdfast.coordinator import Coordinator
from holdfast.dispatcher import Dispatcher
from holdfast.errors import NotConnected, Unavailable
from holdfast.role import Role, Together
from holdfast.scheduler import Scheduler
from holdfast.server import Server
from holdfast.telemetry import Telemetry
from tests.integration.command import ask, free_port
from tests.support import until


class Sample(Role):
    """A role that does nothing but say what happens to it."""

    def __init__(
        self, connection: ConnectionConfig, port: int = 0, ready_file: str = "", role: str = "one"
    ) -> None:
        broker = Broker(connection, name="sample")
        served = SchedulerConfig(health_host="127.0.0.1", health_port=port)
        super().__init__(broker, Telemetry(), served, ready_file=ready_file)
        self.role = role  # two of one kind are told apart
        self.said: list[str] = []
        self.prepared = asyncio.Event()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.wrong: list[str] = []

    async def prepare(self, ending: contextlib.AsyncExitStack) -> None:
        ending.callback(self.said.append, "closed")
        await self.prepared.wait()

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {"fail": self._fail()}

    async def _fail(self) -> None:
        try:
            await self.failure
        finally:
            self.said.append("task ended")

    async def drain(self) -> None:
        self.said.append("drained")

    def trouble(self) -> list[str]:
        return self.wrong


@pytest.fixture
def connection(nats: Server, namespace: str) -> ConnectionConfig:
    return ConnectionConfig(nats_url=nats.url, namespace=namespace)


@contextlib.asynccontextmanager
async def running(role: Role | Together) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(role.run())
    try:
        yield task
    finally:
        role.stop()
        await asyncio.wait([task])


async def test_role_drains_then_ends_its_tasks_then_what_it_opened(
    connection: ConnectionConfig,
) -> None:
    """`stop` drains first, while every task still runs; what was opened first is closed last."""
    role = Sample(connection)
    role.prepared.set()
    async with running(role) as task:
        await until(role.started.is_set, 10, "a start")
        role.stop()
        await task
    assert role.said == ["drained", "task ended", "closed"]
    assert "stopping" in role.problems()


async def test_role_ends_with_the_error_of_a_task(connection: ConnectionConfig) -> None:
    """A task that fails ends the role at once: nothing is drained, everything is closed."""
    role = Sample(connection)
    role.prepared.set()
    async with running(role) as task:
        await until(role.started.is_set, 10, "a start")
        role.failure.set_exception(Unavailable("gone for good"))
        with pytest.raises(Unavailable, match="gone for good"):
            await task
    assert role.said == ["task ended", "closed"]


async def test_role_cannot_continue_without_its_connection(connection: ConnectionConfig) -> None:
    """A connection that is closed for good is an error, so that the process is restarted."""
    role = Sample(connection)
    role.prepared.set()
    async with running(role) as task:
        await until(role.started.is_set, 10, "a start")
        await role.broker.close()
        with pytest.raises(NotConnected, match="closed for good"):
            await task


async def test_roles_together_are_ready_only_when_all_are(
    connection: ConnectionConfig, tmp_path: Path
) -> None:
    """One port and one ready file: not ready until the last role is, or when one has a problem."""
    port, file = free_port(), tmp_path / "ready"
    file.touch()  # left behind by a process that was killed
    first = Sample(connection, port, str(file))
    second = Sample(connection, role="other")
    first.prepared.set()
    async with running(Together([first, second])):
        await until(first.started.is_set, 10, "the first role")
        status, body = await ask(port, "/health/ready")
        found = json.loads(body)
        assert (status, found["problems"]) == (503, ["other: starting"])
        assert (await ask(port, "/health/live"))[0] == 200
        assert not file.exists()
        second.prepared.set()
        await until(file.exists, 10, "the ready file")
        status, body = await ask(port, "/health/ready")
        assert (status, json.loads(body)["roles"]["other"]["ready"]) == (200, True)
        second.wrong.append("out of order")
        status, body = await ask(port, "/health/ready")
        assert (status, json.loads(body)["problems"]) == (503, ["other: out of order"])
        await until(lambda: not file.exists(), 10, "no ready file")
    assert first.said[0] == second.said[0] == "drained"


async def test_roles_together_end_when_one_cannot_continue(connection: ConnectionConfig) -> None:
    """The others are drained, and the error is the process's."""
    first, second = Sample(connection), Sample(connection)
    for role in (first, second):
        role.prepared.set()
    async with running(Together([first, second])) as task:
        await until(lambda: first.started.is_set() and second.started.is_set(), 10, "both")
        second.failure.set_exception(Unavailable("gone for good"))
        with pytest.raises(Unavailable):
            await task
    assert first.said == ["drained", "task ended", "closed"]


async def test_control_reports_every_role_on_one_port(connection: ConnectionConfig) -> None:
    """`holdfast control` is its three roles: ready together, each with its own facts."""
    port, telemetry = free_port(), Telemetry()
    config = SchedulerConfig(health_host="127.0.0.1", health_port=port)
    roles = [
        Scheduler(None, config, connection=connection, telemetry=telemetry),
        Coordinator(connection, telemetry=telemetry),
        Dispatcher(connection, DispatcherConfig(), telemetry=telemetry),
    ]
    together = Together(roles)
    async with running(together):
        await until(lambda: together.health().ready, 20, "control")
        status, body = await ask(port, "/health/ready")
        found = json.loads(body)
        assert status == 200
        assert found["role"] == "leader"
        assert set(found["roles"]) == {"scheduler", "coordinator", "dispatcher"}
        assert found["roles"]["coordinator"]["nodes"] >= 3
        assert (await ask(port, "/lag/default"))[0] in (200, 404)
    assert not together.health().ready
