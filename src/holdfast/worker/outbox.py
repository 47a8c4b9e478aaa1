"""What an execution sends besides acknowledgements: retries, events, dead letters, objects."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from holdfast.client import Client
from holdfast.clock import rfc3339
from holdfast.errors import NotFound, PayloadTooLarge
from holdfast.names import H_MSG_ID, H_OBJECT, H_SCHEDULE, H_SCHEDULE_TARGET, dead_object

DAY_SECONDS = 86_400.0


class Buried(NamedTuple):
    """A dead letter just written, so that it can be taken back; 0 when it was known before."""

    sequence: int = 0
    object: str = ""


class Outbox(Protocol):
    """Where an execution's messages go."""

    @property
    def largest_result(self) -> int:
        """Results above this go to the object store."""
        ...

    async def park(
        self,
        group: str,
        job: str,
        run: str,
        mark: str,
        body: bytes,
        headers: dict[str, str],
        due: float,
    ) -> None:
        """Store a message that is delivered when it is due; one of the same mark is replaced."""
        ...

    async def is_parked(self, group: str, job: str, run: str) -> bool:
        """Whether a message of a run waits until it is due."""
        ...

    async def event(self, event: str, body: bytes, headers: dict[str, str]) -> bool:
        """Publish an event; False when no job subscribes to it."""
        ...

    async def dead_letter(
        self, group: str, job: str, body: bytes, headers: dict[str, str]
    ) -> Buried:
        """Keep a run that was given up."""
        ...

    async def unbury(self, buried: Buried) -> None:
        """Remove a dead letter whose writer had lost the run. Best effort."""
        ...

    async def keep(self, name: str, body: bytes, ttl: float | None = None) -> str:
        """Put a large value into the object store, for `ttl` seconds; returns its name."""
        ...

    async def forget(self, name: str) -> None:
        """Remove a large value that nothing refers to. Best effort."""
        ...


class NatsOutbox:
    """The outbox on NATS."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def largest_result(self) -> int:
        return self._client.broker.max_message_bytes // 4

    async def park(
        self,
        group: str,
        job: str,
        run: str,
        mark: str,
        body: bytes,
        headers: dict[str, str],
        due: float,
    ) -> None:
        names = self._client.broker.names
        scheduled = {
            **headers,
            H_SCHEDULE: f"@at {rfc3339(due)}",
            H_SCHEDULE_TARGET: names.job(group, job),
        }
        subject = names.later(group, job, run, mark)
        await self._client.store_surely(subject, body, scheduled)

    async def is_parked(self, group: str, job: str, run: str) -> bool:
        broker = self._client.broker
        subject = broker.names.later(group, job, run, "*")
        try:
            await broker.api(f"STREAM.MSG.GET.{broker.names.jobs}", {"last_by_subj": subject})
        except NotFound:
            return False
        return True

    async def event(self, event: str, body: bytes, headers: dict[str, str]) -> bool:
        await self._client.store_event(event, body, headers)
        return await self._client.has_subscriber(event)

    async def dead_letter(
        self, group: str, job: str, body: bytes, headers: dict[str, str]
    ) -> Buried:
        subject = self._client.broker.names.dead_letter(group, job)
        name = ""
        try:
            stored = await self._client.store_surely(subject, body, headers)
        except PayloadTooLarge:
            ttl = self._client.records.dead_days * DAY_SECONDS
            name = await self.keep(dead_object(headers[H_MSG_ID]), body, ttl)
            stored = await self._client.store_surely(subject, b"", {**headers, H_OBJECT: name})
        return Buried(0 if stored.duplicate else stored.seq, name)

    async def unbury(self, buried: Buried) -> None:
        if buried.sequence:
            await self._client.drop_stored(self._client.broker.names.dead, buried.sequence)
        if buried.object:
            await self.forget(buried.object)

    async def keep(self, name: str, body: bytes, ttl: float | None = None) -> str:
        return await self._client.objects.put(name, body, ttl)

    async def forget(self, name: str) -> None:
        await self._client.objects.delete(name)
