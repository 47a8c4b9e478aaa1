"""A message that this process holds, from its delivery until it is settled or given back."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Any, Protocol

from holdfast.app import Job
from holdfast.ownership.claims import Claim


class Message(Protocol):
    """A delivery, from NATS or from memory."""

    subject: str
    body: bytes
    headers: dict[str, str]
    reply: str

    @property
    def deliveries(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def stored_ns(self) -> int: ...

    async def ack(self) -> None: ...
    async def ack_confirmed(self) -> None: ...
    async def nak(self, delay: float = 0.0) -> None: ...
    async def extend(self) -> None: ...


class Interrupt(Enum):
    """Why a running handler was stopped."""

    TIMEOUT = "timeout"
    CANCEL = "cancel"
    CLAIM_LOST = "claim lost"
    SHUTDOWN = "shutdown"


class Held:
    """One held message with all that is known of its run."""

    __slots__ = (
        "attempt",
        "cause",
        "claim",
        "created",
        "event",
        "extended",
        "failures",
        "job",
        "keyed",
        "message",
        "run",
        "since",
        "stamp",
        "task",
    )

    def __init__(self, message: Message, job: Job[Any, Any], since: float, event: str = "") -> None:
        self.message = message
        self.job = job
        self.since = since
        self.extended = since
        """When the server last heard that the message is in good hands."""
        self.event = event
        self.run = ""
        self.stamp = 1
        self.failures = 0
        self.attempt = 1
        self.created = 0.0
        self.keyed = False
        self.claim: Claim | None = None
        self.cause: Interrupt | None = None
        self.task: asyncio.Task[Any] | None = None

    @property
    def lost(self) -> bool:
        return self.claim is not None and self.claim.lost

    def interrupt(self, cause: Interrupt) -> None:
        """Stop the handler, if it is running; the first cause counts."""
        if self.cause is None:
            self.cause = cause
            if self.task is not None:
                self.task.cancel()

    def over(self) -> None:
        """The handler has ended: nothing can interrupt it any more.

        A cancellation that was ours has done its work, and the slot's next run must not see it.
        """
        task, self.task = self.task, None
        if self.cause is not None and task is not None:
            while task.uncancel():
                pass
