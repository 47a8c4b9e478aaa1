"""Dead letters of taskiq queues, stored with those of Holdfast's own jobs.

`holdfast dead` and the pages show them: the queue's stream as group, the task as job (`a.b:c` is
`a_b_c`). A letter keeps the original bytes and labels; replaying it sends them to the queue again.
`DeadLetters` does the same from Python.

Earlier versions kept them in a separate stream, which `DeadLetters` still reads.
"""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from taskiq.message import TaskiqMessage

from holdfast.broker import Broker, Delivery
from holdfast.broker.objects import Objects
from holdfast.broker.streams import Topology, stream_configs
from holdfast.config import RecordConfig
from holdfast.durations import DAY
from holdfast.errors import NotFound, PayloadTooLarge
from holdfast.integrations.taskiq.connection import Connected, Servers, connect, plain_name, surely
from holdfast.model.dead import dead_headers
from holdfast.model.message import user_headers
from holdfast.names import (
    DEFAULT_NAMESPACE,
    H_MSG_ID,
    H_OBJECT,
    H_QUEUE,
    H_SUBJECT,
    H_TASK,
    H_TASK_ID,
    dead_object,
    sequence_run,
)
from holdfast.status.dead import read_letter
from holdfast.status.messages import Kept, delete, oldest
from holdfast.status.replaying import resend
from holdfast.telemetry import Telemetry

RECORDS: Final = RecordConfig()


class DeadLetterStore:
    """Stores the dead letters of one process."""

    def __init__(self, broker: Broker, queue: str, telemetry: Telemetry) -> None:
        self._broker = broker
        self._queue = queue
        self._telemetry = telemetry
        self._is_there = False

    async def put(
        self,
        delivery: Delivery,
        message: TaskiqMessage | None,
        reason: str,
        why: str,
        error: BaseException | None = None,
        failures: int = 0,
    ) -> None:
        """Store a dead letter; a repeat is stored once."""
        headers = user_headers(delivery.headers) | dead_headers(
            run=sequence_run(delivery.sequence, delivery.stored_ns),
            message=delivery.deliveries,
            subject=delivery.subject,
            reason=reason,
            error=why,
            now=self._broker.clock.utc(),
            traceback="".join(traceback.format_exception(error)) if error else "",
            failures=failures,
        )
        headers[H_QUEUE] = self._queue
        job = "unreadable"
        if message is not None:
            headers |= {H_TASK: message.task_name, H_TASK_ID: message.task_id}
            job = plain_name(message.task_name)
        group = plain_name(self._queue)
        subject = self._broker.names.dead_letter(group, job)
        step = "storing a dead letter"
        await surely(self._broker, lambda: self._store(subject, delivery.body, headers), step)
        self._telemetry.dead.labels(group, job, reason).inc()

    async def _store(self, subject: str, body: bytes, headers: dict[str, str]) -> None:
        if not self._is_there:
            topology, names = Topology(self._broker, RECORDS), self._broker.names
            configs = stream_configs(names, RECORDS, await topology.wanted_replicas())
            await topology.ensure_stream(next(c for c in configs if c["name"] == names.dead))
            self._is_there = True
        try:
            await self._broker.store(subject, body, headers)
        except PayloadTooLarge:
            name = dead_object(headers[H_MSG_ID])
            await Objects(self._broker, ttl=RECORDS.dead_days * DAY).put(name, body)
            await self._broker.store(subject, b"", headers | {H_OBJECT: name})


@dataclass(frozen=True)
class DeadLetter:
    """A message that was given up."""

    id: int
    task: str
    task_id: str
    subject: str
    """Where it was sent; `replay` sends it there again."""
    reason: str
    """`failed`, `invalid` (unreadable) or `crashed` (started repeatedly, never ended)."""
    error: str
    traceback: str
    labels: dict[str, str]
    body: bytes
    kept: Kept
    stream: str


class DeadLetters(Connected):
    """The dead letters of every taskiq queue of a namespace. Use it as `async with`."""

    def __init__(
        self, servers: Servers, *, namespace: str = DEFAULT_NAMESPACE, **connection: Any
    ) -> None:
        self._servers = servers
        self._namespace = namespace
        self._options = connection

    async def __aenter__(self) -> DeadLetters:
        self._broker = await connect(
            self._servers, self._options, name="taskiq-dead", namespace=self._namespace
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.connection.close()

    async def list(self) -> AsyncIterator[DeadLetter]:
        """Every letter, oldest first."""
        broker, names = self.connection, self.connection.names
        streams = {
            names.taskiq_dead: names.taskiq_dead_letter(),
            names.dead: names.dead_letter("*", "*"),
        }
        for stream, subject in streams.items():
            try:
                await broker.api(f"STREAM.INFO.{stream}")
            except NotFound:
                continue  # no message was given up yet
            async for kept in oldest(broker, stream, subject):
                if H_QUEUE in kept.headers or stream == names.taskiq_dead:
                    yield await self._letter(kept, stream)

    async def _letter(self, kept: Kept, stream: str) -> DeadLetter:
        found, headers = read_letter(kept, self.connection.names), kept.headers
        body = await Objects(self.connection).get(found.object) if found.object else kept.body
        return DeadLetter(
            found.id,
            headers.get(H_TASK, ""),
            headers.get(H_TASK_ID, ""),
            headers.get(H_SUBJECT, ""),
            found.reason,
            found.error,
            found.traceback,
            found.headers,
            body,
            kept,
            stream,
        )

    async def replay(self, letter: DeadLetter) -> None:
        """Send it to its queue again and drop the letter; a repeated call sends it once."""
        await resend(self.connection, letter.kept, letter.body)
        await self.drop(letter)

    async def drop(self, letter: DeadLetter) -> None:
        """Remove a letter for good; no error if it is already gone."""
        await delete(self.connection, letter.stream, letter.id)
