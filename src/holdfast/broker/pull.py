"""The pull loop: passes one consumer's messages to a callback, and never stalls silently.

The protocol. One inbox subscription receives everything. A request says how many messages are
wanted, how long it is valid and how often the server must send an idle heartbeat. Requests overlap:
the next one is sent while half of the last is still to come. `want` limits how many messages may be
outstanding, so the worker decides about backpressure.

It asks again, with nothing outstanding, after a reconnect, after missed heartbeats (the library
does not count them) and when a request has ended for any reason. A consumer or stream that is gone
is created again by `ensure`.

It does not acknowledge, decode, run or keep messages: `deliver` takes them.

On failure: with the connection down it waits for it. While connected, a consumer that cannot be
brought back within `GIVE_UP_SECONDS` ends `run` with `Unavailable`, so that the process can exit
and be restarted instead of looking healthy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final

import msgspec

from holdfast import errors
from holdfast.broker.connection import Broker
from holdfast.broker.wire import Headers, parse_headers, parse_status
from holdfast.durations import NANO
from holdfast.keeper.board import Board

log = logging.getLogger("holdfast.pull")

HEARTBEAT_SECONDS: Final = 0.75
MISSED_HEARTBEATS: Final = 2.2
"""Together 1.65 s until a lost consumer leader is noticed; the second heartbeat may be a little
late. Each idle consumer costs little more than one small message a second."""
SLOW_HEARTBEAT_SECONDS: Final = 10.0
"""Heartbeats of the other consumers of a process that pulls very many; 24 with quick ones watch for
all. The server requires two heartbeats within the life of a request."""
EXPIRES_SECONDS: Final = 30.0
"""A request without any further answer, because its server died, is forgotten after this time."""
COMPLAIN_SECONDS: Final = 10.0
"""An election (4 to 8 s) is normal and not worth a log line."""
GIVE_UP_SECONDS: Final = 60.0
"""Longer than a rolling restart of a server takes; then the supervisor should restart us."""
REFUSED_SECONDS: Final = 0.1
"""Pause after a refused request, so that a refusing server is not flooded."""
MAX_BATCH: Final = 2_000
"""Most messages of one request: limits what one worker takes away from the others."""
EXTENSION_SECONDS: Final = 2.0
"""How long an acknowledgement waits for an extension that the keeper is sending: twice the keeper's
own timeout."""

ACK: Final = b"+ACK"
NAK: Final = b"-NAK"
TERM: Final = b"+TERM"
IN_PROGRESS: Final = b"+WPI"


class _Done:
    """An awaitable that is over."""

    def __await__(self) -> Generator[Any, Any, None]:
        return
        yield


DONE: Final = _Done()


def nak_body(delay: float = 0.0) -> bytes:
    """The acknowledgement that gives a message back, to be redelivered after `delay` seconds."""
    return NAK + b' {"delay": %d}' % int(delay * NANO) if delay > 0 else NAK


class Delivery:
    """One message delivered to one process, with the right to acknowledge it."""

    __slots__ = (
        "_broker",
        "board",
        "body",
        "deliveries",
        "headers",
        "place",
        "reply",
        "sequence",
        "stored_ns",
        "subject",
    )

    def __init__(
        self, broker: Broker, subject: str, body: bytes, headers: Headers, reply: str
    ) -> None:
        self._broker = broker
        self.subject = subject
        self.body = body
        self.headers = headers
        self.reply = reply
        self.board: Board | None = None
        self.place = -1
        """Its place on the board; freed before any acknowledgement."""
        parts = reply.split(".")
        end = 0 if len(parts) == 9 else -1
        self.deliveries = int(parts[end - 5])
        """How often the message has been delivered, this time included."""
        self.sequence = int(parts[end - 4])
        self.stored_ns = int(parts[end - 2])
        """When the stream stored it, by the server's clock."""

    @property
    def stored(self) -> float:
        return self.stored_ns / NANO

    def ack(self) -> Awaitable[None]:
        """Remove the message from the queue; unconfirmed: a lost ack only causes a redelivery."""
        return self._answer(ACK)

    async def ack_confirmed(self) -> None:
        """Remove the message and wait for the server's confirmation."""
        if not self._leave():
            await self._until_extended()
        await self._broker.request(self.reply, ACK)

    def nak(self, delay: float = 0.0) -> Awaitable[None]:
        """Give the message back, for redelivery after `delay`."""
        return self._answer(nak_body(delay))

    def _answer(self, body: bytes) -> Awaitable[None]:
        """Acknowledge, unless the message was already given back: another may hold it.

        It is sent at once, nearly always; a coroutine for each would cost as much as the rest.
        """
        if self.board is not None and self.place >= 0 and self.board.given_back(self.place):
            self.abandon()
            return DONE
        if not self._leave():
            return self._answer_later(body)
        self._tell(body)
        return DONE

    async def _answer_later(self, body: bytes) -> None:
        await self._until_extended()
        self._tell(body)

    def _tell(self, body: bytes) -> None:
        try:
            self._broker.tell(self.reply, body)
        except errors.NotConnected as error:
            log.debug("acknowledgement not sent: %s", error)

    async def extend(self) -> None:
        """Ask for another `ack_wait`."""
        if self.board is not None and self.place >= 0:
            if self.board.given_back(self.place):
                return
            self.board.extended[self.place] = self._broker.clock.monotonic()
        await self._broker.publish(self.reply, IN_PROGRESS)

    def _leave(self) -> bool:
        """Leave its place; False while an extension is being sent, see `_until_extended`."""
        if self.board is not None and self.place >= 0 and not self.board.leave(self.place):
            return False
        self.place = -1
        return True

    async def _until_extended(self) -> None:
        """Wait until an extension that the keeper is sending has arrived.

        At most `EXTENSION_SECONDS`: the keeper has lost its connection then.
        """
        board, place, self.place = self.board, self.place, -1
        deadline = self._broker.clock.monotonic() + EXTENSION_SECONDS
        while board is not None and not board.cleared(place):
            if self._broker.clock.monotonic() > deadline:
                board.leaving.append(place)
                break
            await self._broker.clock.sleep(0.002)

    def abandon(self) -> None:
        """Free its place without an acknowledgement: another process has the message."""
        board, place, self.place = self.board, self.place, -1
        if board is not None and place >= 0 and not board.leave(place):
            board.leaving.append(place)


class Pull:
    """Pulls one consumer while `run` runs."""

    def __init__(
        self,
        broker: Broker,
        stream: str,
        consumer: str,
        *,
        ensure: Callable[[], Awaitable[None]],
        deliver: Callable[[Delivery], None],
        want: Callable[[], int],
        heartbeat: float = HEARTBEAT_SECONDS,
        on_silent: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_silent` is called when the consumer's leader seems to be gone."""
        self.heartbeat = heartbeat
        self._on_silent = on_silent
        self.stream = stream
        self.consumer = consumer
        self.delivered = 0
        self.known: float | None = None
        """When the consumer was last known to exist, on the monotonic clock."""
        self._broker = broker
        self._ensure = ensure
        self._deliver = deliver
        self._want = want
        self._inbox = broker.new_pull_inbox()
        self._next_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._generation = 0
        self._outstanding = 0
        self._low = 0
        self._heard = 0.0
        self._active = False
        self._missing = True
        self._not_before = 0.0
        self._failing_since: float | None = None
        self._complained = False
        self._wake = asyncio.Event()

    @property
    def outstanding(self) -> int:
        """Messages requested and not yet received."""
        return self._outstanding

    @property
    def healthy(self) -> bool:
        """Whether the consumer's leader was heard from recently on this connection."""
        if not self._broker.connected or self._missing:
            return False
        silence = self._broker.clock.monotonic() - self._heard
        return self._outstanding == 0 or silence < 2 * MISSED_HEARTBEATS * self.heartbeat

    @property
    def active(self) -> bool:
        """Whether messages have arrived since the last status message."""
        return self._active

    def wake_if_low(self) -> None:
        """A place became free: ask for more unless enough is on its way."""
        if self._outstanding <= self._low:
            self._wake.set()

    def wake(self) -> None:
        """Check again how many messages are wanted."""
        self._wake.set()

    async def run(self) -> None:
        """Pull until cancelled."""
        loop = asyncio.get_running_loop()
        subscription = await self._broker.listen(f"{self._inbox}.*", self._receive)
        stop_listening = self._broker.on_reconnect(self._start_over)
        self._heard = self._broker.clock.monotonic()
        try:
            while True:
                self._wake.clear()
                delay = await self._step()
                timer = loop.call_later(delay, self._wake.set)
                await self._wake.wait()
                timer.cancel()
        finally:
            stop_listening()
            await self._broker.unsubscribe(subscription)

    async def _step(self) -> float:
        """Check the state once; returns the seconds until the next check."""
        if not self._broker.connected:
            self._failing_since = None
            return self.heartbeat
        wait = self._not_before - self._broker.clock.monotonic()
        if wait > 0:
            return wait
        try:
            if self._silent():
                log.debug("no heartbeat from consumer %s: asking again", self.consumer)
                self._missing = True
                self._start_over()
                self._on_silent()
            if self._missing:
                await self._ensure()
                self.known = self._broker.clock.monotonic()
                self._missing = False
            await self._top_up()
        except (errors.NotConnected, errors.OutcomeUnknown, errors.BrokerError) as error:
            return self._failed(error)
        self._failing_since = None
        return self.heartbeat

    def ask_again(self) -> None:
        """Another consumer's leader seems to be gone; ask again unless ours was just heard."""
        if self._broker.clock.monotonic() - self._heard > HEARTBEAT_SECONDS:
            self._start_over()

    def _silent(self) -> bool:
        if self._outstanding == 0:
            return False
        silence = self._broker.clock.monotonic() - self._heard
        return silence > MISSED_HEARTBEATS * self.heartbeat

    def _failed(self, error: errors.BrokerError) -> float:
        now = self._broker.clock.monotonic()
        if not self._broker.connected:
            return HEARTBEAT_SECONDS
        self._missing = True
        if self._failing_since is None:
            self._failing_since = now
            self._complained = False
        if not self._complained and now - self._failing_since > COMPLAIN_SECONDS:
            self._complained = True
            log.warning("consumer %s cannot be used (%s): trying again", self.consumer, error)
        if now - self._failing_since > GIVE_UP_SECONDS:
            raise errors.Unavailable(
                f"consumer {self.consumer} could not be brought back in "
                f"{GIVE_UP_SECONDS:.0f} s: {error}"
            )
        return 0.25

    async def _top_up(self) -> None:
        want = min(self._want(), MAX_BATCH)
        if self._outstanding > want // 2 or self._outstanding >= want:
            return
        batch = want - self._outstanding
        if self._outstanding == 0:
            self._heard = self._broker.clock.monotonic()
        request = {
            "batch": batch,
            "expires": int(EXPIRES_SECONDS * NANO),
            "idle_heartbeat": int(self.heartbeat * NANO),
        }
        self._outstanding += batch
        self._low = self._outstanding // 2
        await self._broker.publish(
            self._next_subject,
            msgspec.json.encode(request),
            reply=f"{self._inbox}.{self._generation}",
        )

    def _start_over(self) -> None:
        self._generation += 1
        self._outstanding = 0
        self._heard = self._broker.clock.monotonic()
        self._wake.set()

    def _receive(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        self._heard = self._broker.clock.monotonic()
        if not reply.startswith(b"$JS.ACK."):
            self._on_status(subject.decode(), headers)
            return
        self.delivered += 1
        self.known = self._heard
        self._active = True
        if self._outstanding > 0:
            self._outstanding -= 1
            if self._outstanding <= self._low:
                self._wake.set()
        self._deliver(
            Delivery(self._broker, subject.decode(), body, parse_headers(headers), reply.decode())
        )

    def _on_status(self, subject: str, raw: bytes | None) -> None:
        status, text = parse_status(raw)
        self._active = False
        if status == "100":
            self.known = self._heard
        if status == "100" or not subject.endswith(f".{self._generation}"):
            return
        unserved = parse_headers(raw).get("Nats-Pending-Messages")
        self._outstanding = max(0, self._outstanding - int(unserved)) if unserved else 0
        if status == "503" or "deleted" in text.lower():
            self._missing = True
        if status not in ("404", "408"):
            log.debug("consumer %s: %s %s", self.consumer, status, text)
            self._not_before = self._heard + REFUSED_SECONDS
        self._wake.set()
