"""`ResilientPullBroker`: taskiq-nats' `PullBasedJetStreamBroker`, on Holdfast's pull loop.

It takes the same arguments, works on the same streams and consumers, and sends the same messages:
one line of code changes. What it adds:
- it keeps consuming after a restart of the server, a partition, or the deletion of its consumer or
  stream; when it cannot, it ends the process with SIGTERM, and an orchestrator starts a new one;
- it handles failures, long functions, crashes and unreadable messages: see `deliveries`;
- a send is retried until it is confirmed, under one message id, so nothing is stored twice;
- the user's connection callbacks are called as before.

`pull_consume_batch` is how many messages may wait here for free capacity; as in Holdfast's worker,
a tenth of a second of recent throughput may wait too, so that a batch of one does not cost a round
trip per message. `pull_consume_timeout` has no effect: an unanswered pull is noticed by its missing
heartbeats within two seconds.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import re
import signal
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from typing import Any, Final

import msgspec
from taskiq import AckableMessage, AsyncBroker, BrokerMessage
from taskiq.message import TaskiqMessage

from holdfast.broker import Pull, Received
from holdfast.errors import BrokerError, HoldfastError, NotConnected, NotFound
from holdfast.integrations.taskiq.buffer import Buffer
from holdfast.integrations.taskiq.connection import Connected, Servers, surely
from holdfast.integrations.taskiq.dead import DeadLetterStore
from holdfast.integrations.taskiq.deliveries import Deliveries
from holdfast.integrations.taskiq.monitor import Monitor
from holdfast.integrations.taskiq.outcome import OutcomeMiddleware, WatchingFormatter
from holdfast.integrations.taskiq.queue import TaskiqQueue
from holdfast.model.backoff import Backoff
from holdfast.names import DEFAULT_NAMESPACE, H_MSG_ID, IdMaker
from holdfast.retrying import repeating
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.taskiq")

LOOK_SECONDS: Final = 1.0
"""How often the connection is checked and the floor stored: bounds what a lost consumer may repeat
of other workers' work."""
EXTEND_SECONDS: Final = 10.0
"""The longest time between two extensions, however long `ack_wait` is."""
RETRY: Final = Backoff.exponential(first="1s", last="1m", attempts=3)
"""taskiq's retry middlewares make three attempts by default."""
ADVISORY: Final = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
"""Where the server announces that it has given up a message."""

_HEADER_NAME = re.compile(r"[!-9;-~]+")

message_id: ContextVar[tuple[str, str]] = ContextVar("message_id", default=("", ""))
"""While a schedule is sent: its id and its slot's message id, so that the slot is stored once."""


class ResilientPullBroker(Connected, AsyncBroker):
    """A broker over a JetStream pull consumer that keeps consuming."""

    def __init__(
        self,
        servers: Servers,
        subject: str = "taskiq_tasks",
        stream_name: str = "taskiq_jetstream",
        queue: str | None = None,
        durable: str = "taskiq_durable",
        stream_config: Any = None,
        consumer_config: Any = None,
        pull_consume_batch: int = 1,
        pull_consume_timeout: float | None = None,
        *,
        retry: Backoff = RETRY,
        ready_file: str = "",
        health_port: int = 0,
        namespace: str = DEFAULT_NAMESPACE,
        **connection_kwargs: Any,
    ) -> None:
        """The arguments of taskiq-nats' broker, and:

        `retry`: attempts and waits of a function that fails; `Backoff.never()` for none.
        `ready_file`: exists while messages can arrive, for probes that look at files.
        `health_port`: port for health and metrics; each further worker process takes the next one.
        `namespace`: where Holdfast keeps dead letters and attempts.
        """
        super().__init__()
        self.servers: Final = servers
        self.connection_kwargs: Final = connection_kwargs
        self.subject: Final = subject
        self.queue: Final = queue
        self.pull_consume_batch: Final = max(1, pull_consume_batch)
        self.pull_consume_timeout: Final = pull_consume_timeout
        self.stream_config = stream_config
        self.consumer_config = consumer_config
        self._queue = TaskiqQueue(subject, stream_name, durable, stream_config, consumer_config)
        self.stream_name: Final = self._queue.stream
        self.durable: Final = self._queue.consumer
        self._retry = retry
        self.telemetry = Telemetry()
        self._monitor = Monitor(ready_file, health_port, self.telemetry, self._problems)
        self._namespace = namespace
        self._ids = IdMaker()
        self._pulls: set[Pull] = set()
        self._shutting_down = False

    # ---- what code written for taskiq-nats may use

    @property
    def client(self) -> Any:
        """The NATS client."""
        return self.connection.client

    @property
    def js(self) -> Any:
        """The NATS client's JetStream context."""
        return self.client.jetstream()

    @property
    def consuming(self) -> bool:
        """Whether messages can arrive: the consumer's leader has answered on this connection."""
        return bool(self._pulls) and all(pull.healthy for pull in self._pulls)

    def _problems(self) -> list[str]:
        self.telemetry.consuming.labels(self.stream_name).set(self.consuming)
        self.telemetry.held.set(len(self._deliveries))
        return [] if self.consuming else [f"consumer {self.durable} gives no messages"]

    # ---- life

    async def startup(self) -> None:
        """Connect, and create stream and consumer unless they exist.

        A process of `taskiq worker` that cannot connect logs why in one line and ends; taskiq
        starts another one.
        """
        try:
            await self._start()
        except HoldfastError as error:
            if not (self.is_worker_process and multiprocessing.parent_process()):
                raise
            log.critical("cannot start, ending this process: %s", error)
            raise SystemExit(1) from None

    async def _start(self) -> None:
        await super().startup()
        self._shutting_down = False
        broker = await self._open(
            self._queue.prepare,
            self.servers,
            self.connection_kwargs,
            name="taskiq",
            namespace=self._namespace,
        )
        dead = DeadLetterStore(broker, self.stream_name, self.telemetry)
        self._deliveries = Deliveries(broker, self._queue, self._retry, dead, self.telemetry)
        if 0 < self._queue.max_deliver < self._retry.attempts:
            log.warning(
                "consumer %s has max_deliver=%d: a message gets no more attempts than that",
                self.durable,
                self._queue.max_deliver,
            )
        outcome = OutcomeMiddleware(self._deliveries)
        outcome.set_broker(self)
        self.middlewares.insert(0, outcome)
        self.formatter = WatchingFormatter(self, self._deliveries)

    async def shutdown(self) -> None:
        """Give back what is held, and disconnect."""
        self._shutting_down = True
        await self._monitor.stop()
        if self._broker is not None:
            await self._deliveries.close()
            await self._write_floor()
            await self._broker.close()
            self.middlewares = [m for m in self.middlewares if not isinstance(m, OutcomeMiddleware)]
            if isinstance(self.formatter, WatchingFormatter):
                self.formatter = self.formatter.inner
        await super().shutdown()

    # ---- sending

    async def kick(self, message: BrokerMessage) -> None:
        """Send; returns when the stream has it, and raises when that is not confirmed in time."""
        broker = self.connection
        held = self._deliveries.current()
        if held is not None and held.message and held.message.task_id == message.task_id:
            held.resent = True
        headers = {k: str(v) for k, v in message.labels.items() if _HEADER_NAME.fullmatch(k)}
        schedule, slot = message_id.get()
        is_slot = bool(slot) and message.labels.get("schedule_id") == schedule
        headers.setdefault(H_MSG_ID, slot if is_slot else self._ids("t"))
        step = "sending a message"
        await surely(broker, lambda: broker.store(self.subject, message.message, headers), step)

    # ---- receiving

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Messages, for as long as the process lives."""
        broker, deliveries = self.connection, self._deliveries
        buffer = Buffer(deliveries, self.pull_consume_batch, broker.clock)
        pull = Pull(
            broker,
            self.stream_name,
            self.durable,
            ensure=self._queue.ensure,
            deliver=buffer.put,
            want=buffer.want,
        )
        self._pulls.add(pull)
        await self._monitor.start()
        advisory = f"{ADVISORY}.{self.stream_name}.{self.durable}"
        listening = await broker.subscribe(advisory, self._server_gave_up, queue="holdfast")
        tending = asyncio.create_task(self._tend(pull, buffer), name="holdfast-taskiq")
        try:
            while True:
                while buffer.arrived:
                    message = await deliveries.take(buffer.get())
                    if buffer.low:
                        pull.wake_if_low()
                    if message is not None:
                        yield message
                if tending.done():
                    tending.result()
                await buffer.wait()
        finally:
            self._pulls.discard(pull)
            tending.cancel()
            await asyncio.gather(tending, return_exceptions=True)
            await broker.unsubscribe(listening)

    async def _tend(self, pull: Pull, buffer: Buffer) -> None:
        """Pull, extend what is held, store the floor; end the process when pulling fails."""
        clock = self.connection.clock
        steps = (
            pull.run(),
            buffer.keep_small(),
            self._watch(),
            repeating(self._deliveries.extend, clock=clock, every=self._pace, what="extending"),
            repeating(self._write_floor, clock=clock, every=LOOK_SECONDS, what="the floor"),
        )
        try:
            async with asyncio.TaskGroup() as group:
                for step in steps:
                    group.create_task(step)
        except* HoldfastError as trouble:
            self._give_up(str(trouble.exceptions[0]))
            raise trouble.exceptions[0] from None
        finally:
            buffer.wake()

    def _pace(self) -> float:
        return min(self._queue.ack_wait / 3, EXTEND_SECONDS)

    async def _watch(self) -> None:
        await self.connection.closed.wait()
        if not self._shutting_down:
            raise NotConnected("the connection to NATS is closed for good")

    async def _write_floor(self) -> None:
        try:
            await self._queue.look()
        except BrokerError as error:
            log.debug("the consumer's floor was not stored: %s", error)

    async def _server_gave_up(self, message: Received) -> None:
        """A worker died with the last delivery that `max_deliver` allows: keep a dead letter."""
        try:
            said = msgspec.json.decode(message.body)
            sequence, count = int(said["stream_seq"]), int(said["deliveries"])
        except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
            log.warning("an advisory of the server was not understood: %s", error)
            return
        try:
            lost = await surely(
                self.connection, lambda: self._queue.read(sequence, count), "reading a message"
            )
            await self._deliveries.server_gave_up(lost, self._read(lost.body))
        except NotFound:
            return  # acknowledged or removed
        except BrokerError as error:
            log.error("message %d was given up by the server and is not kept: %s", sequence, error)

    def _read(self, body: bytes) -> TaskiqMessage | None:
        try:
            return self.formatter.loads(body)
        except Exception:  # noqa: BLE001 - whatever a user's formatter raises
            return None

    def _give_up(self, why: str) -> None:
        if not self._shutting_down:
            log.critical("cannot consume messages, ending this process: %s", why)
            os.kill(os.getpid(), signal.SIGTERM)
