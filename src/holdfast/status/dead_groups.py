"""Dead letters that died of the same thing, together: by job and by the kind of their error.

Grouped are the newest `LOOK` letters, so that looking costs the same however many there are; the
totals by job come from the server and are complete.
"""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.client import Client
from holdfast.model.run import fingerprint
from holdfast.status.dead import DeadFilter, DeadLetter, DeadLetters
from holdfast.status.messages import subject_counts

LOOK: Final = 1_000


class DeadGroup(msgspec.Struct, frozen=True):
    """Letters of one job with one kind of error, newest first."""

    group: str
    job: str
    kind: str
    """The error with its numbers and quoted parts blanked."""
    letters: tuple[DeadLetter, ...]


class DeadGroups(msgspec.Struct, frozen=True):
    """What was grouped, and what there is in all."""

    groups: list[DeadGroup]
    looked: int
    totals: dict[tuple[str, str], int]
    """By group and job."""

    @property
    def total(self) -> int:
        return sum(self.totals.values())


async def dead_groups(client: Client, wanted: DeadFilter, look: int = LOOK) -> DeadGroups:
    """The newest letters that match, by job and kind; the largest group first."""
    letters = await DeadLetters(client).list(wanted, look)
    found: dict[tuple[str, str, str], list[DeadLetter]] = {}
    for letter in letters:
        kind = fingerprint(letter.error) or letter.reason
        found.setdefault((letter.group, letter.job, kind), []).append(letter)
    groups = [DeadGroup(*key, tuple(group)) for key, group in found.items()]
    groups.sort(key=lambda one: (-len(one.letters), one.group, one.job, one.kind))
    return DeadGroups(groups, len(letters), await dead_totals(client))


async def dead_totals(client: Client) -> dict[tuple[str, str], int]:
    """How many letters each job has."""
    names = client.broker.names
    counts = await subject_counts(client.broker, names.dead, names.dead_letter("*", "*"))
    return {where: n for s, n in counts.items() if (where := names.parse_dead(s))}
