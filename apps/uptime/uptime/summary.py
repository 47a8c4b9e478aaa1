"""What the status page and `/status.json` show, made from checks, states and incidents.

Plain values only, because the cache stores them. Of a check's definition they contain only name and
kind, so that its target, headers and failure reasons stay with those who manage checks.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from uptime.check import Check
from uptime.record import DAYS, Day, Incident, State
from uptime.service import Service

DAY_SECONDS = 86_400
PATIENCE = 3
"""Intervals without a result after which a check's state is unknown."""
GRACE_SECONDS = 15  # tolerates a delayed or retried run
RECENT_INCIDENTS = 15
_ORDER = ("down", "degraded", "unknown", "up", "paused")


async def status(service: Service) -> dict[str, Any]:
    """The whole status page."""
    now = int(time.time())
    known = await service.all_states()
    shown = [check for check in await service.all_checks() if check.public]
    rows = [_row(check, known.get(check.id, State()), now) for check in shown]
    public = {check.id for check in shown}
    recent = [i for i in await service.incidents(limit=200) if i.check in public]
    return {
        "title": service.config.title,
        "made": now,
        "overall": _overall([row["status"] for row in rows]),
        "checks": rows,
        "incidents": [_incident(i) for i in recent[:RECENT_INCIDENTS]],
    }


async def detail(service: Service, id: str) -> dict[str, Any]:
    """One check's page; empty when it is not public."""
    check = await service.check(id)
    if not check.public:
        return {}
    now = int(time.time())
    state = await service.state(id)
    return {
        **_row(check, state, now),
        "title": service.config.title,
        "made": now,
        "points": [[p.at, p.ms, p.verdict] for p in state.points],
        "spans": [[s.at, round(s.ms / s.answers), s.worst] for s in state.spans],
        "incidents": [_incident(i) for i in await service.incidents(id, 30)],
    }


def _row(check: Check, state: State, now: int) -> dict[str, Any]:
    days = _calendar(state.days, now)
    answers = [p for p in state.points if p.verdict != "failed"]
    return {
        "id": check.id,
        "name": check.name,
        "kind": check.kind,
        "status": current(check, state, now),
        "since": state.since,
        "last": state.points[-1].at if state.points else 0,
        "ms": answers[-1].ms if answers else None,
        "expires": state.expires,
        "uptime": {str(n): uptime(days[-n:]) for n in (1, 7, DAYS)},
        "days": [list(day) for day in days],
    }


def current(check: Check, state: State, now: int) -> str:
    """The state to show: unknown if it has not been renewed."""
    if check.paused:
        return "paused"
    newest = state.points[-1].at if state.points else 0
    if now - newest > PATIENCE * check.interval + check.timeout + GRACE_SECONDS:
        return "unknown"
    return state.status


def uptime(days: list[Day]) -> float | None:
    """The percentage of results that had an answer."""
    total = sum(day.total for day in days)
    return round(100 * (1 - sum(day.failed for day in days) / total), 3) if total else None


def _calendar(days: tuple[Day, ...], now: int) -> list[Day]:
    """The last 90 days, including those without a result."""
    found = {day.day: day for day in days}
    today = now // DAY_SECONDS
    return [found.get(n, Day(n)) for n in range(today - DAYS + 1, today + 1)]


def _overall(found: list[str]) -> str:
    """The worst state of all checks."""
    return next((status for status in _ORDER if status in found), "unknown")


def _incident(incident: Incident) -> dict[str, Any]:
    told = asdict(incident)
    del told["reason"]  # may contain what only managers should know
    return told


def date_of(day: int) -> str:
    """A day as an ISO date."""
    return datetime.fromtimestamp(day * DAY_SECONDS, UTC).strftime("%Y-%m-%d")
