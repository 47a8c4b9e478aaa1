"""`ResilientPullBroker`: taskiq-nats' `PullBasedJetStreamBroker`, on Holdfast's pull loop.

It takes the same arguments, works on the same streams and consumers, and sends the same messages:
one line of code changes. What it adds:
- it goes on after a restart of the server, a partition, a consumer or stream deleted under it; when
  it cannot, it ends the process with SIGTERM, so that an orchestrator starts a new one;
- what a failure, a long function, a crash or an unreadable message come to: see `deliveries`;
- sending is repeated until it is confirmed, under one message id, so nothing is stored twice;
- the user's connection callbacks are called as before.

`pull_consume_batch` is how many messages may wait here for a free place; as in Holdfast's worker, a
tenth of a second of recent speed may wait too, so that a batch of one is no round trip per message.
`pull_consume_timeout` has no meaning here: a pull that
nobody answers is noticed by its missing heartbeats within two seconds.
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

from taskiq import AckableMessage, AsyncBroker, BrokerMessage

from holdfast.broker import Broker, Pull
from holdfast.errors import BrokerError, HoldfastError, NotConnected
from holdfast.health import ReadyFile
from holdfast.integrations.taskiq.buffer import Buffer
from holdfast.integrations.taskiq.connection import Servers, connect, patiently
from holdfast.integrations.taskiq.dead import Grave
from holdfast.integrations.taskiq.deliveries import Deliveries
from holdfast.integrations.taskiq.outcome import OutcomeMiddleware, WatchingFormatter
from holdfast.integrations.taskiq.queue import Queue
from holdfast.model.backoff import Backoff
from holdfast.names import DEFAULT_NAMESPACE, H_MSG_ID, IdMaker

log = logging.getLogger("holdfast.taskiq")

SEND_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 1.0
FLOOR_LOOKS: Final = 5
"""How many looks pass between two questions how far the consumer has come."""
RETRY: Final = Backoff.exponential(first="1s", last="1m", attempts=3)

_HEADER_NAME = re.compile(r"[!-9;-~]+")

message_id: ContextVar[tuple[str, str]] = ContextVar("message_id", default=("", ""))
"""A schedule and the id of the message that is sent for it: the slot's, so it is stored once."""


class ResilientPullBroker(AsyncBroker):
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
        namespace: str = DEFAULT_NAMESPACE,
        **connection_kwargs: Any,
    ) -> None:
        """As taskiq-nats' own; and:

        `retry`: attempts and waits of a function that fails; `Backoff.never()` for none.
        `ready_file`: exists while messages can arrive, for probes that look at files.
        `namespace`: where Holdfast keeps the dead letters.
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
        self._queue = Queue(subject, stream_name, durable, stream_config, consumer_config)
        self.stream_name: Final = self._queue.stream
        self.durable: Final = self._queue.consumer
        self._retry = retry
        self._ready = ReadyFile(ready_file)
        self._namespace = namespace
        self._ids = IdMaker()
        self._broker: Broker | None = None
        self._pulls: set[Pull] = set()
        self._shutting_down = False

    # ---- what code written for taskiq-nats may use

    @property
    def client(self) -> Any:
        """The NATS client."""
        return self._connection.client

    @property
    def js(self) -> Any:
        """The NATS client's JetStream context."""
        return self.client.jetstream()

    @property
    def consuming(self) -> bool:
        """Whether messages can arrive: the consumer's leader was heard of on this connection."""
        return bool(self._pulls) and all(pull.healthy for pull in self._pulls)

    @property
    def _connection(self) -> Broker:
        if self._broker is None:
            raise NotConnected("the broker has not been started: await broker.startup() first")
        return self._broker

    # ---- life

    async def startup(self) -> None:
        """Connect, and make stream and consumer unless they are there.

        A process of `taskiq worker` that cannot says why in one line of its log, and ends; taskiq
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
        broker = self._broker = await connect(
            self.servers, self.connection_kwargs, name="taskiq", namespace=self._namespace
        )
        try:
            await patiently(broker, lambda: self._queue.prepare(broker))
        except BaseException:
            await broker.close()
            raise
        self._deliveries = Deliveries(broker, Grave(broker), self._retry)
        self.middlewares.insert(0, OutcomeMiddleware(self._deliveries))
        self.formatter = WatchingFormatter(self, self._deliveries)

    async def shutdown(self) -> None:
        """Give back what is held, and disconnect; quiet, because it is wanted."""
        self._shutting_down = True
        self._ready.set(False)
        if self._broker is not None:
            await self._deliveries.close()
            await self._broker.close()
            self.middlewares = [m for m in self.middlewares if not isinstance(m, OutcomeMiddleware)]
            if isinstance(self.formatter, WatchingFormatter):
                self.formatter = self.formatter.inner
        await super().shutdown()

    # ---- sending

    async def kick(self, message: BrokerMessage) -> None:
        """Send; returns when the stream has it, and raises when that is not known in time."""
        broker = self._connection
        held = self._deliveries.current()
        if held is not None and held.message and held.message.task_id == message.task_id:
            held.resent = True
        headers = {k: str(v) for k, v in message.labels.items() if _HEADER_NAME.fullmatch(k)}
        schedule, slot = message_id.get()
        is_slot = bool(slot) and message.labels.get("schedule_id") == schedule
        headers.setdefault(H_MSG_ID, slot if is_slot else self._ids("t"))
        await patiently(
            broker,
            lambda: broker.store(self.subject, message.message, headers),
            seconds=SEND_SECONDS,
        )

    # ---- receiving

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Messages, for as long as the process lives."""
        broker, deliveries = self._connection, self._deliveries
        buffer = Buffer(deliveries, self.pull_consume_batch, broker.clock)
        pull = Pull(
            broker,
            self.stream_name,
            self.durable,
            ensure=lambda: self._queue.ensure(broker),
            deliver=buffer.put,
            want=buffer.want,
        )
        self._pulls.add(pull)
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

    async def _tend(self, pull: Pull, buffer: Buffer) -> None:
        """Pull, extend what is held, tell whether it works; end the process when it cannot."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(pull.run())
                group.create_task(self._extend())
                group.create_task(self._watch())
                group.create_task(buffer.keep_small())
        except* HoldfastError as trouble:
            self._give_up(str(trouble.exceptions[0]))
            raise trouble.exceptions[0] from None
        finally:
            buffer.wake()

    async def _extend(self) -> None:
        while True:
            await asyncio.sleep(min(self._queue.ack_wait / 3, 10.0))
            await self._deliveries.extend()

    async def _watch(self) -> None:
        """Once a second: is anything arriving at all, and how far has the consumer come?"""
        broker, looks = self._connection, 0
        while True:
            if broker.closed.is_set() and not self._shutting_down:
                raise NotConnected("the connection to NATS is closed for good")
            self._ready.set(self.consuming)
            looks += 1
            if looks % FLOOR_LOOKS == 0 and self.consuming:
                try:
                    await self._queue.look(broker)
                except BrokerError as error:
                    log.debug("the consumer was not seen: %s", error)
            await asyncio.sleep(LOOK_SECONDS)

    def _give_up(self, why: str) -> None:
        if not self._shutting_down:
            self._ready.set(False)
            log.critical("cannot consume any more, ending this process: %s", why)
            os.kill(os.getpid(), signal.SIGTERM)
