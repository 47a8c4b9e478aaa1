"""Debouncing: of a burst of runs only the last one runs, once it is quiet.

The runs of a key share one scheduled message. An arriving run replaces the one that waits and moves
its time: `quiet` seconds after its own acceptance, but at the latest `latest` seconds after the
first of the burst was accepted. When it is due, the server delivers it, and the next run begins a
new burst.

`decide` says what an arriving message does to the one that waits; `worker.debouncing` writes it by
compare-and-swap. The mark in a waiting message's headers names the run that it replaced. After a
crash, that is how the replaced run can still be ended.

Guaranteed: of two runs, the one that the server stored later wins, in whichever order workers
receive them. Each run is either executed or ends as cancelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from holdfast.durations import Duration, seconds
from holdfast.errors import DefinitionError, InvalidInput
from holdfast.model.codec import whole_number
from holdfast.names import H_DEBOUNCE

LONGEST: Final = 30 * 86_400.0
"""A month: a run that waits longer is a schedule."""
_DIGITS: Final = 19
"""Nanoseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Debounce:
    """The rule for when the last run of a burst starts."""

    quiet: float
    """Seconds that must pass without another run."""
    per: str = ""
    """A member of the payload: each of its values is debounced by itself."""
    latest: float = LONGEST
    """Seconds after the first of a burst, however long the burst lasts."""


def make_debounce(
    job: str, debounce: Duration | None, per: str, at_latest: Duration | None
) -> Debounce | None:
    """The options of `@app.job`, checked."""
    if debounce is None:
        if per or at_latest is not None:
            raise DefinitionError(
                f"job {job!r}: per= and at_latest= belong to debounce=; the per= of a limit is "
                "written in Limit(...)"
            )
        return None
    try:
        quiet = seconds(debounce, "debounce")
        latest = seconds(at_latest, "at_latest") if at_latest is not None else LONGEST
    except InvalidInput as error:
        raise DefinitionError(f"job {job!r}: {error}") from None
    if not 0 < quiet <= latest <= LONGEST:
        raise DefinitionError(
            f"job {job!r}: debounce must be more than 0, at_latest at least that long and at most "
            "30 days"
        )
    if not isinstance(per, str):
        raise DefinitionError(f"job {job!r}: per= is the name of a member of the payload")
    return Debounce(quiet, per, latest)


class BurstMark(NamedTuple):
    """What a waiting message says about its burst."""

    first: int
    """When the first of the burst was stored, in nanoseconds."""
    stored: int
    """When this run was stored, in nanoseconds."""
    replaced: str = ""
    """The run that it replaced."""

    def __str__(self) -> str:
        return f"{self.first} {self.stored} {self.replaced}".rstrip()


def read_mark(headers: Mapping[str, str]) -> BurstMark | None:
    """The mark of a message; None: it has none, or not one of ours."""
    parts = headers.get(H_DEBOUNCE, "").split(" ")
    numbers = [whole_number(part, 0, digits=_DIGITS) for part in parts[:2]]
    if len(numbers) < 2 or not all(numbers):
        return None
    return BurstMark(numbers[0], numbers[1], parts[2] if len(parts) > 2 else "")


class BurstStep(NamedTuple):
    """The effect of an arriving run."""

    mark: BurstMark | None
    """The mark of the arriving message if it is to wait; None if the waiting one stays."""
    due: float = 0.0
    end: str = ""
    """The run that ends as replaced."""


def decide(
    rule: Debounce, run: str, stored: int, waiting: tuple[str, BurstMark] | None
) -> BurstStep:
    """What happens to the run that waits when a run arrives that was stored at an instant."""
    if waiting is None:
        return BurstStep(BurstMark(stored, stored), stored / 1e9 + rule.quiet)
    other, mark = waiting
    if other == run:
        return BurstStep(
            None, end=mark.replaced
        )  # delivered again: the replaced run may not have been ended yet
    if mark.stored > stored:
        return BurstStep(None, end=run)
    first = min(mark.first, stored)
    due = min(stored / 1e9 + rule.quiet, first / 1e9 + rule.latest)
    return BurstStep(BurstMark(first, stored, other), due, end=other)
