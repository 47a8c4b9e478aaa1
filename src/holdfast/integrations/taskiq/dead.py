"""Dead letters of taskiq queues: the untouched bytes, with the story in the headers.

One stream for all queues of a namespace, made when the first letter is written. It is not
Holdfast's own: what `holdfast dead replay` sends is a run of a job, and these are messages of
taskiq. `DeadLetters` lists them, sends them again to where they came from, and drops them.
"""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from taskiq.message import TaskiqMessage

from holdfast.broker import Broker, Delivery, Received
from holdfast.broker.kv import direct_batch
from holdfast.broker.objects import Objects
from holdfast.broker.streams import DAY, NANO, Topology
from holdfast.config import RecordConfig
from holdfast.errors import BrokerError, NotFound, PayloadTooLarge, Unreadable
from holdfast.integrations.taskiq.connection import Servers, connect, patiently
from holdfast.model.dead import TEXT, dead_headers
from holdfast.names import (
    DEFAULT_NAMESPACE,
    H_ERROR,
    H_MSG_ID,
    H_OBJECT,
    H_REASON,
    H_SUBJECT,
    H_TRACEBACK,
    OWN_HEADERS,
    SERVER_HEADERS,
    sequence_run,
)

DEAD_DAYS: Final = 30
STORE_SECONDS: Final = 5.0

H_TASK: Final = f"{OWN_HEADERS}Task"
H_TASK_ID: Final = f"{OWN_HEADERS}Task-Id"


def is_own(header: str) -> bool:
    """Whether a header belongs to the system and not to the message."""
    return header.startswith((OWN_HEADERS, SERVER_HEADERS))


class Grave:
    """Where one process puts what was given up."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._made = False

    async def bury(
        self,
        delivery: Delivery,
        message: TaskiqMessage | None,
        reason: str,
        why: str,
        error: BaseException | None = None,
    ) -> None:
        """Store a dead letter; repeated, it is stored once."""
        headers = {k: v for k, v in delivery.headers.items() if not is_own(k)}
        headers |= dead_headers(
            run=sequence_run(delivery.sequence, delivery.stored_ns),
            message=delivery.deliveries,
            subject=delivery.subject,
            reason=reason,
            error=why,
            now=self._broker.clock.utc(),
            story="".join(traceback.format_exception(error)) if error else "",
            failures=delivery.deliveries,
        )
        if message is not None:
            headers |= {H_TASK: message.task_name, H_TASK_ID: message.task_id}
        await patiently(self._broker, lambda: self._store(delivery, headers), seconds=STORE_SECONDS)

    async def _store(self, delivery: Delivery, headers: dict[str, str]) -> None:
        await self._ensure()
        subject = self._broker.names.taskiq_dead_letter(delivery.subject)
        try:
            await self._broker.store(subject, delivery.body, headers)
        except PayloadTooLarge:
            name = f"taskiq/{headers[H_MSG_ID]}"
            await Objects(self._broker, ttl=DEAD_DAYS * DAY).put(name, delivery.body)
            await self._broker.store(subject, b"", headers | {H_OBJECT: name})

    async def _ensure(self) -> None:
        if self._made:
            return
        names, topology = self._broker.names, Topology(self._broker, RecordConfig())
        await topology.ensure_stream(
            {
                "name": names.taskiq_dead,
                "subjects": [names.taskiq_dead_letter()],
                "storage": "file",
                "retention": "limits",
                "max_age": DEAD_DAYS * DAY * NANO,
                "num_replicas": await topology.wanted_replicas(),
                "allow_direct": True,
            }
        )
        self._made = True


@dataclass(frozen=True)
class DeadLetter:
    """A message that was given up."""

    id: int
    task: str
    task_id: str
    subject: str
    """Where it was sent to, and `replay` sends it again."""
    reason: str
    """`failed`, `invalid` (unreadable) or `crashed` (delivered again and again)."""
    error: str
    traceback: str
    labels: dict[str, str]
    body: bytes


class DeadLetters:
    """The dead letters of every taskiq queue of a namespace. Use it as `async with`."""

    def __init__(
        self, servers: Servers, *, namespace: str = DEFAULT_NAMESPACE, **connection: Any
    ) -> None:
        self._servers = servers
        self._namespace = namespace
        self._options = connection
        self._broker: Broker

    async def __aenter__(self) -> DeadLetters:
        self._broker = await connect(
            self._servers, self._options, name="taskiq-dead", namespace=self._namespace
        )
        self._stream = self._broker.names.taskiq_dead
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._broker.close()

    async def list(self) -> AsyncIterator[DeadLetter]:
        """Every letter, oldest first."""
        everything = self._broker.names.taskiq_dead_letter()
        try:
            await self._broker.api(f"STREAM.INFO.{self._stream}")
        except NotFound:
            return  # nothing was ever given up
        async for message in direct_batch(self._broker, self._stream, everything):
            yield await self._letter(message)

    async def _letter(self, message: Received) -> DeadLetter:
        headers, body = message.headers, message.body
        if kept := headers.get(H_OBJECT):
            body = await Objects(self._broker).get(kept)
        return DeadLetter(
            int(headers["Nats-Sequence"]),
            headers.get(H_TASK, ""),
            headers.get(H_TASK_ID, ""),
            headers.get(H_SUBJECT, ""),
            headers.get(H_REASON, ""),
            _text(headers.get(H_ERROR, "")),
            _text(headers.get(H_TRACEBACK, "")),
            {k: v for k, v in headers.items() if not is_own(k)},
            body,
        )

    async def replay(self, letter: DeadLetter) -> None:
        """Send it again to where it came from, and drop the letter; told twice, sent once."""
        headers = letter.labels | {H_MSG_ID: f"replay.{self._namespace}.{letter.id}"}
        await self._broker.store(letter.subject, letter.body, headers)
        await self.drop(letter)

    async def drop(self, letter: DeadLetter) -> None:
        """Remove a letter for good; it not being there is fine."""
        try:
            await self._broker.api(f"STREAM.MSG.DELETE.{self._stream}", {"seq": letter.id})
        except NotFound:
            return
        except BrokerError as error:
            if "no message found" not in str(error):
                raise


def _text(text: str) -> str:
    """Texts are JSON in the headers, so that any of them is one line."""
    try:
        return TEXT.decode(text.encode("utf-8", "surrogateescape")) if text else ""
    except Unreadable:
        return text
