"""A canary: a push goes to a few agents, is watched for a while, then goes to all agents or is
rolled back.

    push to the wave ─► every agent of it has it in force ─► soak ─► checks ─► promoted to all
                            │ one refuses, is silent,          │ one fails
                            │ or goes offline                  ▼
                            └─────────────────────────► taken back: the snapshot before is current

Guaranteed: agents outside the wave keep their snapshot until the promotion. If the process that
watches is killed or cut off, nothing is promoted, and the wave's agents go back by themselves when
the canary's time runs out. Not guaranteed: anything that the checks do not cover.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.broker import Broker, Bucket
from holdfast.errors import HoldfastError
from holdfast.model import node as nodes
from holdfast.settings.plan import Plan
from holdfast.settings.publisher import Publisher
from holdfast.settings.records import Report, Revision, decode
from holdfast.settings.tree import Tree

log = logging.getLogger("holdfast.settings")

APPLY_SECONDS: Final = 90.0
"""How long the wave may take to have it in force, usually two seconds; then the push is rolled
back."""
CHECK_SECONDS: Final = 60.0
"""Time for the checks and the decision together, on top of the soak; then the wave goes back by
itself."""
LOOK_SECONDS: Final = 0.5
"""A fraction of the two seconds that a wave takes."""
NOT_YET: Final = "does not have it in force"
BACK_SECONDS: Final = 30.0
"""How long to wait for the wave to go back, which takes about two seconds."""

Check = Callable[[Sequence[str]], Awaitable[str]]
"""Checks the agents of the wave; returns what is wrong, or nothing."""


@dataclass
class CanaryVerdict:
    """How a canary ended."""

    trial: int
    """The revision that was tried."""
    final: Plan
    """The revision that decided it."""
    failure: str = ""
    """Why it was rolled back; empty when it was promoted."""
    not_back: Sequence[str] = ()
    """Agents of the wave that have not confirmed the return to the previous snapshot."""


class Trial:
    """One canary push."""

    def __init__(
        self, broker: Broker, publisher: Publisher, wave: Sequence[str], soak: float, check: Check
    ) -> None:
        self._broker = broker
        self._publisher = publisher
        self.wave = wave
        self._soak = soak
        self._check = check
        self._records = Bucket(broker, broker.names.agents)

    async def push(self, folder: Path, **options: Any) -> tuple[Tree, Plan, CanaryVerdict | None]:
        """Push to the wave, watch, and decide; returns None if nothing would change."""
        now = self._broker.server_now()
        until = now + APPLY_SECONDS + self._soak + CHECK_SECONDS
        tree, plan = await self._publisher.push(folder, wave=(self.wave, until), **options)
        if plan.revision is None:
            return tree, plan, None
        log.info("settings: revision %d is tried on %d", plan.revision.number, len(self.wave))
        return tree, plan, await self._decided(plan.revision)

    async def _decided(self, trial: Revision) -> CanaryVerdict:
        try:
            failure = await self._failure(trial)
        except HoldfastError as error:
            failure = f"it could not be watched: {error}"
        except BaseException:  # interrupted: nobody is watching
            await asyncio.shield(self._publisher.end_trial(trial.number, promote=False))
            raise
        final = await self._publisher.end_trial(trial.number, promote=not failure)
        left = await self._not_back(trial) if failure else ()
        return CanaryVerdict(trial.number, final, failure, left)

    async def _failure(self, trial: Revision) -> str:
        clock = self._broker.clock
        begun = clock.monotonic()
        while waiting := await self._without(trial):
            if waiting.endswith(NOT_YET) and clock.monotonic() - begun < APPLY_SECONDS:
                await clock.sleep(LOOK_SECONDS)
            else:
                return waiting
        if failure := await self._check(self.wave):
            return failure
        begun = clock.monotonic()
        while (left := self._soak - (clock.monotonic() - begun)) > 0:
            if failure := await self._unhealthy(trial):
                return failure
            await clock.sleep(min(LOOK_SECONDS, left))
        return await self._unhealthy(trial) or await self._check(self.wave)

    async def _without(self, trial: Revision) -> str:
        """Says which agent refused it or does not have it in force; empty if all have it."""
        reports = await self._reports()
        for agent, report in reports.items():
            if report.failed_number >= trial.number:
                return f"{agent} refused it: {report.error}"
        for agent, report in reports.items():
            if not _has(report, trial):
                return f"{agent} {NOT_YET}"
        return ""

    async def _unhealthy(self, trial: Revision) -> str:
        if without := await self._without(trial):
            return without
        for agent in self.wave:
            entry = await self._records.get(agent)
            record = self._records.read(nodes.decode, entry) if entry else None
            if record is None or not record.alive:
                return f"{agent} went offline"
        return ""

    async def _reports(self) -> dict[str, Report]:
        applied = self._publisher.store.applied
        entries = await asyncio.gather(*(applied.get(agent) for agent in self.wave))
        return {
            agent: decode(Report, entry.value, "its report") if entry else Report()
            for agent, entry in zip(self.wave, entries, strict=True)
        }

    async def _not_back(self, trial: Revision) -> list[str]:
        """Wait for the wave to return to the previous snapshot; returns the agents that have
        not."""
        clock = self._broker.clock
        begun = clock.monotonic()
        while True:
            reports = await self._reports()
            behind = [a for a in self.wave if reports[a].manifest != trial.manifest]
            if not behind or clock.monotonic() - begun > BACK_SECONDS:
                return behind
            await clock.sleep(LOOK_SECONDS)


def _has(report: Report, trial: Revision) -> bool:
    assert trial.canary
    return report.number >= trial.number and report.manifest == trial.canary.manifest
