"""A dead worker is noticed whoever listens, and whoever has its sockets.

Neither the timeout nor `ack_wait` can help in these tests: both are longer than a test waits. What
brings the runs back is the keeper's report, the server's word on the dead connection, and the
coordinator that listens to the dead worker's inbox.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from holdfast import Run
from holdfast.broker import Broker
from holdfast.config import ConnectionConfig
from holdfast.server import Server
from tests.faults.app import sender
from tests.faults.effects import Effects
from tests.faults.processes import Process, WorkerProcess, until
from tests.faults.scheduling import rounds
from tests.faults.test_liveness import IN_FLIGHT, _watching, coordinators

KILLS = int(os.environ.get("HOLDFAST_TEST_KILLS", "0")) or rounds(2, 20)
PATIENT = {
    "HOLDFAST_LIVENESS_TIMEOUT_SECONDS": "300",
    "HOLDFAST_WORKER_ACK_WAIT_SECONDS": "600",
}


@asynccontextmanager
async def tapped(url: str) -> AsyncIterator[None]:
    """Somebody listens to every subject."""
    async with Broker(ConnectionConfig(nats_url=url), name="tap") as broker:
        await broker.listen(">", lambda *_: None)
        await broker.flush()
        yield


class Story:
    """Workers killed one after the other, with runs in flight."""

    def __init__(self, url: str, namespace: str, root: Path) -> None:
        self._given = (url, namespace, root)
        self.effects = Effects(root / "effects")
        self.app = sender(url, namespace)
        self.gaps: list[float] = []

    def _worker(self) -> WorkerProcess:
        url, namespace, root = self._given
        log = root / f"worker-{time.monotonic_ns()}.log"
        return WorkerProcess(url, namespace, root / "effects", log, **PATIENT)

    async def kill(
        self, job: str, count: int, how: Callable[[WorkerProcess], None] = WorkerProcess.kill
    ) -> None:
        """Kill workers; each time every run in flight starts again, once."""
        victim = self._worker()
        try:
            for number in range(count):
                await victim.ready()
                runs = await self._in_flight(job, number)
                victim, dead = self._worker(), victim
                await victim.ready()
                await asyncio.sleep(0.5)  # the index has what was taken 0.2 s ago
                killed = time.time()
                how(dead)
                dead.process.wait()
                self.effects.open(f"gate-{number}")
                for run in runs:
                    await run.result(timeout=60)
                again = [s for s in self.effects.starts() if s["at"] > killed]
                assert {start["run"] for start in again} == {run.id for run in runs}
                self.gaps += [start["at"] - killed for start in again]
        finally:
            victim.close()
            await self.app.close()
        assert len(self.gaps) == count * IN_FLIGHT
        assert set(self.effects.starts_per_run().values()) == {2}

    async def replace_only_worker(self, job: str) -> int:
        """Kill the only worker with its keeper, then start another; returns the first's pid."""
        victim = self._worker()
        try:
            await victim.ready()
            runs = await self._in_flight(job, 0)
            victim.kill_all()
            victim.process.wait()
            killed, victim = victim.pid, self._worker()
            self.effects.open("gate-0")
            for run in runs:
                await run.result(timeout=60)
        finally:
            victim.close()
            await self.app.close()
        assert set(self.effects.starts_per_run().values()) == {2}
        return killed

    async def _in_flight(self, job: str, number: int) -> list[Run[object]]:
        before = len(self.effects.starts())
        found = self.app.jobs[job]
        requests = [
            found.request(key=f"{number}-{n}", gate=f"gate-{number}") for n in range(IN_FLIGHT)
        ]
        runs = await found.enqueue_many(requests)
        await until(lambda: len(self.effects.starts()) == before + IN_FLIGHT, 30, "all in flight")
        return runs

    @property
    def told(self) -> str:
        return (
            f"{len(self.gaps)} runs restarted: median {statistics.median(self.gaps):.2f} s, "
            f"max {max(self.gaps):.2f} s after the kill"
        )


@pytest.fixture
def story(nats: Server, namespace: str, tmp_path: Path) -> Iterator[Story]:
    """Whatever its runs left behind is gone afterwards."""
    yield Story(nats.url, namespace, tmp_path)
    left = tmp_path / "effects" / "children"
    for child in left.read_text().split() if left.exists() else ():
        with suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)


@contextmanager
def judged(nats: Server, namespace: str, root: Path) -> Iterator[list[Process]]:
    """Two coordinators."""
    with coordinators(2, nats.url, namespace, root) as judges:
        yield judges


@pytest.mark.timeout(900)
async def test_worker_and_keeper_killed_together_are_noticed(
    nats: Server, namespace: str, tmp_path: Path, story: Story, report: Callable[[str], None]
) -> None:
    """Nobody is left to say a word: the server's word on the connection is enough."""
    with judged(nats, namespace, tmp_path) as judges:
        await _watching(judges)
        await story.kill("held", KILLS, WorkerProcess.kill_all)
        said = "".join(judge.text() for judge in judges)
    report(f"{KILLS} workers killed with their keepers, {story.told}")
    assert said.count("its server has no connection") == KILLS


@pytest.mark.timeout(900)
async def test_tap_on_everything_blinds_nobody(
    nats: Server, namespace: str, tmp_path: Path, story: Story, report: Callable[[str], None]
) -> None:
    """Somebody listens to `>`: the dead are noticed, and their pull requests swallow nothing."""
    async with tapped(nats.url):
        with judged(nats, namespace, tmp_path) as judges:
            await _watching(judges)
            await story.kill("held", KILLS, WorkerProcess.kill_all)
            said = "".join(judge.text() for judge in judges)
    report(f"{KILLS} workers killed with their keepers under a tap, {story.told}")
    assert said.count("its server has no connection") == KILLS


@pytest.mark.timeout(900)
async def test_keeper_reports_its_dead_worker_under_a_tap(
    nats: Server, namespace: str, tmp_path: Path, story: Story, report: Callable[[str], None]
) -> None:
    """The keeper lives: its report is taken up by one coordinator, and no inbox swallows a run."""
    async with tapped(nats.url):
        with judged(nats, namespace, tmp_path) as judges:
            await _watching(judges)
            await story.kill("held", KILLS)
            said = "".join(judge.text() for judge in judges)
    report(f"{KILLS} workers killed under a tap, {story.told}")
    assert said.count("is lost: its process is gone") >= KILLS


@pytest.mark.timeout(900)
async def test_children_with_a_dead_workers_sockets_hide_nothing(
    nats: Server, namespace: str, tmp_path: Path, story: Story, report: Callable[[str], None]
) -> None:
    """Handlers leave children that were forked behind Python's back and have every socket: the
    server sees the connection stand, and the keeper knows better."""
    with judged(nats, namespace, tmp_path) as judges:
        await _watching(judges)
        await story.kill("forking", KILLS)
        said = "".join(judge.text() for judge in judges)
    report(f"{KILLS} workers killed whose children have their sockets, {story.told}")
    assert said.count("is lost: its process is gone: its keeper saw it end") >= KILLS


@pytest.mark.timeout(200)
async def test_only_worker_is_judged_as_soon_as_another_can_take_over(
    nats: Server, namespace: str, tmp_path: Path, story: Story
) -> None:
    """Killed with its keeper while no other worker lives: its runs start again on the next one."""
    with judged(nats, namespace, tmp_path) as judges:
        await _watching(judges)
        killed = await story.replace_only_worker("held")
        said = "".join(judge.text() for judge in judges)
    assert len(re.findall(rf"-{killed}-\w+ is lost: its process is gone", said)) == 1, said
