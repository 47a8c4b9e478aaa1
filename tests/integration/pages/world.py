"""Everything that a page shows: server, worker, scheduler, coordinator, web.

It runs on an event loop in a separate thread, because the browser's driver is synchronous. Every
text that others can write contains a probe: if a page fails to escape one, its script runs.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from holdfast import Backoff, Context, Holdfast, Worker
from holdfast.agent import Agent, Function
from holdfast.broker import Broker
from holdfast.client import Client
from holdfast.client.fleet import Fleet, new_run
from holdfast.client.schedules import Schedules
from holdfast.config import (
    AgentConfig,
    ConnectionConfig,
    DispatcherConfig,
    SchedulerConfig,
    WebConfig,
    WorkerConfig,
)
from holdfast.coordinator import Coordinator
from holdfast.dispatcher import Dispatcher
from holdfast.model.fleet import FleetRequest
from holdfast.model.liveness import PROFILES
from holdfast.model.schedule import define
from holdfast.scheduler import Scheduler
from holdfast.status.fleet import Agents
from holdfast.status.listing import RunFilter, RunPages
from holdfast.web import create_app
from tests.integration.support import client_of
from tests.support import until

T = TypeVar("T")

PROBE = '"><img src=x onerror="window.pwned=1"><script>window.pwned=1</script>\''


class Thread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="world", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], limit: float = 60) -> T:
        """Run a coroutine there and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(limit)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class WebServer:
    """The web app on a free port."""

    def __init__(self, thread: Thread, app: Any) -> None:
        self.app = app
        self._thread = thread
        config = uvicorn.Config(app, port=0, log_level="warning", access_log=False, lifespan="on")
        config.timeout_graceful_shutdown = 5
        self._server = uvicorn.Server(config)
        self._serving = asyncio.run_coroutine_threadsafe(self._server._serve(), thread.loop)
        thread.call(until(lambda: self._server.started or self._serving.done(), 20, "a server"))
        if not self._server.started:
            self._serving.result()
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.loop.call_soon_threadsafe(self.app.state.feed.close)
        self._serving.result(60)


def make_app(url: str, namespace: str, gate: asyncio.Event) -> Holdfast:
    """Jobs for each way a run can end."""
    app = Holdfast("shop", nats_url=url, namespace=namespace)

    @app.job
    async def charge(ctx: Context, order: int) -> dict[str, Any]:
        await ctx.publish("order-paid", {"order": order})
        return {"receipt": f"no {order}", "note": PROBE}

    @app.job(on="order-paid")
    async def ship(order: int) -> None: ...

    @app.job(retry=Backoff.list(["1h", "1h"]))
    async def flaky(n: int) -> None:
        raise ConnectionError(f"the bank does not answer {PROBE}")

    @app.job(retry=Backoff.list(["10ms"]))
    async def broken(n: int, note: str = "") -> int:
        if n < 0:
            raise ValueError(f"page {n} cannot be read {PROBE}")
        return n

    @app.job
    async def hold(ctx: Context, n: int) -> int:
        await ctx.progress(0.4, note=f"halfway {PROBE}")
        await gate.wait()
        return n

    @app.job(group="other")
    async def unserved(n: int) -> None: ...

    @app.job
    async def tidy(what: str = "") -> str:
        return what

    return app


class World:
    """Everything at once."""

    def __init__(self, url: str, namespace: str) -> None:
        self.thread = Thread()
        self.url = url
        self.namespace = namespace
        self.runs: dict[str, str] = {}
        self._roles: list[tuple[Any, asyncio.Task[None]]] = []
        self._agent_list: list[Agent] = []
        self._folder = Path(tempfile.mkdtemp(prefix="holdfast-"))
        self.thread.call(self._start())
        self.site = self.another_site()

    def another_site(self) -> WebServer:
        """A web process that has just started."""
        app = create_app(connection=self.connection(), config=WebConfig(), open_to_all=True)
        return WebServer(self.thread, app)

    def now(self) -> float:
        """The server's time, as the web knows it."""
        return self.site.app.state.services.broker.server_now()

    def connection(self) -> ConnectionConfig:
        return ConnectionConfig(nats_url=self.url, namespace=self.namespace)

    def call(self, work: Coroutine[Any, Any, T], limit: float = 60) -> T:
        return self.thread.call(work, limit)

    async def _start(self) -> None:
        self.gate = asyncio.Event()
        self.app = make_app(self.url, self.namespace, self.gate)
        connection = self.connection()
        self.worker = self._run(Worker(self.app, WorkerConfig(group="default", concurrency=8)))
        await until(lambda: self.worker.pulling, 20, "a worker that pulls")
        self._run(Coordinator(connection))
        await self._schedules()
        self._run(Scheduler(None, SchedulerConfig(), connection=connection))
        await self._fleet(connection)
        await self._send()

    async def _fleet(self, connection: ConnectionConfig) -> None:
        """Two agents, one of them gone, and a command sent to both."""
        dispatcher = self._run(
            Dispatcher(connection, DispatcherConfig(), liveness=PROFILES["local"])
        )
        self._agents = Broker(connection, name="agents")
        await self._agents.open()
        (self._folder / "facts.json").write_text(json.dumps({"note": PROBE, "rack": ["a", "b"]}))
        for name in ("web1", "web2"):
            await self._agent(name)
        await until(dispatcher.started.is_set, 20, "a dispatcher")
        fleet = Fleet(self._agents)

        async def known() -> bool:
            return len(await fleet.resolve("web*")) == 2

        await until(known, 20, "agents that are known")
        request = FleetRequest(new_run(), "web*", "mark", ("hello",), user="ann")
        async for _ in fleet.follow(request):
            pass
        self.runs["command"] = request.run

    async def _agent(self, name: str) -> Agent:
        async def mark(label: str) -> dict[str, str]:
            if name == "web2":
                raise ValueError(f"{name} does not like it {PROBE}")
            return {"label": label, "note": PROBE}

        async def hold() -> None:
            await asyncio.Event().wait()

        config = AgentConfig(
            id=name,
            data_dir=str(self._folder / name),
            facts_file=str(self._folder / "facts.json"),
            grace_seconds=0.0,
        )
        functions = [Function("mark", mark), Function("look", mark, mutating=False)]
        functions.append(Function("hold", hold, mutating=False))
        agent = Agent(config, broker=self._agents, functions=functions)
        await agent.start()
        self._agent_list.append(agent)
        return agent

    async def agent_that_left(self, name: str) -> None:
        """An agent that was online, and is now known only by its facts."""
        agent = await self._agent(name)
        self._agent_list.remove(agent)
        agents = Agents(await self.client())

        async def known() -> bool:
            return any(one.id == name for one in await agents.list())

        await until(known, 20, "an agent that is known")
        await agent.close()

        async def gone() -> bool:
            return not (await agents.show(name))[0].online

        await until(gone, 20, "an agent that is offline")

    def _run(self, role: T) -> T:
        self._roles.append((role, asyncio.create_task(role.run())))  # type: ignore[attr-defined]
        return role

    async def client(self) -> Client:
        return await client_of(self.app)

    async def _schedules(self) -> None:
        schedules = Schedules(await self.client())
        body = b'{"what": "<img src=x onerror=window.pwned=1>"}'
        headers = {"X-Note": PROBE}
        await schedules.add(define("every-second", "tidy", every="1s", body=body, headers=headers))
        await schedules.add(define("nightly", "tidy", cron="30 3 * * *", tz="Europe/Paris"))
        await schedules.add(define("quiet", "tidy", every="1h"))
        await schedules.pause("quiet")

    async def _send(self) -> None:
        jobs = self.app.jobs
        headers = {"X-Note": PROBE, "X-Password": "hunter2"}
        done = [(await jobs["charge"].enqueue(n, key=f"order-{n}")) for n in range(30)]
        self.runs["done"] = done[0].id
        self.runs["failed"] = (await jobs["flaky"].enqueue(1, key="f", headers=headers)).id
        for n in range(3):
            run = await jobs["broken"].enqueue(-n - 1, note=PROBE, headers=headers)
            self.runs["dead"] = run.id
        self.runs["running"] = (await jobs["hold"].enqueue(1, key="h")).id
        self.runs["queued"] = (await jobs["unserved"].enqueue(1, key="u", headers=headers)).id
        self.runs["delayed"] = (await jobs["tidy"].enqueue(PROBE, key="d", delay="1h")).id
        for run in done:
            await run.result(timeout=30)
        await until(self._settled, 30, "runs in every state")

    async def _settled(self) -> bool:
        pages = RunPages(await self.client())
        for state, count in {"dead": 3, "failed": 1, "running": 1, "delayed": 1}.items():
            if len((await pages.page(RunFilter(state=state), 10)).runs) < count:
                return False
        return True

    async def _stop(self) -> None:
        self.gate.set()
        await asyncio.gather(*(agent.close() for agent in self._agent_list))
        for role, _ in self._roles:
            role.stop()
        await asyncio.gather(*(task for _, task in self._roles), return_exceptions=True)
        await self._agents.close()
        await self.app.close()

    def close(self) -> None:
        self.site.close()
        self.thread.call(self._stop())
        self.thread.close()
        shutil.rmtree(self._folder, ignore_errors=True)
