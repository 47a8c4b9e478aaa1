"""The nemesis: carries out a plan, fault by fault, and records when each began and ended.

A target is anything with a name, a role, the kinds of fault it can suffer, and two methods, so a
container or a remote host can be one as well as a local process. Every fault is healed, even when
the run is cancelled; one that cannot be healed is reported with its error, because otherwise the
system would be blamed for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from chaos.plan import ChaosPlan, Fault, Victim

log = logging.getLogger("holdfast.chaos")


class Target(Protocol):
    """Something that can be hit."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def kinds(self) -> tuple[str, ...]: ...

    async def strike(self, fault: Fault) -> None:
        """Begin a fault."""
        ...

    async def heal(self, fault: Fault) -> None:
        """End it; when this returns, the target has recovered or is recovering."""
        ...


class Wound(msgspec.Struct, frozen=True):
    """A fault as it was inflicted; times are monotonic."""

    fault: Fault
    began: float
    ended: float
    error: str = ""


def victims(targets: Iterable[Target]) -> list[Victim]:
    """Targets as a plan needs to know them."""
    return [Victim(target.name, target.role, tuple(target.kinds)) for target in targets]


class Nemesis:
    """Inflicts the faults of a plan on targets."""

    def __init__(
        self,
        plan: ChaosPlan,
        targets: Iterable[Target],
        *,
        tell: Callable[[str], None] = log.info,
    ) -> None:
        self.plan = plan
        self.wounds: list[Wound] = []
        self.began = 0.0
        self._targets = {target.name: target for target in targets}
        self._tell = tell
        unknown = {fault.target for fault in plan.faults} - self._targets.keys()
        if unknown:
            raise ValueError(f"the plan hits {', '.join(sorted(unknown))}, which is no target")

    async def run(self) -> list[Wound]:
        """Carry out the whole plan; returns when the last fault is healed."""
        self.began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for fault in self.plan.faults:
                group.create_task(self._inflict(fault), name=f"fault-{fault.number}")
        return self.wounds

    async def _inflict(self, fault: Fault) -> None:
        target = self._targets[fault.target]
        await asyncio.sleep(self.began + fault.at - time.monotonic())
        self._tell(str(fault))
        began, error = time.monotonic(), ""
        try:
            try:
                await target.strike(fault)
                await asyncio.sleep(max(0.0, began + fault.seconds - time.monotonic()))
            finally:
                await target.heal(fault)
        except Exception as failure:  # part of the report, whatever it is
            error = f"{type(failure).__name__}: {failure}"
            log.exception("fault %d", fault.number)
        self.wounds.append(Wound(fault, began, time.monotonic(), error))
