"""A process that is to end ends, whatever state its connection is in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.server import Server
from tests.faults.conftest import QUICK
from tests.faults.processes import ROOT, Process
from tests.support import until

EMBEDDED = """
import asyncio, sys
from holdfast import Holdfast, Worker

async def main():
    app = Holdfast("shop", nats_url=sys.argv[1], namespace=sys.argv[2])
    for number in range(20):
        async def work():
            await asyncio.sleep(60)
        app.job(name=f"work-{number}")(work)
    worker = Worker(app)
    task = asyncio.create_task(worker.run())
    while not worker.pulling:
        await asyncio.sleep(0.02)
    await app.jobs["work-0"].enqueue()

if sys.argv[3] == "uvloop":
    import uvloop
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
else:
    asyncio.run(main())
print("ended")
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_program_with_an_embedded_worker_ends(nats: Server, namespace: str, loop: str) -> None:
    """A loop that ends cancels the connection's own tasks, too: nobody waits for them for ever."""
    command = [sys.executable, "-c", EMBEDDED, nats.url, namespace, loop]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr


@pytest.mark.parametrize("role", ["control", "worker"])
@pytest.mark.parametrize("trouble", [signal.SIGKILL, signal.SIGSTOP])
async def test_role_ends_while_nats_is_away(
    role: str, trouble: signal.Signals, namespace: str, tmp_path: Path
) -> None:
    """SIGTERM ends a process that has lost its server, or whose server has frozen."""
    with Server(fast=True) as server:
        process = Process(
            [role, "tests.faults.app:app"],
            server.url,
            namespace,
            tmp_path / "log",
            EFFECTS=str(tmp_path / "effects"),
            **QUICK,
        )
        try:
            ready = "at a time" if role == "worker" else "leads"
            await until(lambda: ready in process.text() or not process.running, 20, "a start")
            os.kill(server.pid, trouble)
            process.signal(signal.SIGTERM)
            assert await process.stopped(60) in (0, 1), process.text()
        finally:
            process.close()
            os.kill(server.pid, signal.SIGCONT) if trouble is signal.SIGSTOP else None
