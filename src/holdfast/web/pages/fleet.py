"""`/fleet`: agents, their settings, the commands sent to them and what each returned."""

from __future__ import annotations

import asyncio
import difflib
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from holdfast.errors import InvalidInput
from holdfast.model.fleet import FleetRun, Return
from holdfast.model.join import JoinRecord
from holdfast.settings.records import Report
from holdfast.settings.store import SettingsStore
from holdfast.status.fleet import AgentInfo, FleetInfo
from holdfast.web.masking import masked, masked_arguments
from holdfast.web.pages.request import PageRequest, ViewerPage

router = APIRouter(include_in_schema=False)

AGENTS: Final = 50
"""Rows of one page."""
RUNS: Final = 15
"""The newest fleet runs on the page; `holdfast fleet list` has more."""
DOTS: Final = 600
"""Most agents drawn as dots; more could not be told apart."""
RETURNS: Final = 100
"""Rows of one page."""
VALUE_BYTES: Final = 2_000
"""Characters of a return on the page; the API has all of it."""
KINDS: Final = 6
"""Most different values that are shown; with more, it is a function whose answers always differ."""
DIFF_LINES: Final = 40
"""Most lines of a diff."""
FACTS: Final = 200
"""Facts on one page."""
FACTS_SECONDS: Final = 10.0
"""How long counts of facts are shared between pages: they are read from every agent."""
COMMON: Final = 8
"""Values of a fact that are shown: more would be ids, of which each host has its own."""
_TARGET: Final = re.compile(r"[\w.-]+")
"""Names and values that need no quotes in a target."""
SHARED_SECONDS: Final = 2.0
"""Agents and settings seldom change, and there may be thousands of agents."""


class SettingsGlance(msgspec.Struct, frozen=True):
    """The published revision, and which agents have it."""

    number: int
    at: float
    reports: dict[str, Report]
    current: int
    failed: list[tuple[str, Report]]


@router.get("/fleet")
async def show(page: ViewerPage, target: str = "", start: int = 0) -> Response:
    """The agents that a target matches, and the newest fleet runs."""
    every, runs, settings, joins = await asyncio.gather(
        agents(page), runs_of(page), settings_of(page), joins_of(page)
    )
    found, problem = every, ""
    if target:
        try:
            seen = None if page.user.sees_secrets else masked
            found = list(await page.agents.list(target, seen=seen))
        except InvalidInput as error:  # the target is still being typed
            found, problem = [], str(error)
    start = max(0, start)
    found = sorted(found, key=lambda a: (a.online, a.id))
    return await page.show(
        "fleet.html",
        "fleet",
        agents=found[start : start + AGENTS],
        count=len(found),
        every=len(every),
        online=sum(a.online for a in every),
        dots=sorted(every, key=lambda a: (a.online, a.id))[:DOTS],
        runs=runs,
        settings=settings,
        joins=joins[:AGENTS],
        joining=len(joins),
        target=target,
        problem=problem,
        start=start,
        older=start + AGENTS if start + AGENTS < len(found) else 0,
    )


async def agents(page: PageRequest) -> list[AgentInfo]:
    """Every known agent."""

    async def read() -> list[AgentInfo]:
        return list(await page.agents.list())

    return await page.shared("agents", SHARED_SECONDS, read)


async def joins_of(page: PageRequest) -> Sequence[JoinRecord]:
    """Hosts that ask to become agents."""
    return await page.shared("joins", SHARED_SECONDS, page.joins.list)


async def runs_of(page: PageRequest) -> Sequence[FleetInfo]:
    """The newest fleet runs; active ones with their returns so far."""

    async def read() -> Sequence[FleetInfo]:
        active = {info.run: info for info in await page.fleet.active()}
        found = await page.fleet.list(most=RUNS)
        return [active.get(info.run, info) for info in found]

    return await page.shared("fleet", 1.0, read)


async def settings_of(page: PageRequest) -> SettingsGlance:
    """The status of the settings; their contents are never shown."""

    async def read() -> SettingsGlance:
        store = SettingsStore(page.client.broker)
        revision, reports = await store.shown_revision(), await store.reports()
        if revision is None:
            return SettingsGlance(0, 0.0, reports, 0, [])
        current = sum((r.born, r.number) == revision.order for r in reports.values())
        failed = sorted((a, r) for a, r in reports.items() if r.failed_number)
        return SettingsGlance(revision.number, revision.at, reports, current, failed[:10])

    return await page.shared("settings", SHARED_SECONDS, read)


class Fact(msgspec.Struct, frozen=True):
    """One fact, over all agents."""

    name: str
    agents: int
    values: int
    common: list[tuple[str, int, str]]
    """The most frequent values, how many agents have them, and a target that finds those."""


@router.get("/fleet/facts")
async def show_facts(page: ViewerPage, q: str = "") -> Response:
    """Which facts agents have, and how often each value; by part of a name or a value."""
    seen = None if page.user.sees_secrets else masked
    found = await page.shared(
        f"facts {seen is None}", FACTS_SECONDS, lambda: page.agents.facts(seen)
    )
    facts = [fact_of(name, counts) for name, counts in sorted(found.items())]
    if q:
        named = {n for n, counts in found.items() if any(q in text for text in (n, *counts))}
        facts = [fact for fact in facts if fact.name in named]
    return await page.show("facts.html", "fleet", facts=facts[:FACTS], count=len(facts), q=q)


def fact_of(name: str, counts: Counter[str]) -> Fact:
    """A fact with its most frequent values."""
    common = [
        (value, count, f"G@{name}:{value}" if _TARGET.fullmatch(f"{name}{value}") else "")
        for value, count in sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:COMMON]
    ]
    return Fact(name, sum(counts.values()), len(counts), common)


@router.get("/fleet/agents/{agent}")
async def show_agent(page: ViewerPage, agent: str) -> Response:
    """One agent and its facts."""
    info, facts = await page.agents.show(agent)
    clean: dict[str, Any] = facts if page.user.sees_secrets else masked(facts)
    settings = await settings_of(page)
    return await page.show(
        "agent.html",
        "fleet",
        info=info,
        facts=[(name, flat(value)) for name, value in sorted(clean.items())],
        report=settings.reports.get(agent),
        revision=settings.number,
    )


def flat(value: Any) -> str:
    """A fact on one line."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return ", ".join(value)
    return msgspec.json.encode(value).decode()


# ---- one fleet run


class ReturnLine(msgspec.Struct, frozen=True):
    """One agent's answer, if there is one yet."""

    agent: str
    outcome: str
    seconds: float = 0.0
    at: float = 0.0
    error: str = ""


@router.get("/fleet/runs/{run}")
async def show_run(page: ViewerPage, run: str, start: int = 0) -> Response:
    """One fleet run; failed and missing agents come first."""
    record, returns = await page.fleet.show(run)
    lines = [return_line(record, agent, returns.get(agent)) for agent in record.targets]
    lines.sort(key=lambda line: (line.outcome == "ok", line.outcome, line.agent))
    start = max(0, start)
    chosen = lines[start : start + RETURNS]
    return await page.show(
        "fleet_run.html",
        "fleet",
        info=FleetInfo.of(record, max(record.returned, len(returns))),
        record=record,
        arguments=await _arguments(page, record),
        outcomes=sorted(Counter(line.outcome for line in lines).items()),
        lines=chosen,
        kinds=await kinds(page, returns),
        values={n.agent: await _value(page, returns.get(n.agent)) for n in chosen},
        start=start,
        older=start + RETURNS if start + RETURNS < len(lines) else 0,
    )


def return_line(record: FleetRun, agent: str, given: Return | None) -> ReturnLine:
    """What is known about one agent's answer."""
    if given is not None:
        return ReturnLine(
            agent, given.outcome, given.seconds, given.at, error=given.error or given.note
        )
    if agent in record.unsent:
        return ReturnLine(agent, "not sent")
    if not record.over:
        return ReturnLine(agent, "waiting")
    if agent in record.refused:
        return ReturnLine(agent, "refused", error=f"refused: {record.refused[agent]}")
    return ReturnLine(agent, "unreachable" if agent in record.unreachable else "no answer")


class Kind(msgspec.Struct, frozen=True):
    """Agents that returned the same."""

    value: str
    agents: list[str]
    diff: str = ""
    """The diff from the most frequent value; empty for that value."""


async def kinds(page: PageRequest, returns: dict[str, Return]) -> list[Kind]:
    """The returned values, the most frequent first, the others as diffs from it."""
    same: dict[str, list[str]] = {}
    for agent, given in sorted(returns.items()):
        if given.outcome == "ok" and given.value is not None:
            raw = msgspec.json.encode(given.value, order="sorted").decode()
            same.setdefault(raw, []).append(agent)
    ordered = sorted(same.items(), key=lambda one: -len(one[1]))
    found: list[Kind] = []
    for raw, agents_ in ordered[:KINDS]:
        value = await page.value(msgspec.json.decode(raw))
        diff = "\n".join(_difference(found[0].value, value)) if found else ""
        found.append(Kind(value[:VALUE_BYTES], agents_, diff[:VALUE_BYTES]))
    rest = [agent for _, agents_ in ordered[KINDS:] for agent in agents_]
    return [*found, Kind("", rest, f"{len(ordered) - KINDS} more values")] if rest else found


def _difference(usual: str, other: str) -> list[str]:
    lines = difflib.unified_diff(usual.splitlines(), other.splitlines(), lineterm="", n=1)
    return list(itertools.islice(lines, 2, DIFF_LINES))


async def _arguments(page: PageRequest, record: FleetRun) -> str:
    request = record.request
    args = list(request.args)
    if not page.user.sees_secrets:
        args = masked_arguments(request.function, args)
    return await page.value([*args, request.kwargs])


async def _value(page: PageRequest, given: Return | None) -> str:
    if given is None or given.value is None:
        return "stored separately because it is large" if given is not None and given.object else ""
    text = await page.value(given.value)
    return text if len(text) <= VALUE_BYTES else text[:VALUE_BYTES] + " …"
