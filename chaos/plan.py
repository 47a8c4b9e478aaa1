"""The plan of a chaos run: which fault hits whom, when and for how long. Pure data, from a seed.

Guaranteed: the same seed, length and targets give the same plan on every machine. Faults are dealt
from a deck that holds every kind a role can suffer, more often for roles with more members, and is
dealt to its end before it is shuffled again, so a plan of a few minutes covers all of them. No
target is hit again before it has recovered. Servers are hit one at a time, with time to recover in
between, so a majority is never lost, except by `outage`, which takes all of them at once.

Not guaranteed: that a fault begins at exactly its time, or catches a process in the same line of
code.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

KINDS: Final = {
    "kill": "killed (SIGKILL), started again",
    "stop": "asked to end (SIGTERM), started again",
    "freeze": "frozen (SIGSTOP), then continued",
    "cut": "connections reset and refused",
    "stall": "network silent, connections left standing",
    "isolate": "cut off from the other servers, not from its clients",
    "reclock": "clock set wrong, then right",
    "outage": "all servers killed at once, started again",
    "drop": "a bucket deleted",
    "mute": "answers swallowed, then connections reset",
    "tap": "somebody listens to every subject",
}
SERVERS: Final = frozenset({"nats", "cluster", "records"})
"""Roles whose faults are dealt one at a time, because every process feels them."""
DROPPED: Final = ("runs", "nodes", "slots", "leases")
"""The buckets that `drop` deletes, one each time."""
SECONDS: Final = {
    "kill": (0.3, 6.0),
    "stop": (0.2, 1.5),
    "freeze": (2.0, 20.0),
    "cut": (0.5, 15.0),
    "stall": (1.0, 18.0),
    "isolate": (4.0, 25.0),
    "reclock": (5.0, 20.0),
    "outage": (0.5, 12.0),
    "drop": (1.0, 4.0),
    "mute": (0.5, 6.0),
    "tap": (15.0, 40.0),  # long enough that other faults fall into it
}
SHIFTS: Final = (3600.0, -3600.0, 30.0, -30.0, 3.0, -3.0, 86_400.0)
WARM_UP_SECONDS: Final = 4.0
RECOVERY_SECONDS: Final = 5.0
"""How long a target is left alone after a fault."""
SERVER_RECOVERY_SECONDS: Final = 14.0
"""The same for servers: an election takes up to nine seconds."""


class Fault(msgspec.Struct, frozen=True):
    """One fault."""

    number: int
    at: float
    """Seconds after the start of the run."""
    kind: str
    target: str
    role: str
    seconds: float
    """How long it lasts before it is healed."""
    shift: float = 0.0
    """For `reclock`: by how much the clock is set wrong."""
    what: str = ""
    """For `drop`: which bucket."""

    @property
    def until(self) -> float:
        return self.at + self.seconds

    def __str__(self) -> str:
        shift = f" by {self.shift:+.0f} s" if self.shift else f" ({self.what})" * bool(self.what)
        return (
            f"{self.number:3d}  {self.at:7.1f} s  {self.kind:8s} {self.target:16s} "
            f"for {self.seconds:4.1f} s{shift}"
        )


@dataclass(frozen=True, slots=True)
class Victim:
    """What can be hit, and by which faults."""

    name: str
    role: str
    kinds: tuple[str, ...]


class ChaosPlan(msgspec.Struct, frozen=True):
    """Every fault of a run, in order."""

    seed: int
    seconds: float
    faults: tuple[Fault, ...]

    @classmethod
    def random(
        cls,
        seed: int,
        seconds: float,
        victims: Iterable[Victim],
        *,
        pause: tuple[float, float] = (2.0, 7.0),
        server_pause: tuple[float, float] = (2.0, 10.0),
        warm_up: float = WARM_UP_SECONDS,
    ) -> ChaosPlan:
        """Deal faults to `victims` for `seconds`; `pause` is the time between two starts."""
        found = sorted(victims, key=lambda v: v.name)
        servers = [v for v in found if v.role in SERVERS]
        others = [v for v in found if v.role not in SERVERS]
        dealt = [
            *_deal(random.Random(f"{seed}/processes"), warm_up, seconds, others, pause),
            *_deal(random.Random(f"{seed}/servers"), warm_up, seconds, servers, server_pause),
        ]
        return cls(seed, seconds, _numbered(dealt))

    @classmethod
    def rolling(
        cls, victims: Iterable[Victim], *, every: float = 8.0, rounds: int = 1, seed: int = 0
    ) -> ChaosPlan:
        """A rollout: each in turn is asked to stop and started again, role by role."""
        found = sorted((v for v in victims if "stop" in v.kinds), key=lambda v: (v.role, v.name))
        at, dealt = WARM_UP_SECONDS, []
        for victim in found * rounds:
            dealt.append(Fault(0, at, "stop", victim.name, victim.role, 0.3))
            at += SERVER_RECOVERY_SECONDS if victim.role in SERVERS else every
        return cls(seed, at, _numbered(dealt))

    def __str__(self) -> str:
        head = f"seed {self.seed}: {len(self.faults)} faults in {self.seconds:.0f} s"
        return "\n".join([head, *map(str, self.faults)])


def _numbered(dealt: Iterable[Fault]) -> tuple[Fault, ...]:
    ordered = sorted(dealt, key=lambda f: (f.at, f.target))
    return tuple(
        msgspec.structs.replace(fault, number=number) for number, fault in enumerate(ordered, 1)
    )


def _deal(
    dice: random.Random,
    warm_up: float,
    seconds: float,
    victims: Sequence[Victim],
    pause: tuple[float, float],
) -> Iterator[Fault]:
    """Deal faults, never two at once on one victim, and only one at a time on servers."""
    free = {victim.name: 0.0 for victim in victims}
    cards = _cards(dice, victims)
    at = warm_up + dice.uniform(*pause)
    while victims and at < seconds:
        role, kind = next(cards)
        able = [v for v in victims if v.role == role and kind in v.kinds]
        victim = dice.choice(able)
        lasting = round(dice.uniform(*SECONDS[kind]), 1)
        shift = dice.choice(SHIFTS) if kind == "reclock" else 0.0
        what = dice.choice(DROPPED) if kind == "drop" else ""
        server = role in SERVERS
        at = round(max(at, free[victim.name]), 1)
        if at + lasting > seconds:
            return
        yield Fault(0, at, kind, victim.name, role, lasting, shift, what)
        rest = SERVER_RECOVERY_SECONDS if server else RECOVERY_SECONDS
        free[victim.name] = at + lasting + rest
        at = (free[victim.name] if server else at) + dice.uniform(*pause)


def _cards(dice: random.Random, victims: Sequence[Victim]) -> Iterator[tuple[str, str]]:
    able = Counter((victim.role, kind) for victim in victims for kind in victim.kinds)
    deck = sorted(card for card, count in able.items() for _ in range((count + 1) // 2))
    while deck:
        dice.shuffle(deck)
        yield from list(deck)
        deck.sort()
