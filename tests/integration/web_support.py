"""What the web tests share: an app to serve, clients of every role, and large data sets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI

from holdfast import Backoff, Holdfast
from holdfast.broker.batch import Write, send_batch
from holdfast.broker.wire import read_ack
from holdfast.client import Client
from holdfast.config import ConnectionConfig, WebConfig
from holdfast.model import node as nodes
from holdfast.model import run as runs
from holdfast.model.node import NodeRecord
from holdfast.model.run import Attempt, RunRecord
from holdfast.names import H_EXPECTED, H_MSG_ID, kv_subject
from holdfast.server import Server
from holdfast.web import create_app
from holdfast.web.auth import make_token
from holdfast.web.serve import WebServer

HOST = "http://127.0.0.1:8080"
TOKENS = {role: make_token(f"a-{role}", role) for role in ("viewer", "operator", "admin")}
BATCH = 500


def shop() -> Holdfast:
    """An app with a job that works and one that fails."""
    app = Holdfast("shop")

    @app.job
    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @app.job(retry=Backoff.never())
    async def boom(why: str) -> None:
        raise RuntimeError(why)

    @app.job
    async def login(user: str, password: str) -> dict[str, str]:
        return {"user": user, "password": password}

    return app


@dataclass
class WebApp:
    """A web app on a server, and clients for it."""

    web: FastAPI
    host: str = HOST
    clients: dict[str, httpx.AsyncClient] = field(default_factory=dict)

    def browser(self, host: str = "") -> httpx.AsyncClient:
        """A client without credentials, which keeps cookies."""
        transport = httpx.ASGITransport(self.web)
        return httpx.AsyncClient(transport=transport, base_url=host or self.host)

    def __getattr__(self, role: str) -> httpx.AsyncClient:
        """A client with the token of a role: `site.viewer`, `site.operator`, `site.admin`."""
        if role not in TOKENS:
            raise AttributeError(role)
        if role not in self.clients:
            client = self.browser(f"{self.host}/api/v1")
            client.headers["Authorization"] = f"Bearer {TOKENS[role][0]}"
            self.clients[role] = client
        return self.clients[role]

    @property
    def client(self) -> Client:
        found: Client = self.web.state.services.client
        return found


@contextlib.asynccontextmanager
async def site(
    nats: Server,
    namespace: str,
    app: Holdfast | None = None,
    *,
    with_pages: bool = False,
    **options: Any,
) -> AsyncIterator[WebApp]:
    """A connected web app with one token for each role."""
    given = {"tokens": ",".join(line for _, line in TOKENS.values()), "rate_per_second": 0}
    config = WebConfig(**{**given, **options})
    connection = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    web = create_app(app, config=config, connection=connection, with_pages=with_pages)
    found = WebApp(web)
    async with web.router.lifespan_context(web):
        try:
            yield found
        finally:
            for client in found.clients.values():
                await client.aclose()


# ---- large data sets


async def store_all(client: Client, writes: Iterator[Write], *, atomic: bool = True) -> None:
    """Write in batches: 100,000 records take some seconds."""
    while batch := list(itertools.islice(writes, BATCH)):
        if atomic:
            await read_ack(await send_batch(client.broker, batch))
        else:
            await asyncio.gather(*(client.broker.store(*write) for write in batch))


def run_records(client: Client, count: int) -> Iterator[Write]:
    """Records of ended runs; one in a thousand is dead, and the oldest is lost."""
    now = time.time()
    for n in range(count):
        state: Any = "dead" if n % 1000 == 7 else ("lost" if n == 0 else "done")
        began = now - (count - n) / 1000
        attempt = Attempt(1, f"worker-{n % 50}", n + 1, began, began + 0.1, "done")
        error = f"ValueError: number {n}" if state == "dead" else ""
        record = RunRecord(
            state,
            "default",
            f"job{n % 20}",
            created=began,
            started=began,
            ended=began + 0.1,
            attempts=(attempt,),
            error=error,
        )
        subject = kv_subject(client.runs.name, f"r{n:08d}")
        yield Write(subject, runs.encode(record), {H_EXPECTED: "0"})


def dead_letters(client: Client, count: int) -> Iterator[Write]:
    """Dead letters of twenty jobs."""
    names = client.broker.names
    for n in range(count):
        headers = {H_MSG_ID: f"dead-{n}", "Hf-Run": f"r{n:08d}", "Hf-Reason": "failed"}
        headers["Hf-Error"] = f"ValueError: number {n}"
        yield Write(names.dead_letter("default", f"job{n % 20}"), b"{}", headers)


def waiting_runs(client: Client, count: int) -> Iterator[Write]:
    """Messages that wait in the queues of twenty jobs."""
    names = client.broker.names
    for n in range(count):
        subject = names.job("default", f"job{n % 20}")
        yield Write(subject, b"{}", {H_MSG_ID: f"waiting-{n}"})


def node_records(client: Client, count: int) -> Iterator[Write]:
    """Records of live nodes."""
    now = time.time()
    for n in range(count):
        record = NodeRecord(
            f"worker-{n:05d}",
            "worker",
            f"g{n % 10}",
            "RUNNING",
            since=now,
            host=f"host{n}",
            pid=n + 1,
            started=now,
            running=3,
        )
        subject = kv_subject(client.broker.names.nodes, record.id)
        yield Write(subject, nodes.encode(record), {H_EXPECTED: "0"})


@contextlib.contextmanager
def serving(nats: Server, namespace: str, app: Holdfast | None = None, **options: Any) -> Any:
    """A web process in a thread, on a real socket; yields its URL."""
    config = WebConfig(port=0, tokens=TOKENS["admin"][1], rate_per_second=0, **options)
    connection = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    told: queue.Queue[tuple[str, WebServer, asyncio.AbstractEventLoop]] = queue.Queue()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = WebServer(
            config, connection, app=app, started=lambda url: told.put((url, server, loop))
        )
        await server.run()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="web")
    thread.start()
    url, server, loop = told.get(timeout=30)
    try:
        yield url.rstrip("/")
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join(30)
        assert not thread.is_alive()
