"""Rotates keys to the next generation; agents can read their secrets throughout.

    begin    seals every secret to the old keys and the new ones, sends every agent its new keys,
             sealed to its old ones; the revision is signed with both
    finish   once every agent holds the new keys: signs with the new ones only, drops old boxes

Needs no tree: the account can open what it has sealed. It does not lock out a thief who has an
agent's old keys when it begins: issue new credentials for that agent instead. A leaked seed is
replaced, not rotated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.errors import SettingsError
from holdfast.settings.plan import Plan, check_undecided, plan_kept
from holdfast.settings.records import Report
from holdfast.settings.sealing import Sealer
from holdfast.settings.store import Published


def plan_rotation(
    there: Published,
    sealer: Sealer,
    agents: Iterable[str],
    reports: Mapping[str, Report] | None,
    now: float,
    *,
    force: bool = False,
) -> Plan:
    """Begin a rotation; with the agents' `reports`, finish one."""
    if there.revision is None:
        raise SettingsError("nothing is published yet: there is nothing to rotate")
    check_undecided(there, now)
    current = there.revision.generations
    if reports is None:
        generations = _begun(current)
    else:
        generations = _finished(current)
        _check_ready(reports, there, generations[0], force)
    hash = there.revision.manifest
    plan = plan_kept(there, sealer, agents, hash, now, generations=generations)
    plan.changes.append(("generations", ", ".join(map(str, generations))))
    return plan


def _begun(current: list[int]) -> list[int]:
    if len(current) > 1:
        raise SettingsError(
            f"generations {current[0]} and {current[1]} are both in use: finish that rotation "
            "with 'holdfast secrets rotate --finish' first"
        )
    return [current[0], current[0] + 1]


def _finished(current: list[int]) -> list[int]:
    if len(current) < 2:
        raise SettingsError("no rotation is in progress: 'holdfast secrets rotate' begins one")
    return [current[1]]


def _check_ready(
    reports: Mapping[str, Report], there: Published, generation: int, force: bool
) -> None:
    """Every agent that has secrets, or has reported, must hold the new keys."""
    concerned = {agent for agent, (_, sealed) in there.sealed.items() if sealed.boxes}
    behind = [
        agent
        for agent in sorted(concerned | set(reports))
        if generation not in reports.get(agent, Report()).generations
    ]
    if behind and not force:
        shown = ", ".join(behind[:5]) + (" …" if len(behind) > 5 else "")
        raise SettingsError(
            f"{len(behind)} agents do not have generation {generation} yet: {shown}. Wait for "
            "them, or pass --force and issue their credentials again"
        )
