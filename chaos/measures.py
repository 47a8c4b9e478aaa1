"""Times of a chaos run: how long each fault was felt, the longest silence, how late slots were.

Recovery from a fault has two measures. `restarted`: the longest time from its start until a run it
interrupted was started again. `silence`: the longest time without any effect that overlaps the
fault. Neither is a violation: a lasting fault is felt.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Final

import msgspec

from chaos.effects import Line
from chaos.nemesis import Wound

FELT_SECONDS: Final = 30.0
"""How long after its end a fault may still show effects."""


class Felt(msgspec.Struct, frozen=True):
    """One fault and how it was felt; times count from the start of the run."""

    number: int
    kind: str
    target: str
    role: str
    began: float
    ended: float
    interrupted: int
    """Runs of the target that were started again elsewhere or later."""
    restarted: float | None
    silence: float
    error: str = ""


class Kind(msgspec.Struct, frozen=True):
    """All faults of one kind on one role."""

    kind: str
    role: str
    count: int
    interrupted: int
    restarted_median: float | None
    restarted_most: float | None
    silence_most: float


class Measures(msgspec.Struct, frozen=True):
    """All times of one run."""

    faults: tuple[Felt, ...]
    kinds: tuple[Kind, ...]
    longest_silence: float
    slots: int
    slot_late_median: float
    slot_late_p99: float
    slot_late_most: float


def measure(
    lines: Sequence[Line], wounds: Sequence[Wound], began: float, due: Mapping[str, float]
) -> Measures:
    """The times of one run; `due` says when each slot's mark was due, on the same clock."""
    times = sorted(line.at for line in lines if line.what == "effect")
    felt = [_felt(wound, lines, times, began) for wound in sorted(wounds, key=lambda w: w.began)]
    late = sorted(_lateness(lines, due))
    return Measures(
        tuple(felt),
        tuple(_kinds(felt)),
        round(max((b - a for a, b in pairwise(times)), default=0.0), 2),
        len(late),
        _quantile(late, 0.5),
        _quantile(late, 0.99),
        _quantile(late, 1.0),
    )


def _felt(wound: Wound, lines: Sequence[Line], times: Sequence[float], began: float) -> Felt:
    again = _restarts(wound, lines)
    fault = wound.fault
    return Felt(
        fault.number,
        fault.kind,
        fault.target,
        fault.role,
        round(wound.began - began, 2),
        round(wound.ended - began, 2),
        len(again),
        round(max(again), 2) if again else None,
        round(_silence(times, wound.began, wound.ended), 2),
        wound.error,
    )


def _kinds(felt: Sequence[Felt]) -> Iterator[Kind]:
    for role, kind in sorted({(f.role, f.kind) for f in felt}):
        mine = [f for f in felt if (f.role, f.kind) == (role, kind)]
        again = sorted(f.restarted for f in mine if f.restarted is not None)
        yield Kind(
            kind,
            role,
            len(mine),
            sum(f.interrupted for f in mine),
            round(median(again), 2) if again else None,
            again[-1] if again else None,
            max(f.silence for f in mine),
        )


def _restarts(wound: Wound, lines: Sequence[Line]) -> list[float]:
    """How long the runs that the target was executing had to wait for their next start."""
    open_runs: dict[str, Line] = {}
    again: list[float] = []
    limit = wound.ended + FELT_SECONDS
    for line in sorted(lines, key=lambda item: item.at):
        if line.at <= wound.began:
            if line.member == wound.fault.target and line.what == "start":
                open_runs[line.run] = line
            elif line.run in open_runs:
                del open_runs[line.run]
        elif line.at > limit:
            break
        elif line.what == "start" and line.run in open_runs:
            del open_runs[line.run]
            again.append(line.at - wound.began)
    return again


def _silence(times: Sequence[float], began: float, ended: float) -> float:
    """The longest gap between two effects that overlaps the fault."""
    first = max(0, bisect_left(times, began) - 1)
    last = min(len(times) - 1, bisect_right(times, ended))
    touching = times[first : last + 1]
    return max((b - a for a, b in pairwise(touching)), default=0.0)


def _lateness(lines: Sequence[Line], due: Mapping[str, float]) -> list[float]:
    """How late each slot had its first start."""
    seen: dict[str, float] = {}
    for line in lines:
        if line.what == "start" and line.mark in due and line.mark not in seen:
            seen[line.mark] = line.at - due[line.mark]
    return list(seen.values())


def _quantile(ordered: Sequence[float], part: float) -> float:
    if not ordered:
        return 0.0
    return round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 3)
