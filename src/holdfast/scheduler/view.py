"""The live view of all schedules, the pauses of jobs and the registrations of apps.

It follows the bucket (`broker.mirror`) and never shrinks because of a missed message: a schedule
leaves it only when its record says so (`removed`), or when the stream's leader confirms that its
key is gone; the latter is logged, since only an operator does that.

It is also a copy of the bucket: if the bucket was deleted, the view writes its records back.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable

from holdfast.broker import Broker, Bucket, Entry
from holdfast.broker.mirror import Mirror
from holdfast.errors import Conflict
from holdfast.model import schedule as schedules
from holdfast.model.schedule import Schedule
from holdfast.names import APPS, PAUSES, parse_pause_key, schedule_key

log = logging.getLogger("holdfast.scheduler")

OnChange = Callable[[Schedule, int], None]


class ScheduleView(Mirror):
    """All schedules, kept current while `run` runs."""

    def __init__(self, broker: Broker, on_change: OnChange, on_gone: Callable[[str], None]) -> None:
        bucket = Bucket(broker, broker.names.schedules)
        super().__init__(bucket, self._learn, self._forget, on_deleted=self._put_back)
        self.schedules: dict[str, Schedule] = {}
        self._others: dict[str, bytes] = {}
        """The records of pauses and registrations, by key."""
        self._changed = on_change
        self._removed = on_gone

    @property
    def paused(self) -> set[tuple[str, str]]:
        """Group and job of every paused job."""
        return {found for key in self._others if (found := parse_pause_key(key))}

    def _learn(self, entry: Entry) -> None:
        if entry.key.split(".")[0] in (PAUSES, APPS):
            self._others[entry.key] = entry.value
        if not (name := _name(entry.key)):
            return
        schedule = self._bucket.read(functools.partial(schedules.usable, name), entry)
        if schedule is None:
            return  # the known definition stays in force
        if schedule.removed:
            self._drop(name)
        else:
            self.schedules[name] = schedule
            self._changed(schedule, entry.revision)

    def _forget(self, key: str) -> None:
        self._others.pop(key, None)
        if (name := _name(key)) in self.schedules:
            log.warning("schedule %s was deleted from its bucket and no longer fires", name)
            self._drop(name)

    def _drop(self, name: str) -> None:
        if self.schedules.pop(name, None) is not None:
            self._removed(name)

    async def _put_back(self) -> None:
        """The bucket was deleted and recreated: write its records back."""
        known = {schedule_key(n): schedules.encode(s) for n, s in self.schedules.items()}
        known |= self._others
        log.warning("restoring %d records of %s", len(known), self._bucket.name)
        for key, body in known.items():
            with contextlib.suppress(Conflict):  # another scheduler was faster
                await self._bucket.put(key, body, expected=0)


def _name(key: str) -> str:
    """The schedule of a key; empty for other kinds of keys."""
    prefix = schedule_key("")
    return key.removeprefix(prefix) if key.startswith(prefix) else ""
