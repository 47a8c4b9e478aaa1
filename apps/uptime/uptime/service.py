"""What the API and the pages do: change checks and channels, and read the status.

Order of a change: the check first, then its schedule; `reconcile` repairs a crash in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from holdfast import Conflict, Schedules
from uptime.app import (
    Channel,
    app,
    channels,
    checks,
    incidents,
    probe,
    rest,
    results,
    set_schedule,
    states,
)
from uptime.check import Check, CheckInput
from uptime.config import Config
from uptime.guard import Guard, Refused, judge_number, parse_url
from uptime.record import Incident, Result, State


class Refusal(Exception):
    """A refused request; `status` is its HTTP status."""

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status


def _told(error: ValidationError) -> str:
    """What is wrong with an input, one sentence per member."""
    found = []
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        place = ".".join(str(part) for part in problem["loc"])
        text = problem["msg"].removeprefix("Value error, ")
        found.append(f"{place}: {text}" if place else text)
    return "; ".join(found)


class Service:
    """Everything the API and the pages can do."""

    def __init__(self, config: Config) -> None:
        self.config = config

    # ---- checks

    async def all_checks(self) -> list[Check]:
        """Every check, by name."""
        found = [entry.value async for entry in checks.entries()]
        return sorted(found, key=lambda check: (check.name.lower(), check.id))

    async def check(self, id: str) -> Check:
        """One check."""
        entry = await checks.get(_key(id))
        if entry is None:
            raise Refusal(f"there is no check {id!r}", 404)
        return entry.value

    async def add(self, given: dict[str, Any]) -> Check:
        """Add a check."""
        check = self._read(given, None)
        try:
            await checks.put(check.id, check, expected=0)
        except Conflict:
            raise Refusal(f"id: there is a check {check.id!r} already", 409) from None
        await set_schedule(await Schedules.of(app), check)
        return check

    async def change(self, id: str, given: dict[str, Any]) -> Check:
        """Replace a check's definition; its history stays."""
        old = await self.check(id)
        check = self._read({**given, "id": id}, old)
        await checks.put(id, check)
        await self._follow(check, old)
        return check

    async def pause(self, id: str, paused: bool) -> Check:
        """Pause or resume a check."""
        old = await self.check(id)

        def write(now: Check | None) -> Check:
            return (now or old).model_copy(update={"paused": paused})

        check = await checks.change(id, write)
        await self._follow(check, old)
        return check

    async def _follow(self, check: Check, old: Check) -> None:
        await set_schedule(await Schedules.of(app), check)
        if check.paused and not old.paused:
            await rest(check.id)

    async def remove(self, id: str) -> None:
        """Remove a check and its state; its incidents are kept."""
        check = await self.check(id)
        await checks.delete(id)
        schedules = await Schedules.of(app)
        if any(s.name == check.schedule for s in await schedules.list()):
            await schedules.remove(check.schedule)
        await rest(id)
        await states.delete(id)

    async def look_now(self, id: str) -> str:
        """Probe once now, in addition to the schedule; returns the run's id."""
        check = await self.check(id)
        if check.paused:
            raise Refusal(f"{id} is paused: resume it first", 409)
        return (await probe.enqueue(id)).id

    def _read(self, given: dict[str, Any], old: Check | None) -> Check:
        try:
            wanted = CheckInput.model_validate(given)
            guard = Guard(self.config.allow_private)
            return wanted.stored(guard, self.config.shortest_interval, old)
        except ValidationError as error:
            raise Refusal(_told(error)) from None
        except ValueError as error:
            raise Refusal(str(error)) from None

    # ---- results and incidents

    async def state(self, id: str) -> State:
        """The state of a check."""
        entry = await states.get(_key(id))
        return entry.value if entry else State()

    async def all_states(self) -> dict[str, State]:
        """The state of every check."""
        return {entry.key: entry.value async for entry in states.entries()}

    async def results(self, id: str, limit: int) -> list[Result]:
        """A check's newest results, newest first."""
        await self.check(id)
        found = [entry.value async for entry in results.entries(id)]
        return sorted(found, key=lambda r: r.at, reverse=True)[:limit]

    async def incidents(self, check: str = "", limit: int = 50) -> list[Incident]:
        """The newest incidents, newest first."""
        found = [entry.value async for entry in incidents.entries(_key(check) if check else "")]
        return sorted(found, key=lambda i: i.started, reverse=True)[:limit]

    # ---- channels

    async def all_channels(self) -> list[Channel]:
        """Every channel."""
        return sorted([e.value async for e in channels.entries()], key=lambda c: c.id)

    async def set_channel(self, given: dict[str, Any]) -> Channel:
        """Add or replace a channel."""
        try:
            channel = Channel.model_validate(given)
        except ValidationError as error:
            raise Refusal(_told(error)) from None
        _TARGETS[channel.kind](channel.target, Guard(self.config.allow_private))
        await channels.put(channel.id, channel)
        return channel

    async def remove_channel(self, id: str) -> None:
        """Remove a channel."""
        if await channels.get(_key(id)) is None:
            raise Refusal(f"there is no channel {id!r}", 404)
        await channels.delete(id)


def _key(id: str) -> str:
    """Check an id from a path; an invalid one names nothing."""
    if not id or len(id) > 48 or not all(c.isascii() and (c.isalnum() or c == "-") for c in id):
        raise Refusal(f"there is nothing called {id[:60]!r}", 404)
    return id


def _check_webhook(target: str, guard: Guard) -> None:
    try:
        url = parse_url(target)
        judge_number(guard, url.raw_host.decode("ascii"), url.port or 80)
    except Refused as error:
        raise Refusal(f"target: {error}") from None


def _check_mail(target: str, _: Guard) -> None:
    local, at, domain = target.partition("@")
    if (
        not (local and at and domain)
        or not target.isprintable()
        or any(c in target for c in ' ,<>"')
    ):
        raise Refusal("target: write one address, as oncall@example.org")


_TARGETS: dict[str, Callable[[str, Guard], None]] = {
    "webhook": _check_webhook,
    "email": _check_mail,
}
