"""The measures. Each takes one sample of one subject and gives named figures.

enqueue         runs/s   one at a time, each confirmed
enqueue_bulk    runs/s   in the fastest way the system offers
drain           runs/s   of jobs that do nothing, from a full queue, one worker process
drain_2         runs/s   the same with two processes, while both work
io              runs/s   of jobs that wait 0.1 s, one process, as many at a time as is sensible
latency_p50/99  ms       from before the enqueue to the first line of the job, queue empty
memory_idle     MB       resident, of all processes that one worker needs, nothing to do
memory_loaded   MB       the most of it while draining
cpu_idle        %        of one core, nothing to do
recovery        s        from kill -9 of a worker to the new start of the last run it held,
                         with a second worker standing by
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.plan import Subject
from benchmarks.services import Missing
from benchmarks.stage import Failed, Stage, cpu_seconds, memory_mb, pause, staged
from benchmarks.tally import ENDED, FIRST, LAST, STARTED
from holdfast.broker.streams import MAX_ACK_PENDING

UNITS = {
    "enqueue": "runs/s",
    "enqueue_bulk": "runs/s",
    "drain": "runs/s",
    "cpu_run": "µs",
    "drain_2": "runs/s",
    "io": "runs/s",
    "latency_p50": "ms",
    "latency_p99": "ms",
    "memory_idle": "MB",
    "memory_loaded": "MB",
    "cpu_idle": "%",
    "recovery": "s",
    "lateness_1000": "s",
    "lateness_10000": "s",
    "slots_due": "slots",
    "slots_missed": "slots",
    "slots_doubled": "slots",
}
MORE_IS_BETTER = frozenset({"enqueue", "enqueue_bulk", "drain", "drain_2", "io"})

PATIENCE_SECONDS = 60.0
DRAIN_SECONDS = 180.0
"""For the slowest system, because a queue has to be longer than the largest buffer."""
BUFFERED = MAX_ACK_PENDING
"""Acks that may be on their way: a server that syncs each of them is that far behind its workers
before they notice. Runs up to there are not counted."""
SUSTAINED = 20_000
"""Runs that are counted after that."""
BLOCKS = 60_000
"""A stream is stored in blocks of 8 MB, some 40,000 of these messages. A queue within one block is
read from memory."""
SETTLE_SECONDS = 4.0
STAGGER_SECONDS = 0.5
APART_SECONDS = 4.0
"""Between two starts where what is measured is a second or two: about what starting one takes."""
SECOND_SECONDS = 1.5
"""How long the first of two processes may work alone, until the second has started."""
HELD_RUNS = 10
NAPS_SPEED = 5_000

Figures = dict[str, float]


def enqueue(subject: Subject, seconds: float) -> Figures:
    """One at a time."""
    with staged(subject) as stage:
        sent = stage.send("one", seconds)
    return {"enqueue": sent["count"] / sent["seconds"]}


def drain(subject: Subject, seconds: float, processes: int = 1) -> Figures:
    """Fill a queue, then let workers empty it."""
    alone = SECOND_SECONDS if processes > 1 else 0.0
    count = int(subject.speed * (seconds * processes + alone))
    if subject.always:
        count = BUFFERED + SUSTAINED
    elif subject.broker == "nats":
        count = max(count, BLOCKS)
    with staged(subject) as stage:
        sent = stage.send("bulk", count)
        stage.start_workers(processes)
        watch = Watch(stage, count)
        rate = watch.until_empty(processes)
    if processes > 1:
        return {f"drain_{processes}": rate}
    figures = {"drain": rate, "memory_loaded": watch.peak_mb}
    if watch.cpu_run:
        figures["cpu_run"] = watch.cpu_run
    if "enqueue_bulk" in subject.measures:
        figures["enqueue_bulk"] = sent["count"] / sent["seconds"]
    return figures


def naps(subject: Subject, seconds: float) -> Figures:
    """Jobs that wait."""
    count = int(min(subject.speed, NAPS_SPEED) * seconds)
    with staged(subject) as stage:
        stage.send("naps", count)
        stage.start_workers(kind="naps")
        return {"io": Watch(stage, count).until_empty()}


def latency(subject: Subject, count: int) -> Figures:
    """How soon a run starts when there is nothing else to do."""
    with staged(subject) as stage:
        stage.start_workers()
        stage.send("latency", count)
        _until(stage, lambda: len(stage.tallies.waits()) >= count)
        waits = sorted(w / 1e6 for w in stage.tallies.waits())
    return {
        "latency_p50": statistics.median(waits),
        "latency_p99": waits[min(len(waits) - 1, int(len(waits) * 0.99))],
    }


def idle(subjects: list[Subject], seconds: float) -> dict[str, Figures | str]:
    """Memory and processor time of workers that have nothing to do, all side by side."""
    return _side_by_side(subjects, lambda subject: _idle(subject, seconds))


def _idle(subject: Subject, seconds: float) -> Figures:
    with staged(subject) as stage:
        stage.start_workers()
        stage.send("bulk", 1)
        _until(stage, lambda: stage.tallies.total(ENDED))
        time.sleep(SETTLE_SECONDS)
        processes = stage.processes()
        begin, used = time.monotonic(), cpu_seconds(processes)
        time.sleep(seconds)
        stage.check()
        share = (cpu_seconds(processes) - used) / (time.monotonic() - begin)
        return {"memory_idle": memory_mb(processes), "cpu_idle": share * 100}


def recovery(subjects: list[Subject], most: float) -> dict[str, Figures | str]:
    """How long runs of a killed worker wait; more than `most` is given as infinity."""
    return _side_by_side(subjects, lambda subject: _recovery(subject, most), APART_SECONDS)


def _recovery(subject: Subject, most: float) -> Figures:
    with staged(subject) as stage:
        stage.start_beside()
        stage.start_workers(kind="hold")
        stage.send("hold", HELD_RUNS)
        _until(stage, lambda: stage.tallies.total(STARTED) >= HELD_RUNS)
        dying, stage.workers = stage.workers, []
        stage.start_workers(kind="hold")
        time.sleep(SETTLE_SECONDS)
        before = stage.tallies.total(STARTED)
        standing_by, stage.workers = stage.workers, dying
        stage.kill_workers()
        begin = time.monotonic()
        stage.workers = standing_by
        while stage.tallies.total(STARTED) < before + HELD_RUNS:
            stage.check()
            if time.monotonic() - begin > most:
                return {"recovery": float("inf")}
            pause()
        return {"recovery": time.monotonic() - begin}


def _side_by_side(
    subjects: list[Subject], measure: Any, apart: float = STAGGER_SECONDS
) -> dict[str, Figures | str]:
    def tried(place: int) -> Figures | str:
        time.sleep(place * apart)  # starting is the one thing that needs the processor
        try:
            found: Figures = measure(subjects[place])
        except (Failed, Missing) as error:
            return str(error)
        return found

    with ThreadPoolExecutor(max(1, len(subjects))) as pool:
        found = list(pool.map(tried, range(len(subjects))))
    return {subject.name: figures for subject, figures in zip(subjects, found, strict=True)}


class Watch:
    """Looks on while workers empty a queue."""

    def __init__(self, stage: Stage, count: int) -> None:
        self._stage = stage
        self._count = count
        self._series: list[tuple[int, int]] = []
        self._first: tuple[int, float] | None = None
        self.peak_mb = 0.0
        self.cpu_run = 0.0
        """Microseconds of processor time per run, without those of the start."""

    def until_empty(self, processes: int = 1) -> float:
        """Wait until every run has ended; gives runs per second while all processes worked."""
        deadline = time.monotonic() + DRAIN_SECONDS
        looks = 0
        while (total := self._look()) < self._count:
            if time.monotonic() > deadline:
                raise Failed(f"{total} of {self._count} runs in {DRAIN_SECONDS:g} s")
            if looks % 20 == 0:
                self._stage.check()
                self.peak_mb = max(self.peak_mb, memory_mb(self._stage.processes()))
            looks += 1
            pause()
        return self._rate(processes)

    def _look(self) -> int:
        total = self._stage.tallies.total(ENDED)
        self._series.append((time.monotonic_ns(), total))
        if total and self._first is None:
            self._first = total, cpu_seconds(self._stage.processes())
        elif self._first and total >= self._count > self._first[0]:
            used = cpu_seconds(self._stage.processes()) - self._first[1]
            self.cpu_run = used / (total - self._first[0]) * 1e6
        return total

    def _rate(self, processes: int) -> float:
        firsts = [first for first in self._stage.tallies.of(FIRST) if first]
        if len(firsts) < processes:
            raise Failed(f"only {len(firsts)} of {processes} processes got work")
        begin, end = max(firsts), max(self._stage.tallies.of(LAST))
        if self._stage.subject.always:
            begin = max(begin, next(when for when, total in self._series if total >= BUFFERED))
        done = max((total for when, total in self._series if when <= begin), default=0)
        if end <= begin or done > 0.8 * self._count:
            raise Failed("the queue was empty before every process worked: too few runs")
        return (self._count - done) / ((end - begin) / 1e9)


def _until(stage: Stage, condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        stage.check()
        if time.monotonic() > deadline:
            raise Failed(f"nothing happened for {PATIENCE_SECONDS:g} s")
        pause()
