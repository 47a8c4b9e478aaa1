"""Keeps processes running: starts them, replaces those that ended, stops them in order.

    start the first ──► it is up ──► start the others ──► (signal) SIGTERM to all ──► wait ──► exit

A process that died is restarted after a wait that grows while it keeps dying and is reset once it
has lived for a while; one that exited cleanly (its share of runs is done) is replaced at once. The
first process starts alone, so that a configuration error is reported once, not by each.

Gives up, non-zero, if a process failed to come up five times in a row, or reports at its first
start that its configuration cannot work: retrying would not help. A process that worked and then
keeps dying is always restarted.

A process is up when the file that it announces exists (a worker's health socket) or, without one,
when it has lived for `UP_SECONDS`. It dies with us, however we end (`holdfast.child`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from holdfast.child import Child, ending
from holdfast.clock import Clock, SystemClock
from holdfast.errors import HoldfastError
from holdfast.health import Health

log = logging.getLogger("holdfast.supervisor")

CONFIG_EXIT = 78
"""The exit code of a process whose configuration or app cannot work: EX_CONFIG of sysexits.h."""
FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 5.0
"""First and longest wait before a process that died is restarted; doubles in between."""
STABLE_SECONDS = 10.0
"""A process that has lived this long no longer counts as dying at once: a wrong configuration shows
sooner."""
UP_SECONDS = 5.0
"""A process that announces nothing is up after this: most mistakes end it sooner."""
STARTS = 5
"""Failed starts in a row after which retrying would not help."""
ANSWER_SECONDS = 2.0
"""How long a process may take to answer; a probe waits for one second or more."""
_LOOK_SECONDS = 0.02
"""How often to check whether a starting process is up: the others wait for the first."""


class GivenUp(HoldfastError):
    """A process cannot be kept running."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A process to run: its name in the log, its command, its additional environment."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    announces: Path | None = None
    """A file that exists once the process is up."""


class Restarts:
    """Decides when to restart a process that ended, and when to give up."""

    def __init__(self) -> None:
        self._deaths = 0
        self._failed_starts = 0
        self._was_up = False

    def after(self, code: int, *, lived: float, up: bool) -> float | None:
        """Seconds to wait before the next start; None to give up."""
        self._was_up = self._was_up or up
        self._failed_starts = 0 if up else self._failed_starts + 1
        if code == 0 and up:
            self._deaths = 0
            return 0.0
        if self._failed_starts >= STARTS or (code == CONFIG_EXIT and not self._was_up):
            return None
        self._deaths = 0 if lived >= STABLE_SECONDS else self._deaths + 1
        wait: float = FIRST_WAIT_SECONDS * 2 ** max(0, self._deaths - 1)
        return min(wait, LONGEST_WAIT_SECONDS)


class KeptProcess:
    """Keeps one process running while `run` runs."""

    def __init__(
        self, spec: Spec, *, clock: Clock | None = None, output: IO[bytes] | None = None
    ) -> None:
        self.spec = spec
        self.child: Child | None = None
        self.starts = 0
        self.up = asyncio.Event()
        """Set while the process is up."""
        self.trouble = "not started yet"
        """Why no process runs; empty while one does."""
        self._clock = clock or SystemClock()
        self._output = output
        self._restarts = Restarts()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Start it, and restart it whenever it ends, until `stop`; raises `GivenUp`."""
        while not self._stopping.is_set():
            began = self._clock.monotonic()
            code = await self._live()
            if self._stopping.is_set():
                return
            lived = self._clock.monotonic() - began
            wait = self._restarts.after(code, lived=lived, up=self._came_up(lived))
            if wait is None:
                why = "its reason is logged above" if code == CONFIG_EXIT else self.trouble
                raise GivenUp(f"{self.spec.name} cannot be started: {why}")
            await self._pause(code, wait)

    def stop(self) -> None:
        """Ask the process to shut down and start no other; `run` returns when it is gone."""
        self._stopping.set()
        if self.child:
            self.child.terminate()

    def kill(self) -> None:
        """Kill the process, without a successor."""
        self._stopping.set()
        if self.child:
            self.child.kill()

    async def _live(self) -> int:
        """One process from its start to its end; returns its exit code."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def on_exit() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(ended.set)

        if self.spec.announces:
            self.spec.announces.unlink(missing_ok=True)
        env = {**os.environ, **self.spec.env}
        name = self.spec.name
        child = Child(self.spec.command, name=name, env=env, output=self._output, on_exit=on_exit)
        self.child, self.trouble = child, ""
        self.starts += 1
        looking = asyncio.create_task(self._look_up())
        try:
            await ended.wait()
        finally:
            looking.cancel()
            self.up.clear()
        code = child.code or 0
        self.trouble = ending(code)
        return code

    async def _look_up(self) -> None:
        if self.spec.announces is None:
            await self._clock.sleep(UP_SECONDS)
        else:
            while not self.spec.announces.exists():
                await self._clock.sleep(_LOOK_SECONDS)
        self.up.set()

    def _came_up(self, lived: float) -> bool:
        if self.spec.announces is None:
            return lived >= UP_SECONDS
        return self.spec.announces.exists()

    async def _pause(self, code: int, wait: float) -> None:
        pid = self.child.pid if self.child else 0
        if code == 0:
            log.info("%s (pid %d) has done its share of runs: replaced", self.spec.name, pid)
        else:
            text = "%s (pid %d) ended, %s: started again in %g s"
            log.warning(text, self.spec.name, pid, self.trouble, wait)
        waiting = [
            asyncio.create_task(self._clock.sleep(wait)),
            asyncio.create_task(self._stopping.wait()),
        ]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()


class Supervisor:
    """Keeps several processes running until stopped."""

    def __init__(
        self, specs: Sequence[Spec], *, stop_seconds: float, output: IO[bytes] | None = None
    ) -> None:
        """A process that has not ended `stop_seconds` after it was asked to is killed."""
        self.keepers = [KeptProcess(spec, output=output) for spec in specs]
        self._stop_seconds = stop_seconds
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End `run`: ask every process to shut down."""
        self._stopping.set()

    def kill(self) -> None:
        """Kill every process."""
        for keeper in self.keepers:
            keeper.kill()

    async def run(self) -> int:
        """Run until stopped; returns the exit code: 0, 1 if a process failed or was killed."""
        tasks = [asyncio.create_task(self._start(n)) for n in range(len(self.keepers))]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            failed = [task for task in done - {stopping} if task.exception()]
            for task in failed:
                log.error("%s", task.exception())
            return await self._end(tasks) or (1 if failed else 0)
        finally:
            self.kill()
            for task in (stopping, *tasks):
                task.cancel()
            await asyncio.gather(stopping, *tasks, return_exceptions=True)

    async def _start(self, number: int) -> None:
        if number:
            await self.keepers[0].up.wait()
        if not self._stopping.is_set():
            await self.keepers[number].run()

    async def _end(self, tasks: list[asyncio.Task[None]]) -> int:
        self._stopping.set()
        for keeper in self.keepers:
            keeper.stop()
            keeper.up.set()  # unblock those that wait for the first
        _, late = await asyncio.wait(tasks, timeout=self._stop_seconds) if tasks else ((), ())
        if late:
            log.error("%d processes did not end in time: killed", len(late))
        return 1 if late else 0


# ---- health of all processes


@dataclass(frozen=True, slots=True)
class Answer:
    """What one process reported about itself."""

    name: str
    ready: bool
    problems: list[str]
    facts: dict[str, Any]


class Merged:
    """The health and the metrics of several processes as one, on one port.

    Each process serves its own on a Unix socket and is queried per request, so answers are never
    stale. Ready means all of them are. Metrics are all series of all processes, with the process's
    number as the label `process`. A process that does not answer in time is a problem and its
    series are left out; it never fails the whole answer.
    """

    def __init__(self, keepers: Sequence[KeptProcess]) -> None:
        self._keepers = keepers

    async def health(self) -> Health:
        """The health of all processes."""
        answers = await asyncio.gather(*(self._ready(keeper) for keeper in self._keepers))
        return Health(
            ready=all(answer.ready for answer in answers),
            problems=[f"{a.name}: {problem}" for a in answers for problem in a.problems],
            metrics=self.metrics,
            facts={"processes": [answer.facts for answer in answers]},
        )

    async def metrics(self) -> bytes:
        """Every series of every process."""
        texts = await asyncio.gather(*(self._metrics(keeper) for keeper in self._keepers))
        return merge(enumerate(texts))

    async def _ready(self, keeper: KeptProcess) -> Answer:
        name = keeper.spec.name
        if keeper.trouble or keeper.child is None:
            return Answer(name, False, [f"does not run ({keeper.trouble})"], {})
        pid = keeper.child.pid
        if not keeper.up.is_set():
            return Answer(name, False, ["is starting"], {"pid": pid})
        try:
            found = json.loads(await _get(keeper.spec.announces, "/health/ready"))
        except (OSError, TimeoutError, ValueError):
            return Answer(name, False, [f"does not answer (pid {pid})"], {"pid": pid})
        ready, problems = bool(found.pop("ready")), list(found.pop("problems"))
        return Answer(name, ready, problems, {"pid": pid, **found})

    async def _metrics(self, keeper: KeptProcess) -> str:
        if not keeper.up.is_set():
            return ""
        try:
            return (await _get(keeper.spec.announces, "/metrics")).decode()
        except (OSError, TimeoutError):
            return ""


def merge(texts: Iterable[tuple[int, str]]) -> bytes:
    """Merge Prometheus texts, labelling each series with the number of its text as `process`."""
    families: dict[str, Metric] = {}
    for number, text in texts:
        for family in text_string_to_metric_families(text):
            kept = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {**sample.labels, "process": str(number)}
                kept.add_sample(sample.name, labels, sample.value)
    return generate_latest(cast(CollectorRegistry, _Families(families.values())))


class _Families(Collector):
    """The part of a registry that writing the text needs."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


async def _get(path: Path | None, target: str) -> bytes:
    """The body of a GET over a Unix socket, regardless of its status."""
    async with asyncio.timeout(ANSWER_SECONDS):
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            writer.write(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            await writer.drain()
            answer = await reader.read()
        finally:
            writer.close()
    return answer.partition(b"\r\n\r\n")[2]
