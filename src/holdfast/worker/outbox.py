"""What an execution sends besides acknowledgements: retries, events, dead letters, objects."""

from __future__ import annotations

from typing import Protocol

from holdfast.client import Client
from holdfast.clock import rfc3339
from holdfast.errors import PayloadTooLarge
from holdfast.names import H_MSG_ID, H_OBJECT, H_SCHEDULE, H_SCHEDULE_TARGET


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

    async def event(self, event: str, body: bytes, headers: dict[str, str]) -> bool:
        """Publish an event; False when no job subscribes to it."""
        ...

    async def dead_letter(self, group: str, job: str, body: bytes, headers: dict[str, str]) -> None:
        """Keep a run that was given up."""
        ...

    async def keep(self, name: str, body: bytes) -> str:
        """Put a large value into the object store; returns its name."""
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

    async def event(self, event: str, body: bytes, headers: dict[str, str]) -> bool:
        await self._client.store_event(event, body, headers)
        return await self._client.has_subscriber(event)

    async def dead_letter(self, group: str, job: str, body: bytes, headers: dict[str, str]) -> None:
        subject = self._client.broker.names.dead_letter(group, job)
        try:
            await self._client.store_surely(subject, body, headers)
        except PayloadTooLarge:
            name = await self.keep(f"dead/{headers[H_MSG_ID]}", body)
            await self._client.store_surely(subject, b"", {**headers, H_OBJECT: name})

    async def keep(self, name: str, body: bytes) -> str:
        return await self._client.objects.put(name, body)
