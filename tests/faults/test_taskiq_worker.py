"""A `taskiq worker` whose server dies, or cannot be reached any more."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.server import Server
from tests.faults.taskiq_processes import TaskiqProcess, children, worker
from tests.integration.taskiq_support import make_broker
from tests.support import until

Report = Callable[[str], None]


class Sender:
    """Sends `note` from the test's own process."""

    def __init__(self, url: str, namespace: str, root: Path) -> None:
        self.broker = make_broker(url, namespace, durable="taskiq_durable")
        self._effects = root / "effects"
        self._note = self.broker.register_task(_note, task_name="note")

    async def send(self, *numbers: int) -> None:
        await asyncio.gather(*(self._note.kiq(number) for number in numbers))

    def effects(self) -> Counter[int]:
        """How often each was executed."""
        text = self._effects.read_text() if self._effects.exists() else ""
        return Counter(int(line) for line in text.split())


async def _note(number: int) -> None: ...


async def _restart(server: Server) -> float:
    server.kill()
    await asyncio.to_thread(server.restart)
    return time.monotonic()


@pytest.mark.timeout(300)
async def test_worker_goes_on_after_the_server_was_killed(
    namespace: str, tmp_path: Path, report: Report
) -> None:
    """kill -9 of NATS and a restart, three times: everything sent is executed, the last at once."""
    took = []
    with Server(fast=True) as server:
        sender = Sender(server.url, namespace, tmp_path)
        await sender.broker.startup()
        with worker(server.url, namespace, tmp_path) as process:
            await process.ready()
            for turn in range(3):
                first = turn * 1000
                await sender.send(*range(first, first + 200))
                restarted = await _restart(server)
                await until(lambda: sender.broker.connection.connected, 20, "the sender")
                await sender.send(*range(first + 200, first + 300))
                await until(lambda n=first: n + 299 in sender.effects(), 40, "the last one")
                took.append(time.monotonic() - restarted)
                wanted = set(range(first, first + 300))
                await until(lambda w=wanted: w <= set(sender.effects()), 60, "all of them")
        await sender.broker.shutdown()
    counts = sender.effects()
    twice = sum(1 for count in counts.values() if count > 1)
    report(
        f"NATS killed 3 times: {len(counts)} executed, 0 lost, {twice} twice; "
        f"consuming again after {', '.join(f'{t:.2f}' for t in took)} s"
    )


@pytest.mark.timeout(300)
async def test_worker_that_cannot_reconnect_ends_and_is_replaced(
    namespace: str, tmp_path: Path
) -> None:
    """Closed for good means SIGTERM to itself: taskiq starts another, which works again."""
    with Server(fast=True) as server:
        sender = Sender(server.url, namespace, tmp_path)
        await sender.broker.startup()
        with worker(server.url, namespace, tmp_path, RECONNECTS="2") as process:
            await process.ready()
            [before] = _receivers(process)
            server.kill()
            await until(lambda: not process.ready_file.exists(), 30, "not ready any more")
            await until(lambda: "ending this process" in process.text(), 30, "giving up")
            await until(lambda: not Path(f"/proc/{before}").exists(), 30, "the end of it")
            await asyncio.to_thread(server.restart)
            await until(lambda: sender.broker.connection.connected, 20, "the sender")
            await sender.send(1)
            await until(lambda: 1 in sender.effects(), 60, "the new one")
        await sender.broker.shutdown()
    assert before != os.getpid()


def _receivers(process: TaskiqProcess) -> list[int]:
    """The children that execute; taskiq's own helper processes are no receivers."""
    found = []
    for pid in children(process.pid):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"resource_tracker" not in line:
            found.append(pid)
    return found


async def test_worker_without_a_server_says_so_in_one_line(namespace: str, tmp_path: Path) -> None:
    """What could not be reached and what to do, and no traceback; taskiq sees it fail."""
    with Server(fast=True) as server:
        url = server.url
    command = ["worker", "tests.faults.taskiq_app:broker", "--workers", "1", "--max-fails", "1"]
    process = TaskiqProcess(command, url, namespace, tmp_path / "worker.log")
    try:
        assert await process.stopped() != 0
    finally:
        for child in children(process.pid):
            os.kill(child, 9)
        process.close()
    log = process.text()
    assert "Traceback" not in log
    [told] = [line for line in log.splitlines() if "cannot" in line]
    assert f"cannot start, ending this process: cannot reach NATS at {url}" in told
    assert "'holdfast server', or give another address" in told
