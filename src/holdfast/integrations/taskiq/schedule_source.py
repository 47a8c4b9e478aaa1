"""`ResilientNATSScheduleSource`: taskiq-nats' bucket of schedules, read so that none goes missing.

It takes the arguments of `NATSKeyValueScheduleSource` and keeps its keys, `<prefix>.<schedule id>`.
Values are JSON; taskiq-nats reads them with `serializer=JSONSerializer()`.

Every call updates a view in memory by leader reads of what was written since, without a consumer or
watch that could mistake a full bucket for an empty one. The server's keys are compared with the
view, so what vanished without a marker (a purge, an expiry) is removed and logged. While the server
does not answer, the view stays as it is: an outage makes no schedule disappear. An unreadable entry
is logged and skipped.

Nothing is watched between two calls: taskiq asks every `--update-interval` seconds.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from pydantic import ValidationError
from taskiq import ScheduledTask, ScheduleSource
from taskiq.abc.serializer import TaskiqSerializer

from holdfast.broker import Broker, Bucket
from holdfast.broker.kv import Change, State
from holdfast.errors import BrokerError, InvalidName, NotFound, Unreadable
from holdfast.integrations.taskiq.connection import Connected, Servers, surely
from holdfast.integrations.taskiq.plain import PlainSerializer, readable
from holdfast.names import kv_stream, kv_subject

log = logging.getLogger("holdfast.taskiq")

View = dict[str, tuple[int, ScheduledTask]]
"""By key: revision and schedule."""


class ResilientNATSScheduleSource(Connected, ScheduleSource):
    """Schedules in a bucket."""

    def __init__(
        self,
        servers: Servers,
        bucket_name: str = "taskiq_schedules",
        prefix: str = "schedule",
        serializer: TaskiqSerializer | None = None,
        *,
        read_pickled: bool = False,
        **connect_options: Any,
    ) -> None:
        """The arguments of taskiq-nats; `read_pickled`: also read what it has pickled."""
        self.servers: Final = servers
        self.bucket_name: Final = bucket_name
        self.prefix: Final = prefix
        self.serializer = serializer or PlainSerializer(read_pickled=read_pickled)
        self.connect_options: Final = connect_options
        self._view: View = {}
        self._created = ""
        self._seen = 0

    # ---- life

    async def startup(self) -> None:
        """Connect, create the bucket unless it exists, and read it."""
        await self._open(self._prepare, self.servers, self.connect_options, name="taskiq-schedules")

    async def _prepare(self, broker: Broker) -> None:
        stream = kv_stream(self.bucket_name)
        try:
            await broker.api(f"STREAM.INFO.{stream}")
        except NotFound:
            await broker.api(f"STREAM.CREATE.{stream}", self._bucket())
        await self._refresh()

    async def shutdown(self) -> None:
        """Disconnect."""
        if self._broker is not None:
            await self._broker.close()

    def _bucket(self) -> dict[str, Any]:
        """The bucket's configuration, as taskiq-nats creates it."""
        return {
            "name": kv_stream(self.bucket_name),
            "subjects": [kv_subject(self.bucket_name, ">")],
            "max_msgs_per_subject": 1,
            "discard": "new",
            "allow_rollup_hdrs": True,
            "allow_msg_ttl": True,
            "allow_direct": True,
            "deny_delete": True,
            "duplicate_window": 120_000_000_000,
        }

    # ---- writing

    async def add_schedule(self, schedule: ScheduledTask) -> None:
        """Store a schedule, replacing one with the same id."""
        subject = self._subject(schedule.schedule_id)
        value = self.serializer.dumpb(schedule.model_dump(mode="json"))
        broker = self.connection
        await surely(broker, lambda: broker.store(subject, value), "storing a schedule")

    async def delete_schedule(self, schedule_id: str) -> None:
        """Remove a schedule, if it exists."""
        subject, broker = self._subject(schedule_id), self.connection
        gone = {"KV-Operation": "DEL"}
        await surely(broker, lambda: broker.store(subject, b"", gone), "deleting a schedule")

    async def post_send(self, task: ScheduledTask) -> None:
        """Remove a one-off schedule that was sent."""
        if task.time is not None:
            await self.delete_schedule(task.schedule_id)

    def _subject(self, schedule_id: str) -> str:
        if not schedule_id or any(c.isspace() or c in ".*>" for c in schedule_id):
            raise InvalidName(
                f"schedule id {schedule_id!r} cannot be used: no spaces and none of . * >"
            )
        return kv_subject(self.bucket_name, f"{self.prefix}.{schedule_id}")

    # ---- reading

    async def get_schedules(self) -> list[ScheduledTask]:
        """All schedules; while the server does not answer, those known before."""
        try:
            await self._refresh()
        except BrokerError as error:
            log.warning(
                "schedules could not be read (%s): using the %d known before",
                error,
                len(self._view),
            )
        return [schedule for _, schedule in self._view.values()]

    async def _refresh(self) -> None:
        """Bring the view up to date; it changes only when everything could be read."""
        bucket, keys = Bucket(self.connection, self.bucket_name), f"{self.prefix}.*"
        state = await bucket.state(keys)
        anew = state.created != self._created or state.last < self._seen
        view = {} if anew else dict(self._view)
        seen = 0 if anew else self._seen
        if state.last > seen:
            async for change in bucket.changes(keys, seen + 1):
                seen = change.revision
                self._apply(view, change)
        self._drop_vanished(view, state)
        self._view, self._seen, self._created = view, max(seen, state.last), state.created

    def _apply(self, view: View, change: Change) -> None:
        view.pop(change.key, None)
        if not change.value:
            return
        try:
            found = ScheduledTask.model_validate(readable(self.serializer, change.value))
        except (Unreadable, ValidationError) as error:
            notes = self.connection.unreadable
            notes.note(self.bucket_name, change.key, error, change.value)
        else:
            view[change.key] = (change.revision, found)

    def _drop_vanished(self, view: View, state: State) -> None:
        """Remove schedules that the server no longer had when asked, unless written since."""
        vanished = [k for k, (at, _) in view.items() if k not in state.keys and at <= state.last]
        for key in vanished:
            del view[key]
        if vanished:
            log.warning(
                "%d schedules vanished from bucket %s without being deleted, such as %s",
                len(vanished),
                self.bucket_name,
                vanished[0],
            )
