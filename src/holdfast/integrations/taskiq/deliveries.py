"""What this process holds of a taskiq queue, and how each of them ends.

    arrived ──► taken by a receiver ──► executed ──► taskiq acknowledges, by its ack type
                  │                       │            done      ack
                  │                       │            failed    nak(wait), or dead letter and ack
                  │                       └─ acknowledged before (when_received): dead letter
                  ├─ unreadable: dead letter · not known here: nak(wait), another may know it
                  └─ ended without a word (manual, an error of a middleware): as if it had failed

taskiq tells a broker nothing but "ack", and that for failures too. What really happened is learned
on the way: its receiver handles each message in one asyncio task, reads `ack` from the message at
the start of it, and calls formatter and middlewares inside it. So the asyncio task says which
message is meant, and its end that nobody will say anything more.

Everything held, also what waits in a buffer, is extended in time, so that a long function is never
run twice because it is long. What was finished here is known by its place in the stream: a second
delivery of it, as after a restart of the server that lost the acknowledgement, is acknowledged and
not executed; a second delivery of what is still running here only renews the right to acknowledge.

Not guaranteed: that nobody else runs it. A process cut off for longer than `ack_wait` is taken for
dead by the server, and its messages are delivered to others. That is at least once; what must not
be repeated needs Holdfast's own jobs and their claims.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from taskiq import AckableMessage
from taskiq.message import TaskiqMessage

from holdfast.broker import Broker, Delivery
from holdfast.broker.pull import ACK, IN_PROGRESS, nak_body
from holdfast.errors import BrokerError, NotConnected
from holdfast.integrations.taskiq.dead import Grave
from holdfast.model.backoff import Backoff

log = logging.getLogger("holdfast.taskiq")

REMEMBERED: Final = 20_000
"""Messages finished here that are known again."""
GATHER_SECONDS: Final = 0.005
"""How long an acknowledgement may wait for others to go with: a write costs more than all else."""
UNBURIED_SECONDS: Final = 5.0
"""When a message comes back whose dead letter could not be stored."""
CRASHES: Final = 10
"""Deliveries beyond the attempts after which a message is taken for one that kills its worker."""

Place = tuple[int, int]
"""Where and when the stream stored a message: one that nothing else ever has."""


class Held:
    """A message that was delivered to this process and has not ended."""

    __slots__ = (
        "delivery",
        "executing",
        "failure",
        "final",
        "message",
        "place",
        "resent",
        "taken",
        "unread",
    )

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.place: Place = (delivery.sequence, delivery.stored_ns)
        self.message: TaskiqMessage | None = None
        self.unread: BaseException | None = None
        self.taken = False
        self.executing = False
        self.failure: BaseException | None = None
        self.final = False
        """No further attempt, whatever the policy says."""
        self.resent = False
        """Somebody sent the same request again: a retry middleware, or the function itself."""


class HeldMessage(AckableMessage):
    """What a receiver gets. Reading `ack` tells in which asyncio task it is handled."""

    @classmethod
    def of(cls, data: bytes, bind: Callable[[], Any]) -> HeldMessage:
        """Made without pydantic's checks, once per message: the bytes are bytes."""
        made = cls.__new__(cls)
        object.__setattr__(made, "__dict__", {"data": data, "bind": bind})
        object.__setattr__(made, "__pydantic_fields_set__", {"data"})
        return made


def _ack_of(message: Any) -> Any:
    return message.__dict__["bind"]()


setattr(HeldMessage, "ack", property(_ack_of))  # noqa: B010 - pydantic takes fields off the class


class Deliveries:
    """Everything held by one broker."""

    def __init__(self, broker: Broker, grave: Grave, retry: Backoff) -> None:
        self._broker = broker
        self._grave = grave
        self._retry = retry
        self._held: dict[Place, Held] = {}
        self._handled: dict[asyncio.Task[Any], Held] = {}
        self._finished: dict[Place, None] = {}
        self._unsent: dict[str, bytes] = {}
        """By reply subject: what is to be said soon, or as soon as the connection is back."""
        self._said = 0.0
        self._gathering: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._stop_listening = broker.on_reconnect(self._reconnected)

    def __len__(self) -> int:
        return len(self._held)

    # ---- taking

    def hold(self, delivery: Delivery) -> None:
        """It has arrived: from now on it is extended."""
        held = Held(delivery)
        known = self._held.get(held.place)
        if known is not None:
            known.delivery = delivery
        elif held.place not in self._finished:
            self._held[held.place] = held

    async def take(self, delivery: Delivery) -> HeldMessage | None:
        """The message for a receiver; None when there is nothing to execute."""
        place = (delivery.sequence, delivery.stored_ns)
        if place in self._finished:
            await self._say(delivery.reply, ACK)
            return None
        held = self._held.get(place)
        if held is None or held.delivery is not delivery or held.taken:
            return None  # given back meanwhile, or still running here
        held.taken = True
        if delivery.deliveries > self._retry.attempts + CRASHES:
            await self._bury(held, "crashed", "delivered again and again, and never ended")
            return None
        return HeldMessage.of(delivery.body, lambda: self._bind(held))

    def _bind(self, held: Held) -> Any:
        """The receiver has begun: remember in which asyncio task, and hear of its end."""
        task = asyncio.current_task()
        if task is not None and task not in self._handled:
            self._handled[task] = held
            task.add_done_callback(self._ended)
        return lambda: self.settle(held)

    def current(self) -> Held | None:
        """What the calling asyncio task is about."""
        task = asyncio.current_task()
        return self._handled.get(task) if task is not None else None

    # ---- ending

    async def settle(self, held: Held) -> None:
        """taskiq says "ack": find out what it means."""
        if held.place not in self._held:
            return
        if held.unread is not None:
            await self._bury(held, "invalid", f"unreadable: {held.unread}", held.unread)
        elif held.failure is not None:
            await self._failed(held, held.failure)
        elif held.message is not None and not held.executing:
            unknown = LookupError(f"no task is called {held.message.task_name!r} here")
            await self._failed(held, unknown)
        else:
            self._forget(held, finished=True)
            await self._say(held.delivery.reply, ACK)

    async def _failed(self, held: Held, error: BaseException) -> None:
        wait = self.wait(held)
        if wait is None:
            await self._bury(held, "failed", f"{type(error).__name__}: {error}", error)
        else:
            await self._give_back(held, wait)

    def wait(self, held: Held) -> float | None:
        """Seconds until the next attempt; None when there is none."""
        return None if held.final else self._retry.wait(held.delivery.deliveries)

    async def _bury(
        self, held: Held, reason: str, why: str, error: BaseException | None = None
    ) -> None:
        """A dead letter first, then the ack; what cannot be buried comes back later."""
        self._forget(held, finished=True)
        try:
            await self._grave.bury(held.delivery, held.message, reason, why, error)
        except BrokerError as trouble:
            log.error("a dead letter could not be stored (%s): the message comes back", trouble)
            self._finished.pop(held.place, None)
            await self._say(held.delivery.reply, nak_body(UNBURIED_SECONDS))
            return
        await self._say(held.delivery.reply, ACK)

    async def bury_copy(self, held: Held) -> None:
        """It failed after it had been acknowledged: nothing is left but to keep a copy."""
        error = held.failure
        try:
            await self._grave.bury(held.delivery, held.message, "failed", repr(error), error)
        except BrokerError as trouble:
            log.error("a dead letter could not be stored: %s", trouble)

    async def give_back(self, delivery: Delivery) -> None:
        """Nobody here has begun with it: let others have it."""
        held = self._held.get((delivery.sequence, delivery.stored_ns))
        if held is not None and not held.taken:
            await self._give_back(held)

    async def _give_back(self, held: Held, wait: float = 0.0) -> None:
        self._forget(held)
        await self._say(held.delivery.reply, nak_body(wait))

    def _forget(self, held: Held, *, finished: bool = False) -> None:
        self._held.pop(held.place, None)
        if finished:
            self._finished[held.place] = None
            if len(self._finished) > REMEMBERED:
                del self._finished[next(iter(self._finished))]

    def is_held(self, held: Held) -> bool:
        """Whether nothing has been said about it yet."""
        return held.place in self._held

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """The receiver has no more to say: what it did not acknowledge was not done."""
        held = self._handled.pop(task, None)
        if held is None or not self.is_held(held):
            return
        if task.cancelled():
            step = self._give_back(held)
        else:
            error = task.exception() or held.failure
            step = self._failed(held, error or RuntimeError("it ended and was not acknowledged"))
        self._spawn(step)

    # ---- saying

    async def _say(self, reply: str, words: bytes) -> None:
        """Tell the server; at once when little is said, together with others when much is."""
        self._unsent[reply] = words
        now = self._broker.clock.monotonic()
        if now - self._said > GATHER_SECONDS:
            await self._flush()
        elif self._gathering is None:
            loop = asyncio.get_running_loop()
            self._gathering = loop.call_later(GATHER_SECONDS, self._reconnected)

    async def _flush(self) -> None:
        """Say all of it; while the connection is away, as soon as it is back."""
        self._gathering = None
        self._said = self._broker.clock.monotonic()
        unsent, self._unsent = self._unsent, {}
        try:
            await self._broker.publish_all([(r, words, {}) for r, words in unsent.items()])
        except NotConnected:
            self._unsent = unsent | self._unsent

    def _reconnected(self) -> None:
        self._spawn(self._flush())

    def _spawn(self, step: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(step)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def extend(self) -> None:
        """Ask for more time for everything held."""
        replies = [held.delivery.reply for held in self._held.values()]
        try:
            await self._broker.publish_all([(reply, IN_PROGRESS, {}) for reply in replies])
        except NotConnected:
            log.debug("%d messages could not be extended: not connected", len(replies))

    async def close(self) -> None:
        """Give back what has not ended, so that others get it at once."""
        self._stop_listening()
        if self._ending:
            await asyncio.wait(self._ending, timeout=5)
        for held in list(self._held.values()):
            await self._give_back(held)
        if self._gathering:
            self._gathering.cancel()
        await self._flush()
