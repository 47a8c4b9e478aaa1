"""Schedules of hosts: what agents run by themselves, according to their settings.

    schedules:
      nightly:
        function: disk.usage
        args: [/var]
        cron: "0 3 * * *"
        splay: 10m
        target: G@role:db

They are part of the settings, so an agent has them in its signed snapshot and can tell on its own
what is due. A slot has the same id on every host, made of the schedule's name and the instant, and
each host delays it by its own part of the splay.

Pure: the same settings, id and facts give the same schedules. Anything unknown is refused with its
name, so that a mistake stops a canary instead of becoming a schedule that never fires.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from holdfast import durations
from holdfast.errors import HoldfastError, InvalidInput
from holdfast.model import schedule as schedules
from holdfast.model.schedule import Schedule
from holdfast.model.target import parse
from holdfast.names import check_name

KEY: Final = "schedules"
"""The member of an agent's settings that contains its schedules."""
MOST: Final = 1_000
"""Most schedules of one host; more are a mistake in a template."""
TIMEOUT: Final = "1h"
"""The default timeout: long enough for a nightly job, short enough to end before the next day's."""
LONGEST_FUNCTION: Final = 200  # as dispatchers accept


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    """A schedule as written in the settings."""

    function: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    cron: str | None = None
    every: str | int | None = None
    at: str | float | None = None
    tz: str = "UTC"
    splay: str | int | float = 0
    start: str | float | None = None
    end: str | float | None = None
    catch_up: str = "last"
    limit: int = 100
    timeout: str | int | float = TIMEOUT
    target: str = ""
    enabled: bool = True


class HostSchedule(msgspec.Struct, frozen=True):
    """A schedule of one host."""

    timing: Schedule
    """The rule; its `since` is when this host got the schedule."""
    function: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    timeout: float = 3600.0
    target: str = ""
    enabled: bool = True

    def __repr__(self) -> str:
        return f"HostSchedule({self.timing.name!r})"  # arguments may be secrets

    def meant_for(self, agent: str, facts: Mapping[str, Any]) -> bool:
        """Whether this host runs it."""
        return self.enabled and (not self.target or parse(self.target).matches(agent, facts))

    def counting_from(self, since: float) -> HostSchedule:
        """The same schedule with that `since`."""
        timing = msgspec.structs.replace(self.timing, since=since)
        return msgspec.structs.replace(self, timing=timing)


def read(values: Any, agent: str) -> dict[str, HostSchedule]:
    """The schedules in the settings of an agent; `InvalidInput` says what is wrong with which."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise InvalidInput(f"{KEY!r} must be a table of schedules by name: see docs/fleet.md")
    if len(values) > MOST:
        raise InvalidInput(f"{len(values):,} schedules for one host: at most {MOST:,}")
    found = {}
    for name, written in values.items():
        try:
            found[str(name)] = _made(check_name(str(name), "schedule"), written, agent)
        except (HoldfastError, msgspec.ValidationError) as error:
            raise InvalidInput(f"schedule {str(name)[:64]!r}: {error}") from None
    return found


def _made(name: str, values: Any, agent: str) -> HostSchedule:
    written = msgspec.convert(values, _Written)
    if not 0 < len(written.function) <= LONGEST_FUNCTION:
        raise InvalidInput("it names no function")
    if written.target:
        parse(written.target)
    timing = schedules.define(
        name,
        name,  # an agent has functions, not jobs
        cron=written.cron,
        every=written.every,
        at=written.at,
        tz=written.tz,
        jitter=written.splay,
        start=written.start,
        end=written.end,
        catch_up=written.catch_up,
        limit=written.limit,
    )
    return HostSchedule(
        msgspec.structs.replace(timing, salt=agent),
        written.function,
        tuple(written.args),
        dict(written.kwargs),
        durations.seconds(written.timeout, "timeout"),
        written.target,
        written.enabled,
    )


def chosen(
    values: Mapping[str, Any],
    agent: str,
    facts: Mapping[str, Any],
    before: Mapping[str, HostSchedule],
    now: float,
) -> dict[str, HostSchedule]:
    """The schedules for a host from its settings; unchanged ones keep their `since`."""
    found = {}
    for name, schedule in read(values.get(KEY), agent).items():
        if schedule.meant_for(agent, facts):
            old = before.get(name)
            same = old is not None and old.timing.timing == schedule.timing.timing
            found[name] = schedule.counting_from(old.timing.since if old and same else now)
    return found


def restored(
    values: Mapping[str, Any], agent: str, since: Mapping[str, float]
) -> dict[str, HostSchedule]:
    """The schedules of a stored snapshot: those that it lists, with the `since` of each."""
    found = read(values.get(KEY), agent)
    return {name: found[name].counting_from(at) for name, at in since.items() if name in found}
