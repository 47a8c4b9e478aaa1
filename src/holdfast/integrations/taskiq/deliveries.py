"""The messages of a taskiq queue that this process holds, and how each one ends.

    arrived ──► taken by a receiver ──► executed ──► taskiq acknowledges, by its ack type
                  │                       │            done      ack
                  │                       │            failed    nak(wait), or dead letter and ack
                  │                       └─ acknowledged before (when_received): dead letter
                  ├─ unreadable: dead letter · not known here: nak(wait), another may know it
                  └─ ended without an ack (manual, an error of a middleware): as if it had failed

taskiq tells a broker only "ack", even for failures. What really happened is observed: its receiver
handles each message in one asyncio task, reads `ack` from the message at the start of that task,
and calls formatter and middlewares inside it. So the asyncio task identifies the message, and its
end means that nothing more will come.

An attempt is a started function, not a delivery (see `queue`). A message is given up when its
attempts have failed, when it has been started `CRASHES` times without ever ending, or when the
server would not deliver it again because of the consumer's `max_deliver`.

Everything held, even in a buffer, is extended in time, so no function runs twice only because it is
long. Messages finished here are recognised by their sequence in the stream: a redelivery, for
example after a server restart that lost the acknowledgement, is acknowledged and not executed; a
redelivery of a message that still runs here only renews the right to acknowledge.

Not guaranteed: exclusive execution. The server presumes a process cut off for longer than
`ack_wait` dead and delivers its messages to others. Delivery is at least once; what must not be
repeated needs Holdfast's own jobs and their claims.
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
from holdfast.integrations.taskiq.connection import plain_name, surely
from holdfast.integrations.taskiq.dead import DeadLetterStore
from holdfast.integrations.taskiq.queue import TaskiqQueue
from holdfast.model.backoff import Backoff
from holdfast.model.message import user_headers
from holdfast.names import H_MSG_ID, sequence_run
from holdfast.telemetry import Tally, Telemetry

log = logging.getLogger("holdfast.taskiq")

REMEMBERED: Final = 20_000
"""Finished messages that are remembered: as many as can finish at full speed in the few seconds
between an acknowledgement that the server lost and the next delivery."""
GATHER_SECONDS: Final = 0.005
"""How long an acknowledgement may wait to be sent with others: each write is costly."""
UNSTORED_SECONDS: Final = 5.0
"""Redelivery delay when a dead letter could not be stored: enough to elect a leader."""
CRASHES: Final = 10
"""Starts without an end after which a message is assumed to kill its worker: more than unlucky
restarts cause, few enough that such a message does not stop a fleet for long."""
CLOSE_SECONDS: Final = 5.0
"""How long a shutdown waits for dead letters and counts that are being written."""

Place = tuple[int, int]
"""Where and when the stream stored a message: unique forever."""


class HeldDelivery:
    """A message that was delivered to this process and has not ended."""

    __slots__ = (
        "began",
        "delivery",
        "executing",
        "failed",
        "failure",
        "final",
        "message",
        "place",
        "resent",
        "retries",
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
        self.began = 0.0
        self.failed = 0
        """How many attempts have failed, this one included; 0: not counted yet."""
        self.failure: BaseException | None = None
        self.final = False
        """There is no further attempt, whatever the policy says."""
        self.resent = False
        """The same request was sent again by a retry middleware or by the function itself."""
        self.retries: object = None
        """The label in which retry middlewares count, as it was before they changed it."""


class HeldMessage(AckableMessage):
    """What a receiver gets. Reading `ack` reveals which asyncio task handles it."""

    @classmethod
    def of(cls, data: bytes, bind: Callable[[], Any]) -> HeldMessage:
        """Built without pydantic's validation, which would cost time for every message."""
        made = cls.__new__(cls)
        object.__setattr__(made, "__dict__", {"data": data, "bind": bind})
        object.__setattr__(made, "__pydantic_fields_set__", {"data"})
        return made


def _ack_of(message: Any) -> Any:
    return message.__dict__["bind"]()


setattr(HeldMessage, "ack", property(_ack_of))  # noqa: B010 - pydantic takes fields off the class


class Deliveries:
    """Everything held by one broker."""

    def __init__(
        self,
        broker: Broker,
        queue: TaskiqQueue,
        retry: Backoff,
        dead: DeadLetterStore,
        telemetry: Telemetry,
    ) -> None:
        self._broker = broker
        self._queue = queue
        self._retry = retry
        self._dead = dead
        self._telemetry = telemetry
        self._tallies: dict[str, Tally] = {}
        self._held: dict[Place, HeldDelivery] = {}
        self._handled: dict[asyncio.Task[Any], HeldDelivery] = {}
        self._finished: dict[Place, None] = {}
        self._unsent: dict[str, bytes] = {}
        """Answers by reply subject, to be sent soon, or once reconnected."""
        self._said = 0.0
        self._gathering: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._stop_listening = broker.on_reconnect(self._reconnected)

    def __len__(self) -> int:
        return len(self._held)

    # ---- taking

    def hold(self, delivery: Delivery) -> None:
        """Note an arrived message: from now on it is extended."""
        held = HeldDelivery(delivery)
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
        if delivery.deliveries > CRASHES and await self._crashes(held):
            why = f"started more than {CRASHES} times, and never ended"
            await self._give_up(held, "crashed", why)
            return None
        return HeldMessage.of(delivery.body, lambda: self._bind(held))

    def _bind(self, held: HeldDelivery) -> Any:
        """The receiver has started: note its asyncio task, and watch for its end."""
        task = asyncio.current_task()
        if task is not None and task not in self._handled:
            self._handled[task] = held
            task.add_done_callback(self._ended)
        return lambda: self.settle(held)

    def current(self) -> HeldDelivery | None:
        """The message that the calling asyncio task handles."""
        task = asyncio.current_task()
        return self._handled.get(task) if task is not None else None

    # ---- attempts

    async def _crashes(self, held: HeldDelivery) -> bool:
        """Whether it was started too often without ever ending."""
        try:
            _, found = await self._queue.attempts(*held.place)
        except BrokerError as error:
            log.debug("attempts not known: %s", error)
            return False
        return found.started - found.failed > CRASHES

    async def start(self, held: HeldDelivery) -> None:
        """Count the start of a function for a redelivered message."""
        try:
            await self._queue.count(held.delivery, failed=False)
        except BrokerError as error:
            log.debug("a start was not counted: %s", error)

    async def fail(self, held: HeldDelivery) -> None:
        """Count a failed attempt, once."""
        if held.failed:
            return
        step = "counting a failed attempt"
        try:
            count = await surely(
                self._broker, lambda: self._queue.count(held.delivery, failed=True), step
            )
            held.failed = count.failed
        except BrokerError as error:  # one attempt too many is better than one too few
            log.warning("a failed attempt was not counted: %s", error)
            held.failed = 1

    def wait(self, held: HeldDelivery) -> float | None:
        """Seconds until the next attempt; None when there is none."""
        if held.final or self._is_last(held.delivery):
            return None
        return self._retry.wait(held.failed)

    def _is_last(self, delivery: Delivery) -> bool:
        """Whether the server would not deliver it again."""
        return 0 < self._queue.max_deliver <= delivery.deliveries

    def tally(self, message: TaskiqMessage) -> Tally:
        """The counts of one task."""
        name = message.task_name
        found = self._tallies.get(name)
        if found is None:
            group = plain_name(self._queue.stream)
            found = self._tallies[name] = self._telemetry.tally(group, plain_name(name))
        return found

    def _tell(self, held: HeldDelivery, outcome: str) -> None:
        if held.message is not None and held.began:
            seconds = self._broker.clock.monotonic() - held.began
            self.tally(held.message).finish(outcome, seconds)

    # ---- ending

    async def settle(self, held: HeldDelivery) -> None:
        """taskiq says "ack": find out what it means."""
        if held.place not in self._held:
            return
        if held.unread is not None:
            await self._give_up(held, "invalid", f"unreadable: {held.unread}", held.unread)
        elif held.failure is not None:
            await self._failed(held, held.failure)
        elif held.message is not None and not held.executing:
            unknown = LookupError(f"no task is called {held.message.task_name!r} here")
            await self._failed(held, unknown)
        else:
            self._forget(held, finished=True)
            self._tell(held, "done")
            await self._say(held.delivery.reply, ACK)

    async def _failed(self, held: HeldDelivery, error: BaseException) -> None:
        await self.fail(held)
        self._tell(held, "failed")
        wait = self.wait(held)
        if wait is None:
            await self._give_up(held, "failed", f"{type(error).__name__}: {error}", error)
        else:
            await self._give_back(held, wait)

    async def _give_up(
        self, held: HeldDelivery, reason: str, why: str, error: BaseException | None = None
    ) -> None:
        """Store a dead letter, then ack; if it cannot be stored, the message comes back later."""
        self._forget(held, finished=True)
        if await self.keep_copy(held, reason, why, error):
            await self._say(held.delivery.reply, ACK)
        else:
            self._finished.pop(held.place, None)
            await self._say(held.delivery.reply, nak_body(UNSTORED_SECONDS))

    async def keep_copy(
        self, held: HeldDelivery, reason: str, why: str, error: BaseException | None = None
    ) -> bool:
        """Store a dead letter; False when that failed."""
        delivery = held.delivery
        try:
            await self._dead.put(delivery, held.message, reason, why, error, held.failed)
        except BrokerError as trouble:
            log.error("a dead letter could not be stored: %s", trouble)
            return False
        return True

    async def server_gave_up(self, delivery: Delivery, message: TaskiqMessage | None) -> None:
        """The server will not deliver it again, and its last holder never ended it."""
        held = HeldDelivery(delivery)
        if any(delivery.sequence == known for known, _ in (*self._held, *self._finished)):
            return
        held.message = message
        why = f"delivered {self._queue.max_deliver} times, the consumer's max_deliver, never ended"
        if await self.keep_copy(held, "crashed", why) and not self._queue.keeps:
            request = {"seq": delivery.sequence}
            await self._broker.api(f"STREAM.MSG.DELETE.{self._queue.stream}", request)

    async def give_back(self, delivery: Delivery) -> None:
        """Return a message that was not started, so that others get it."""
        held = self._held.get((delivery.sequence, delivery.stored_ns))
        if held is not None and not held.taken and not self._is_last(delivery):
            await self._give_back(held)

    async def _give_back(self, held: HeldDelivery, wait: float = 0.0) -> None:
        if self._is_last(held.delivery):
            await self._hand_over(held)
            return
        self._forget(held)
        await self._say(held.delivery.reply, nak_body(wait))

    async def _hand_over(self, held: HeldDelivery) -> None:
        """On the last delivery: send it as a new message if not started, else give it up."""
        delivery = held.delivery
        if held.executing:
            why = "its worker stopped in the last delivery that the consumer's max_deliver allows"
            await self._give_up(held, "crashed", why)
            return
        id = f"again.{sequence_run(*held.place)}"
        headers = user_headers(delivery.headers) | {H_MSG_ID: id}
        step = "handing a message over"
        self._forget(held)
        await surely(
            self._broker, lambda: self._broker.store(delivery.subject, delivery.body, headers), step
        )
        await self._say(delivery.reply, ACK)

    def _forget(self, held: HeldDelivery, *, finished: bool = False) -> None:
        self._held.pop(held.place, None)
        if finished:
            self._finished[held.place] = None
            if len(self._finished) > REMEMBERED:
                del self._finished[next(iter(self._finished))]

    def is_held(self, held: HeldDelivery) -> bool:
        """Whether the server has had no answer for it yet."""
        return held.place in self._held

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """The receiver has ended: a message it did not acknowledge was not done."""
        held = self._handled.pop(task, None)
        if held is None or not self.is_held(held):
            return
        if task.cancelled():
            step = self._give_back(held)
        else:
            error = task.exception() or held.failure
            step = self._failed(held, error or RuntimeError("it ended and was not acknowledged"))
        self._spawn(step)

    # ---- answering

    async def _say(self, reply: str, words: bytes) -> None:
        """Answer the server: at once when quiet, together with others when busy."""
        self._unsent[reply] = words
        now = self._broker.clock.monotonic()
        if now - self._said > GATHER_SECONDS:
            await self._flush()
        elif self._gathering is None:
            loop = asyncio.get_running_loop()
            self._gathering = loop.call_later(GATHER_SECONDS, self._reconnected)

    async def _flush(self) -> None:
        """Send all answers; while disconnected, wait for the connection."""
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
            await asyncio.wait(self._ending, timeout=CLOSE_SECONDS)
        for held in list(self._held.values()):
            try:
                await self._give_back(held)
            except BrokerError as error:
                log.warning("a message could not be given back: %s", error)
        if self._gathering:
            self._gathering.cancel()
        await self._flush()
