"""Changes of schedules: registered from code, or made at run time.

An app registers the schedules of its code as one set, under its name and release. A lower release
changes nothing once a higher one has registered, so old and new pods do not fight during a rollout;
what is no longer in the set is removed; an empty set over a populated one is refused without
`allow_empty`, since it is far more often an import that failed.

Every change is a compare-and-swap on the schedule's record. A changed rule applies from the time of
the change; any other change leaves due slots as they were. A removed schedule leaves a record for a
while, so that every scheduler notices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from holdfast.broker import Bucket
from holdfast.client.client import Client
from holdfast.client.run import Backend
from holdfast.errors import Conflict, InvalidInput, Unreadable
from holdfast.model import schedule as schedules
from holdfast.model import slot as slots
from holdfast.model.codec import Codec, Instant, Release
from holdfast.model.message import first_message
from holdfast.model.schedule import KEPT_PAUSES, Pause, Schedule, check_release
from holdfast.names import (
    IdMaker,
    app_key,
    check_name,
    release_order,
    schedule_key,
    trigger_run,
)

REMOVED_SECONDS = 7 * 86_400.0
"""How long the record of a removed schedule is kept: longer than a scheduler can be cut off."""
TRIES = 20
"""In each round one writer wins; few change schedules at once."""

_make_id = IdMaker()


class Registration(msgspec.Struct, frozen=True, omit_defaults=True):
    """The schedules in an app's code, as of one release."""

    release: Release = ""
    names: tuple[str, ...] = ()
    at: Instant = 0.0


class RefusedRegistration(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why an app's schedules could not be registered, for `holdfast doctor`."""

    app: str
    reason: str = ""


REGISTRATION: Final = Codec[Registration](Registration, "an app's registration")
REFUSED: Final = Codec[RefusedRegistration](RefusedRegistration, "a refused registration")


@dataclass(frozen=True, slots=True)
class Synced:
    """What a registration changed."""

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    retired: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    newer: str = ""
    """The higher release that had registered already, in which case nothing was changed."""


class UnknownSchedule(InvalidInput):
    """No schedule has that name."""


class ConnectedApp(Protocol):
    """What `Schedules.of` needs of an app."""

    async def backend(self) -> Backend: ...


class Schedules:
    """Adds, changes and removes schedules through one client."""

    def __init__(self, client: Client, *, now: Callable[[], float] | None = None) -> None:
        self.client = client
        self.bucket = Bucket(client.broker, client.broker.names.schedules)
        self._now = now or client.broker.server_now
        self._measured = now is not None

    @classmethod
    async def of(cls, app: ConnectedApp) -> Schedules:
        """The schedules of an app's namespace."""
        backend = await app.backend()
        if not isinstance(backend, Client):
            raise InvalidInput("schedules are kept on a server: test them with holdfast_worker")
        await backend.topology.ensure()
        return cls(backend)

    # ---- reading

    async def list(self, *, app: str = "") -> list[Schedule]:
        """Every schedule, by name."""
        found = []
        async for entry in self.bucket.entries("schedule"):
            name = entry.key.removeprefix("schedule.")
            schedule = self.bucket.read(functools.partial(schedules.usable, name), entry)
            if schedule and not schedule.removed and (not app or schedule.app == app):
                found.append(schedule)
        return sorted(found, key=lambda s: s.name)

    async def show(self, name: str) -> Schedule:
        """One schedule."""
        schedule, _, damage = await self._read(name)
        if damage is not None:
            raise Unreadable(
                f"schedule {name!r}: {damage}; 'holdfast schedules remove' removes it, 'add "
                "--replace' replaces it"
            )
        if schedule is None or schedule.removed:
            raise UnknownSchedule(
                f"there is no schedule {name!r}: 'holdfast schedules list' shows them"
            )
        return schedule

    async def _read(self, name: str) -> tuple[Schedule | None, int, Unreadable | None]:
        """A schedule and its revision; if its record cannot be read, the error."""
        revision, entry = await self.bucket.last(schedule_key(check_name(name, "schedule")))
        if entry is None:
            return None, revision, None
        try:
            return schedules.usable(name, entry.value), revision, None
        except Unreadable as error:
            self.client.broker.unreadable.note(self.bucket.name, entry.key, error, entry.value)
            return None, revision, error

    # ---- changing one

    async def add(self, schedule: Schedule, *, replace: bool = False) -> Schedule:
        """Add or replace a schedule; one defined in an app's code can only be changed there."""
        self._check_size(schedule)
        if not replace and (await self._read(schedule.name))[2] is not None:
            raise InvalidInput(
                f"schedule {schedule.name!r} exists already and cannot be read: pass --replace"
            )
        return await self._change(schedule.name, lambda old: self._added(old, schedule, replace))

    def _check_size(self, schedule: Schedule) -> None:
        """Refuse a schedule whose slots or runs would be too large for the server."""
        limit = self.client.broker.max_message_bytes
        needed = slots.room(schedule.payload, schedule.headers)
        if needed > limit:
            given = needed - slots.ROOM_BYTES
            raise InvalidInput(
                f"the payload and headers of schedule {schedule.name!r} are {given:,} bytes, and "
                f"this server's max_payload of {limit:,} leaves room for "
                f"{max(0, limit - slots.ROOM_BYTES):,}: put the data into an object store and send "
                "its key, or raise max_payload on the server"
            )

    def _added(self, old: Schedule | None, new: Schedule, replace: bool) -> Schedule:
        if old is not None and not old.removed:
            if old.source == "code" and new.source != "code":
                raise InvalidInput(
                    f"schedule {new.name!r} is defined in the code of app {old.app!r}: change it "
                    "there, or choose another name"
                )
            if old.app != new.app and new.source == "code":
                owner = f"app {old.app!r}" if old.app else "no app"
                raise InvalidInput(
                    f"schedule {new.name!r} belongs to {owner}: give the one of app {new.app!r} "
                    "another name, with schedule="
                )
            if not replace:
                raise InvalidInput(f"schedule {new.name!r} exists already: pass --replace")
        return merged(old, new, self._now())

    async def remove(self, name: str) -> None:
        """Remove a schedule, even if it cannot be read; planned slots are still sent."""
        _, revision, damage = await self._read(name)
        if damage is not None:
            await self.bucket.remove(schedule_key(name), expected=revision)
            return
        await self.show(name)
        await self._change(name, self._removed)

    def _removed(self, old: Schedule | None) -> Schedule:
        assert old is not None
        now = self._now()
        return msgspec.structs.replace(
            old, removed=now, changed=now, payload=schedules.NO_BODY, headers={}
        )

    async def pause(self, name: str) -> Schedule:
        """Stop it from firing until it is resumed; slots missed meanwhile are not caught up."""
        await self.show(name)
        return await self._change(name, self._paused)

    def _paused(self, old: Schedule | None) -> Schedule:
        assert old is not None
        if old.paused:
            return old
        return msgspec.structs.replace(old, paused=self._now(), changed=self._now())

    async def resume(self, name: str) -> Schedule:
        """Let it fire again from now on."""
        await self.show(name)
        return await self._change(name, self._resumed)

    def _resumed(self, old: Schedule | None) -> Schedule:
        assert old is not None
        if not old.paused:
            return old
        now = self._now()
        pauses = (*old.pauses, Pause(old.paused, now))[-KEPT_PAUSES:]
        return msgspec.structs.replace(old, paused=0.0, pauses=pauses, since=now, changed=now)

    async def _change(self, name: str, change: Callable[[Schedule | None], Schedule]) -> Schedule:
        """Read, change and write, repeated on a conflict. Times are the server's."""
        if not self._measured:
            await self.client.topology.measure_clock()
            self._measured = True
        for _ in range(TRIES):
            old, revision, _ = await self._read(name)
            new = change(old)
            if new == old:
                return new
            ttl = REMOVED_SECONDS if new.removed else None
            try:
                body = schedules.encode(new)
                await self.bucket.put(schedule_key(name), body, expected=revision, ttl=ttl)
            except Conflict:
                continue
            return new
        raise Conflict(f"schedule {name!r}: {TRIES} tries lost to other writers; try again")

    # ---- firing by hand

    async def trigger(self, name: str) -> str:
        """Send one run now, in addition to its slots; returns the run's id."""
        schedule = await self.show(name)
        run = trigger_run(name, _make_id())
        names, body = self.client.broker.names, bytes(schedule.payload)
        message = first_message(names, schedule.group, schedule.job, run, body, schedule.headers)
        await self.client.store_surely(*message)
        return run

    # ---- an app's set

    async def sync(
        self,
        app: str,
        defined: Mapping[str, Schedule] | Iterable[Schedule],
        *,
        release: str = "",
        allow_empty: bool = False,
    ) -> Synced:
        """Register an app's whole set: add, change and remove; see the top of this module."""
        wanted = {
            s.name: s for s in (defined.values() if isinstance(defined, Mapping) else defined)
        }
        release = check_release(release)
        for schedule in wanted.values():
            self._check_size(schedule)
        newer = await self._claim_release(check_name(app, "app"), wanted, release, allow_empty)
        if newer:
            return Synced(newer=newer)
        synced = Synced()
        for name, schedule in wanted.items():
            mine = msgspec.structs.replace(schedule, app=app, release=release, source="code")
            await self._sync_one(name, mine, synced)
        for old in await self.list(app=app):
            if old.source == "code" and old.name not in wanted:
                await self._change(old.name, self._removed)
                synced.retired.append(old.name)
        return synced

    async def _sync_one(self, name: str, mine: Schedule, synced: Synced) -> None:
        old, _, _ = await self._read(name)
        new = await self._change(name, lambda found: self._added(found, mine, True))
        if old is None or old.removed:
            synced.added.append(name)
        else:
            (synced.kept if _same(old, new) else synced.changed).append(name)

    async def _claim_release(
        self, app: str, wanted: Mapping[str, Any], release: str, allow_empty: bool
    ) -> str:
        """Record this release's registration; returns a higher release if one has registered."""
        for _ in range(TRIES):
            revision, entry = await self.bucket.last(app_key(app))
            known = self.bucket.read(REGISTRATION.decode, entry) if entry else None
            old = known or Registration()
            if release_order(old.release) > release_order(release):
                return old.release
            if old.names and not wanted and not allow_empty:
                raise InvalidInput(
                    f"app {app!r} has {len(old.names)} schedules registered and its code has none: "
                    "nothing was changed. To remove them all, pass --allow-empty"
                )
            new = Registration(release, tuple(sorted(wanted)), self._now())
            if (old.release, old.names) == (new.release, new.names) and entry:
                return ""
            try:
                await self.bucket.put(app_key(app), REGISTRATION.encode(new), expected=revision)
            except Conflict:
                continue
            return ""
        raise Conflict(
            f"registering the schedules of app {app!r}: {TRIES} tries lost to others; try again"
        )


def merged(old: Schedule | None, new: Schedule, now: float) -> Schedule:
    """A new definition with what survives a change: the pause, and the start of an unchanged rule.

    `run_on_start` applies to new schedules only, not to those that are deployed again.
    """
    if old is None or old.removed:
        first = int(now) + 1 if new.run_on_start else 0
        return msgspec.structs.replace(new, since=now, changed=now, first=first)
    since = old.since if old.timing == new.timing else now
    found = msgspec.structs.replace(
        new,
        since=since,
        changed=old.changed,
        paused=old.paused,
        pauses=old.pauses,
        first=old.first,
    )
    return found if found == old else msgspec.structs.replace(found, changed=now)


def _same(old: Schedule, new: Schedule) -> bool:
    """Whether nothing but the release differs."""
    changes: dict[str, Any] = {"release": "", "changed": 0.0}
    return msgspec.structs.replace(old, **changes) == msgspec.structs.replace(new, **changes)
