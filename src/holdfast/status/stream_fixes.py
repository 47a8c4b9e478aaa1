"""Putting drifted streams right, as far as that can lose nothing.

Safe: what adds (subjects, features, replicas, a longer age). Not safe, and left to a person: what
the server refuses to change, and what would remove messages that an operator chose to keep.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from holdfast.broker.streams import Difference, Topology

_FIXED_FOR_EVER: Final = frozenset({"retention", "storage"})
_TASTE: Final = frozenset({"max_age", "duplicate_window", "num_replicas", "max_consumers"})
"""What an operator may have chosen otherwise: no promise breaks by it at once."""


def is_grave(difference: Difference) -> bool:
    """Whether a promise rests on it."""
    return difference.key not in _TASTE


def is_safe(difference: Difference) -> bool:
    """Whether it can be put right without losing anything."""
    key, actual, wanted = difference.key, difference.actual, difference.wanted
    if not key or key in _FIXED_FOR_EVER:
        return False
    if key == "max_age":
        return bool(actual) and actual < wanted
    if key == "num_replicas":
        return bool(actual < wanted)
    return True


def why_by_hand(difference: Difference) -> str:
    """What to do about a difference that is not put right by itself."""
    if difference.key in _FIXED_FOR_EVER:
        return "a server never changes it: drain the jobs, delete the stream, restart the workers"
    if difference.key == "max_age":
        return "what is older would be removed: change the configuration, or the stream by hand"
    return "copies would be removed: change HOLDFAST_REPLICAS, or the stream by hand"


def changes(differences: Iterable[Difference]) -> dict[str, dict[str, Any]]:
    """For each stream the members to change, of those that are safe."""
    found: dict[str, dict[str, Any]] = {}
    for one in differences:
        if is_safe(one):
            value = one.wanted
            if one.key == "subjects":
                value = [*one.actual, *(s for s in one.wanted if s not in one.actual)]
            found.setdefault(one.stream, {})[one.key] = value
    return found


async def fix(topology: Topology) -> list[str]:
    """Put right what is safe; returns the streams that were changed."""
    planned = changes(await topology.differences())
    for stream, members in planned.items():
        await topology.update_stream(stream, members)
    return list(planned)
