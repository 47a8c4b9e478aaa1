"""The live view of all schedules. It never shrinks because something was not heard.

The protocol. Listen first to what the server repeats of each write, then list the bucket by paged
direct gets, and note the newest revision that is in the view without a gap (`seen`). A write with
the next revision extends it; a gap, a reconnect and a regular look at the bucket's last revision
make the view read on from where it stopped. So what a lost message hid is found by counting, and
an empty bucket, which has nothing to count, makes no noise.

The view is a copy of the bucket, and puts back what it knows when the bucket was deleted and made
again: schedules, the pauses of jobs, the registrations of apps.

A schedule leaves the view only when its record says so (`removed`), or when its key is gone and
the stream's leader confirms that; the latter is logged, since nobody but an operator does it. A
listing that a lagging replica answered is recognised by its newest revision and repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

from holdfast.broker import Broker, Bucket, Received
from holdfast.broker.kv import direct_page
from holdfast.errors import BrokerError, Conflict
from holdfast.model import schedule as schedules
from holdfast.model.schedule import Schedule
from holdfast.names import (
    APPS,
    H_KV_OPERATION,
    H_MARKER,
    PAUSES,
    kv_key,
    kv_subject,
    parse_pause_key,
    schedule_key,
)
from holdfast.retrying import repeating

log = logging.getLogger("holdfast.scheduler")

LOOK_SECONDS = 5.0
STALE_TRIES = 25
STALE_SECONDS = 0.2
AT_ONCE = 500
"""Records taken in before others may run: computing first instants takes a while."""

OnChange = Callable[[Schedule, int], None]


class ScheduleView:
    """Every schedule there is, kept up to date while `run` runs."""

    def __init__(self, broker: Broker, on_change: OnChange, on_gone: Callable[[str], None]) -> None:
        self.schedules: dict[str, Schedule] = {}
        self.seen = 0
        """Every change up to this revision is in the view."""
        self.loaded = False
        self._broker = broker
        self._bucket = Bucket(broker, broker.names.schedules)
        self._revisions: dict[str, int] = {}
        self._created = ""
        self._others: dict[str, bytes] = {}
        """The bucket's other keys, as they were when they were last looked at."""
        self._on_change = on_change
        self._on_gone = on_gone
        self._look = asyncio.Event()

    # ---- life

    async def load(self) -> None:
        """Listen, then read everything."""
        names = self._broker.names
        await self._broker.subscribe(names.changed(self._bucket.name, ">"), self._heard)
        self._broker.on_reconnect(self._look.set)
        await self._catch_up(self._state_last(await self._state()))
        await self._look_at_others()
        self.loaded = True

    async def run(self) -> None:
        """Look every so often, and whenever something may have been missed."""
        await repeating(
            self.look,
            clock=self._broker.clock,
            every=LOOK_SECONDS,
            what="comparing the schedules",
            wake=self._look,
        )

    def look_soon(self) -> None:
        """Something may have been missed."""
        self._look.set()

    @property
    def paused(self) -> set[tuple[str, str]]:
        """Group and job of every job that is written down as paused."""
        return {found for key in self._others if (found := parse_pause_key(key))}

    async def look(self) -> None:
        """Compare the view with the bucket, and read what is missing."""
        created = self._created
        state = await self._state()
        if created and created != self._created:
            state = await self._put_back()
        await self._look_at_others()
        last = self._state_last(state)
        if last < self.seen or int(state.get("messages", 0)) < len(self.schedules):
            await self._confirm_gone(last)
        elif last > self.seen:
            await self._catch_up(last)

    async def _state(self) -> dict[str, Any]:
        info = await self._broker.api(f"STREAM.INFO.{self._bucket.stream}", timeout=2.0)
        state: dict[str, Any] = info["state"]
        self._created = info.get("created", "")
        return state

    async def _look_at_others(self) -> None:
        """Pauses and registrations: few, and removed without a word."""
        found: dict[str, bytes] = {}
        for prefix in (PAUSES, APPS):
            found |= {e.key: e.value async for e in self._bucket.entries(prefix)}
        self._others = found

    async def _put_back(self) -> dict[str, Any]:
        """The bucket was deleted and created again: write back what we know of it."""
        known = {schedule_key(n): schedules.encode(s) for n, s in self.schedules.items()}
        known |= self._others
        log.warning("the schedules' bucket was deleted: putting %d records back", len(known))
        try:
            for key, body in known.items():
                with contextlib.suppress(Conflict):  # another scheduler was faster
                    await self._bucket.put(key, body, expected=0)
        except BrokerError:
            self._created = "unfinished"  # again at the next look
            raise
        self._revisions.clear()
        self.seen = 0
        return await self._state()

    def _state_last(self, state: dict[str, Any]) -> int:
        return int(state.get("last_seq", 0))

    # ---- reading

    async def _catch_up(self, last: int) -> None:
        """Read every record after `seen`, until the newest revision is among them."""
        for attempt in range(STALE_TRIES):
            newest = await self._read_from(self.seen + 1)
            if newest >= last or (attempt and await self._is_complete(last)):
                break
            await self._broker.clock.sleep(STALE_SECONDS)
        self.seen = max(self.seen, last)

    async def _is_complete(self, last: int) -> bool:
        """The newest record may itself have expired: then nothing lies after the view."""
        state = await self._state()
        return int(state.get("messages", 0)) <= len(self._revisions) or last == self.seen

    async def _read_from(self, start: int) -> int:
        newest, taken = 0, 0
        subject = kv_subject(self._bucket.name, ">")
        while True:
            page = await direct_page(self._broker, self._bucket.stream, subject, start)
            newest = max(newest, page.last)
            for message in page.messages:
                self._take(message)
                taken += 1
                if taken % AT_ONCE == 0:
                    await asyncio.sleep(0)
            if not page.more:
                return newest
            start = page.last + 1

    async def _heard(self, message: Received) -> None:
        revision = int(message.headers.get("Nats-Sequence", 0))
        if revision <= self.seen:
            if revision < self.seen:
                self._look.set()
            return
        if H_KV_OPERATION in message.headers or H_MARKER in message.headers:
            self._look.set()
            await self._confirm(self._name(message), revision)
            return
        self._take(message)
        if revision == self.seen + 1 and self.loaded:
            self.seen = revision
        else:
            self._look.set()

    def _name(self, message: Received) -> str:
        key = kv_key(self._bucket.name, message.headers.get("Nats-Subject", ""))
        return key.removeprefix("schedule.") if key.startswith("schedule.") else ""

    def _take(self, message: Received) -> None:
        name = self._name(message)
        key = kv_key(self._bucket.name, message.headers["Nats-Subject"])
        revision = int(message.headers["Nats-Sequence"])
        if revision <= self._revisions.get(key, 0):
            return
        self._revisions[key] = revision
        if not name:
            return
        notes = self._broker.unreadable
        usable = functools.partial(schedules.usable, name)
        schedule = notes.read(usable, self._bucket.name, key, message.body)
        if schedule is None:
            return  # one that is known stays as it was
        if schedule.removed:
            self._drop(name)
        else:
            self.schedules[name] = schedule
            self._on_change(schedule, revision)

    def _drop(self, name: str) -> None:
        if self.schedules.pop(name, None) is not None:
            self._on_gone(name)

    # ---- keys that are gone

    async def _confirm(self, name: str, revision: int) -> None:
        if not name or name not in self.schedules:
            return
        if await self._bucket.get(schedule_key(name)) is None:
            log.warning("schedule %s was deleted from its bucket: it fires no more", name)
            self._revisions.pop(schedule_key(name), None)
            self._drop(name)

    async def _confirm_gone(self, last: int) -> None:
        """The bucket holds less than the view: ask the leader about every schedule."""
        log.warning("the schedules' bucket holds less than before: asking about each schedule")
        for name in list(self.schedules):
            await self._confirm(name, 0)
        self._revisions.clear()  # it may be another stream by now, with other revisions
        self.seen = 0
        await self._catch_up(last)
