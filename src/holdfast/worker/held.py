"""A message that this process holds, from its delivery until it is settled or given back."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Any, Protocol

from holdfast.app import Job
from holdfast.ownership.claims import Claim
from holdfast.worker.calling import Call


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
        "call",
        "cause",
        "claim",
        "created",
        "event",
        "extended",
        "failures",
        "job",
        "keyed",
        "message",
        "patience",
        "run",
        "running",
        "since",
        "stamp",
        "waiter",
    )

    patience: float
    waiter: asyncio.Future[None]

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
        self.call: Call | None = None
        """Of its handler, once that has started."""
        self.running = False

    @property
    def lost(self) -> bool:
        return self.claim is not None and self.claim.lost

    @property
    def interrupted(self) -> bool:
        return self.cause is not None

    def begin(self, call: Call, patience: float) -> asyncio.Future[None]:
        """The handler runs now.

        The future is done when it has ended, and also when it was interrupted and still runs after
        `patience` seconds: time enough to clean up.
        """
        self.call = call
        self.running = True
        self.patience = patience
        self.waiter = asyncio.get_running_loop().create_future()
        call.task.add_done_callback(self._wake)
        return self.waiter

    def _wake(self, _: object = None) -> None:
        if not self.waiter.done():
            self.waiter.set_result(None)

    def interrupt(self, cause: Interrupt) -> None:
        """Stop the handler, if it is running; the first cause counts."""
        if self.cause is None:
            self.cause = cause
            if self.running and self.call is not None:
                self.call.task.cancel()
                asyncio.get_running_loop().call_later(self.patience, self._wake)

    def over(self) -> None:
        """The attempt is over: it cannot be interrupted, and its context refuses everything."""
        self.running = False
