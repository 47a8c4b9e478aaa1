"""An agent that no server answers: what it does from its disk, and what ends it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent import Agent, agent, renewing
from holdfast.agent.renewing import Renewing
from holdfast.broker import Broker
from holdfast.config import AgentConfig, ConnectionConfig
from holdfast.errors import ConfigError
from holdfast.identity.credentials import AgentCredentials, new_nkey_seed
from holdfast.server.process import free_ports
from holdfast.settings import resolving
from holdfast.settings.resolving import Snapshot
from tests.integration.settings_support import SEED
from tests.support import running, until

ID = "web1"


def login(**life: float) -> AgentCredentials:
    return AgentCredentials.create(ID, SEED.agent_keys(ID), new_nkey_seed(), **life)


def nowhere() -> ConnectionConfig:
    """A server that is not there."""
    return ConnectionConfig(
        nats_url=f"nats://127.0.0.1:{free_ports(1)[0]}", connect_timeout_seconds=0.5
    )


def made(folder: Path) -> Agent:
    return Agent(AgentConfig(data_dir=str(folder)), connection=nowhere(), credentials=login())


def tried(folder: Path, until: float) -> None:
    """A canary's settings in force, and the ones before them."""
    folder.mkdir(mode=0o700, exist_ok=True)
    before = Snapshot(ID, 1, 1, 1.0, {"port": 1})
    resolving.save(folder / resolving.BEFORE, before)
    trial = Snapshot(ID, 1, 2, 2.0, {"port": 2}, manifest="m", until=until)
    resolving.save(folder / resolving.FILE, trial)


def port(folder: Path) -> Any:
    found = resolving.load(folder / resolving.FILE)
    return found and found.values["port"]


async def test_canary_that_ran_out_is_over_at_the_start(tmp_path: Path) -> None:
    """A host that a canary cut off, and that somebody restarts, has its old settings back."""
    tried(tmp_path, time.time() - 1)
    one = made(tmp_path)
    async with running(one):
        assert one.settings is not None
        assert one.settings.settings["port"] == port(tmp_path) == 1
        assert not one.broker.connected


async def test_canary_ends_while_no_server_was_ever_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that was restarted during the trial keeps to its time."""
    monkeypatch.setattr(agent, "CONNECT_SECONDS", 0.1)
    ends = time.time() + 3
    tried(tmp_path, ends)
    one = made(tmp_path)
    async with running(one):
        assert one.settings is not None
        if time.time() < ends:
            assert one.settings.settings["port"] == 2
        await until(lambda: one.settings and one.settings.settings["port"] == 1, what="back")
        assert port(tmp_path) == 1


async def test_canary_ends_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file stays as it is, and the settings in force are the old ones."""
    tried(tmp_path, time.time() - 1)
    monkeypatch.setattr(resolving, "save", full)
    one = made(tmp_path)
    async with running(one):
        assert one.settings is not None
        assert one.settings.settings["port"] == 1


def full(path: Path, *_: Any, **__: Any) -> None:
    raise ConfigError(f"{str(path)!r} cannot be written: No space left on device")


async def test_agent_ends_with_the_error_of_a_part(tmp_path: Path) -> None:
    """Half an agent would look healthy: whoever started it starts it again."""
    one = made(tmp_path)

    async def broken() -> None:
        raise ValueError("this part is broken")

    one.schedules.run = broken  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="this part is broken"):
        await one.run()


async def test_renewing_outlives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said in the log, and the next login is made and asked for when there is space."""
    monkeypatch.setattr(renewing, "TRY_SECONDS", 0.01)
    now = time.time()
    broker = Broker(dataclasses.replace(nowhere(), credentials_file=str(tmp_path / "now.json")))
    one = Renewing(broker, login(ends=now + 10, lasts=60.0), tmp_path / "now.json", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(AgentCredentials, "save", full)
        with caplog.at_level(logging.INFO):
            work = asyncio.create_task(one.run())
            await until(lambda: "No space left" in caplog.text, what="the error in the log")
        assert not work.done()
        assert one.request == ""
    await until(lambda: one.request, what="the next login asked for")
    assert (tmp_path / renewing.FILE).exists()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def test_hosts_that_joined_together_renew_one_by_one(tmp_path: Path) -> None:
    """Between half and two thirds of a login's life, each at a time of its own."""
    broker = Broker(nowhere())
    life = login(ends=9_000.0, lasts=6_000.0)
    due = {Renewing(broker, life, tmp_path / "now.json", tmp_path)._due for _ in range(100)}
    assert len(due) == 100
    assert min(due) >= 6_000
    assert max(due) <= 7_000


async def test_login_that_nobody_lists_is_tried_more_and_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand agents would otherwise try five hundred logins a second."""
    tries = 0

    async def refused(_: ConnectionConfig) -> str:
        nonlocal tries
        tries += 1
        return "no"

    monkeypatch.setattr(renewing, "not_admitted", refused)
    broker = Broker(nowhere())
    now = time.time()
    one = Renewing(
        broker, login(ends=now + 9 * 86_400, lasts=30 * 86_400), tmp_path / "n", tmp_path
    )
    rests = []
    for _ in range(12):
        await one._step()
        rests.append(one._rest)
    assert tries == 12
    assert rests[0] <= renewing.TRY_SECONDS
    assert renewing.LONGEST_REST_SECONDS / 2 < rests[-1] <= renewing.LONGEST_REST_SECONDS
