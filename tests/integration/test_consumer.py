"""`run_consumer`: one call for a job in its own directory, and how its process ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.server import Server
from holdfast.server.process import free_ports
from holdfast.worker.consumer import consumer_app
from tests.integration.support import Seen, until, working

Publish = Callable[..., Awaitable[None]]

SCRIPT = """
import asyncio, sys
from pathlib import Path
from holdfast import run_consumer
from holdfast.worker import places, worker

worker.SETTLE_SECONDS = places.CLOSE_SECONDS = 0.2
log = Path(sys.argv[1])

def note(text):
    with log.open("a") as file:
        file.write(text + "\\n")

async def handle_event(data: dict, publish) -> str:
    note(f"start {data['n']}")
    if data["n"] == "stubborn":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                note("not me")
    await publish("downloaded", data)
    return "handled"

run_consumer(handler=handle_event, job_name="image-download", health_port=int(sys.argv[2]))
"""


@dataclass
class Image:
    """What the handlers take."""

    id: int


async def test_handler_of_data_and_publish_is_a_job(
    nats: Server, namespace: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`handle_event(data, publish)`, async or not, gets the payload and may publish."""
    monkeypatch.setenv("HOLDFAST_NAMESPACE", namespace)
    monkeypatch.setenv("NATS_URL", nats.url)
    monkeypatch.delenv("HOLDFAST_NATS_URL", raising=False)

    async def coroutine(data: dict[str, Any], publish: Publish) -> None:
        await publish("downloaded", {**data, "by": "coroutine"})

    def plain(data: Image, publish: Callable[..., None]) -> int:
        assert isinstance(data, Image)
        publish("downloaded", {"id": data.id, "by": "thread"})
        return data.id

    listener = Holdfast("listener", nats_url=nats.url)

    @listener.job(on="downloaded")
    async def listen(data: dict[str, Any]) -> None:
        seen.append(data["by"])

    first, second = consumer_app(coroutine, "first"), consumer_app(plain, "second")
    async with working(listener), working(first), working(second):
        await first.jobs["first"].enqueue({"id": 1})
        run = await second.jobs["second"].enqueue({"id": 2})
        assert await run.result(60) == 2
        assert sorted(await seen.wait(2)) == ["coroutine", "thread"]


@contextlib.contextmanager
def consumer_process(server: Server, namespace: str, root: Path) -> Iterator[Any]:
    """A real process that runs SCRIPT; gone afterwards."""
    [port] = free_ports(1)
    env = {**os.environ, "NATS_URL": server.url, "HOLDFAST_NAMESPACE": namespace}
    env.pop("HOLDFAST_NATS_URL", None)
    (root / "main.py").write_text(SCRIPT)
    env["HOLDFAST_WORKER_GRACE_SECONDS"] = "0.2"
    with (root / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(root / "main.py"), str(root / "notes"), str(port)],
            env=env,
            stdout=output,
            stderr=output,
        )
    try:
        yield process, port
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


async def test_consumer_process_works_and_drains(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """One call: it connects, is healthy on its port, runs, and ends with 0 on SIGTERM."""
    app = Holdfast("sender", nats_url=nats.url, namespace=namespace)

    @app.job(name="image-download")
    async def download(data: dict[str, Any]) -> str: ...  # type: ignore[empty-body]

    async with app:
        with consumer_process(nats, namespace, tmp_path) as (process, port):
            run = await download.enqueue({"n": 1})
            assert await run.result(60) == "handled"
            await until(lambda: asyncio.to_thread(_healthy, port), 10, "health")
            process.send_signal(signal.SIGTERM)
            await until(lambda: process.poll() is not None, 20, "the end")
            assert process.returncode == 0, (tmp_path / "output").read_text()


async def test_handler_that_does_not_stop_does_not_hold_the_exit_up(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """After the grace period the process ends, whatever a handler makes of its cancellation."""
    app = Holdfast("sender", nats_url=nats.url, namespace=namespace)

    @app.job(name="image-download")
    async def download(data: dict[str, Any]) -> str: ...  # type: ignore[empty-body]

    notes = tmp_path / "notes"
    async with app:
        with consumer_process(nats, namespace, tmp_path) as (process, _):
            await download.enqueue({"n": "stubborn"})
            await until(lambda: notes.exists() and "stubborn" in notes.read_text(), 20, "a start")
            process.send_signal(signal.SIGTERM)
            await until(lambda: process.poll() is not None, 20, "the end")
            assert "not me" in notes.read_text()
            assert process.returncode == 0, (tmp_path / "output").read_text()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
