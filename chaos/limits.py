"""What limits promise, judged by the effects outside the system.

A mark of a limited job names its key: `narrow-7 @1`. An attempt counts from its start to its effect
or its failure, but no longer than until another holder of the same run starts: a replaced holder
may still compute, and is fenced. Between the death of a worker and the next start of its run, the
run keeps its place.

* over       more runs of a key at the same time than its limit allows
* overtaken  a run of an ordered key that started before an earlier one had its effect

Pure, like the checker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from chaos.effects import Line
from chaos.history import Operation

NARROW: Final = 2
"""Places of each key of `narrow`."""
KEYS: Final = 3
"""Few, so that runs wait for each other."""


def lane_mark(name: str, lane: int) -> str:
    """The mark of a run of a limited job."""
    return f"{name} @{lane}"


def lane_of(mark: str) -> tuple[str, str] | None:
    """Job and key of a limited job's mark, or None."""
    name, found, lane = mark.partition(" @")
    return (name.partition("-")[0], lane) if found else None


class Span(NamedTuple):
    """The time in which a run certainly had its claim."""

    run: str
    began: float
    ended: float


def spans(lines: Sequence[Line]) -> Iterator[tuple[tuple[str, str], Span]]:
    """The attempts of limited jobs, by job and key."""
    by_run: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if lane_of(line.mark):
            by_run[line.run].append(line)
    for run, found in by_run.items():
        where = lane_of(found[0].mark)
        starts = [line for line in found if line.what == "start"]
        for number, start in enumerate(starts):
            later = [one.at for one in starts[number + 1 :]]
            own = [line.at for line in found if line.what != "start" and line.epoch == start.epoch]
            if where and (later or own):
                yield where, Span(run, start.at, min(later + own))


def over(lines: Sequence[Line], allowed: int) -> Iterator[tuple[str, str]]:
    """Keys that had more runs at the same time than allowed, with the story."""
    by_key: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for where, span in spans(lines):
        if where[0] in ("narrow", "sorted"):
            by_key[where].append(span)
    for (job, key), found in by_key.items():
        most = 1 if job == "sorted" else allowed
        for span in found:
            at_once = {s.run for s in found if s.began <= span.began < s.ended}
            if len(at_once) > most:
                yield f"{job} {key}", f"{len(at_once)} at once: {', '.join(sorted(at_once))}"
                break


def overtaken(operations: Iterable[Operation], lines: Sequence[Line]) -> Iterator[tuple[str, str]]:
    """Runs of `sorted` that started before an earlier one of their key had its effect.

    A key's runs are sent one after the other, so the order of the answers is that of acceptance.
    """
    first: dict[str, float] = {}
    effect: dict[str, float] = {}
    for line in lines:
        if line.what == "start":
            first.setdefault(line.mark, line.at)
        elif line.what == "effect":
            effect.setdefault(line.mark, line.at)
    by_key: dict[str, list[str]] = defaultdict(list)
    for operation in sorted(operations, key=lambda one: one.answered):
        where = lane_of(operation.marks[0])
        if operation.required and where and where[0] == "sorted":
            by_key[where[1]].append(operation.marks[0])
    for marks in by_key.values():
        for before, after in pairwise(marks):
            if before in effect and after in first and first[after] < effect[before]:
                yield (
                    after,
                    f"started {effect[before] - first[after]:.2f} s before {before} was done",
                )
