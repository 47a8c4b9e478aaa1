"""Rotates keys to the next generation without an interval in which an agent cannot read.

    begin    seals every secret to the old keys and the new ones, sends every agent its new keys,
             sealed to its old ones; the revision is signed with both
    finish   once every agent holds the new keys: signs with the new ones only, drops old boxes

Needs no tree: the account can open what it sealed. It does not lock out a thief who holds an
agent's old keys when it begins: issue new credentials for that agent instead. A leaked seed is
replaced, not rotated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.errors import SettingsError
from holdfast.names import settings_file_key
from holdfast.settings.document import secret_id
from holdfast.settings.plan import Plan, plan_snapshot, seal_for
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
    current = there.revision.generations
    if reports is None:
        generations = _begun(current)
    else:
        generations = _finished(current)
        _check_ready(reports, there, generations[0], force)
    plan = Plan(generations=generations, sequence=there.sequence)
    contents = {
        entry.sha256: there.contents[settings_file_key(entry.sha256)]
        for entry in there.manifest.files.values()
    }
    plan_snapshot(plan, there, there.manifest, contents, now)
    plan.needed = {agent: {} for agent in agents} | _sealed_versions(there)
    seal_for(plan, there, sealer, _values(there, sealer, current))
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
        raise SettingsError("no rotation is under way: 'holdfast secrets rotate' begins one")
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
            "them, or say --force and issue their credentials again"
        )


def _sealed_versions(there: Published) -> dict[str, dict[str, str]]:
    """Each agent's secrets in the snapshot in force, with their versions."""
    current = {
        secret_id(name, path): secret.version
        for name, entry in there.manifest.files.items()
        for path, secret in entry.secrets.items()
    }
    return {
        agent: {id: v for id, v in current.items() if v in sealed.boxes.get(id, {})}
        for agent, (_, sealed) in there.sealed.items()
    }


def _values(there: Published, sealer: Sealer, generations: list[int]) -> dict[str, str]:
    """Every sealed secret, opened by the account that sealed it."""
    values: dict[str, str] = {}
    for agent, wanted in _sealed_versions(there).items():
        boxes = there.sealed[agent][1].boxes
        for id, version in wanted.items():
            for generation, box in boxes[id][version].items():
                if id not in values and generation in generations:
                    values[id] = sealer.open(agent, generation, id, version, box)
    return values
