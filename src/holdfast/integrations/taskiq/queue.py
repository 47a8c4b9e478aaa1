"""A taskiq queue on the server: its stream, its durable consumer, and two facts that we store about
them.

Stream and consumer are created as taskiq-nats creates them, at the start and whenever they vanish.
Existing ones are used as they are; a consumer is changed only if the user passes a configuration.

Two facts are kept in a bucket, because neither the server nor a single process can hold them:

- The floor: up to where everything is acknowledged. A consumer that was deleted from a stream that
  keeps its messages (taskiq-nats' default) would run everything ever sent again. It is recreated
  to start after the floor, which is at most a second old, and exact if the last worker stopped
  cleanly. Messages acknowledged above the floor, or within that second by another worker, are
  repeated.
- The attempts at a message that was delivered more than once: how many were started and how many
  failed. The server counts deliveries, and a delivery is not an attempt: a message may wait in a
  worker that stops or dies. A first delivery writes nothing, so this costs a working queue nothing.
"""

from __future__ import annotations

import base64
import logging
from typing import Any, Final

import msgspec

from holdfast.broker import Broker, Bucket, Delivery
from holdfast.broker.kv import parse_time
from holdfast.broker.streams import Topology, bucket_config
from holdfast.broker.wire import parse_headers
from holdfast.config import RecordConfig
from holdfast.durations import DAY, NANO
from holdfast.errors import BrokerError, ConfigError, Conflict, NotFound, TryAgain, Unavailable
from holdfast.model.codec import Codec, Count
from holdfast.names import attempts_key, floor_key, sequence_run

log = logging.getLogger("holdfast.taskiq")

ACK_WAIT_SECONDS: Final = 30.0
"""The server's default."""
LOOK_SECONDS: Final = 1.0
"""Timeout of a request about a stream or consumer: one sent during an election is lost."""
KEPT_DAYS: Final = 30
"""How long these two facts are kept: as long as a dead letter."""

Config = dict[str, Any]


class Attempts(msgspec.Struct, frozen=True):
    """The attempts at one message since its second delivery."""

    message: str
    """When the message was stored: a recreated stream starts at sequence 1 again."""
    started: Count = 0
    failed: Count = 0
    started_in: Count = 0
    """The delivery in which it was last started, so that a repeated write counts once."""
    failed_in: Count = 0


class Floor(msgspec.Struct, frozen=True):
    """The position up to which a stream is acknowledged."""

    stream_created: str
    sequence: Count


ATTEMPTS: Final[Codec[Attempts]] = Codec(Attempts, "attempts of a taskiq message")
FLOOR: Final[Codec[Floor]] = Codec(Floor, "floor of a taskiq queue")


def as_config(given: object) -> Config:
    """A NATS client's configuration, or a dict with the server's names, as a dict."""
    if given is None:
        return {}
    if isinstance(given, dict):
        return dict(given)
    made: Config = given.as_dict()  # type: ignore[attr-defined]  # the client's records have it
    return {key: value for key, value in made.items() if value is not None}


class TaskiqQueue:
    """One stream with one consumer."""

    def __init__(
        self,
        subject: str,
        stream: str,
        durable: str,
        stream_config: object = None,
        consumer_config: object = None,
    ) -> None:
        self._stream_config = {"name": stream, **as_config(stream_config)}
        if not self._stream_config.get("subjects"):
            self._stream_config["subjects"] = [subject]
        self._given = consumer_config is not None
        self._consumer_config = {"ack_policy": "explicit", **as_config(consumer_config)}
        if self._consumer_config.get("deliver_subject"):
            raise ConfigError("consumer_config has a deliver_subject: a pull consumer has none")
        name = self._consumer_config.get("durable_name") or durable
        self._consumer_config["durable_name"] = name
        self._consumer_config.pop("name", None)
        self.stream: str = self._stream_config["name"]
        self.consumer: str = name
        self.ack_wait = ACK_WAIT_SECONDS
        """The consumer's `ack_wait`: how long the server waits for a sign of life."""
        self.max_deliver = 0
        """Deliveries after which the server gives up a message; 0: never."""
        self.keeps = True
        """Whether the stream keeps acknowledged messages."""
        self._created = ""
        self._floor = 0
        self._broker: Broker

    # ---- stream and consumer

    async def prepare(self, broker: Broker) -> None:
        """At startup: create what is missing, and apply the user's consumer configuration."""
        self._broker = broker
        self._bucket = Bucket(broker, broker.names.taskiq_queues)
        await self._ensure_stream()
        if self._given:
            await self._update()
        await self.ensure()

    async def _update(self) -> None:
        """Update the consumer; where the server refuses, use the existing one as it is."""
        try:
            await self._create(self._consumer_config)
        except TryAgain:
            raise
        except BrokerError as error:
            await self._broker.api(self._info, timeout=LOOK_SECONDS)
            log.warning("consumer %s is used as it is: %s", self.consumer, error)

    async def _ensure_stream(self) -> Config:
        """The stream as it is; created if it is missing."""
        info = f"STREAM.INFO.{self.stream}"
        try:
            return await self._broker.api(info, timeout=LOOK_SECONDS)
        except NotFound:
            pass
        try:
            return await self._broker.api(f"STREAM.CREATE.{self.stream}", self._stream_config)
        except TryAgain:
            raise
        except BrokerError as error:
            if "already in use" not in str(error):  # another worker was faster
                raise BrokerError(f"cannot create stream {self.stream}: {error}") from None
        return await self._broker.api(info, timeout=LOOK_SECONDS)

    async def ensure(self) -> None:
        """Create the stream and the consumer if they are missing."""
        stream = await self._ensure_stream()
        if stream.get("created") != self._created:
            self._created, self._floor = stream.get("created", ""), 0
        self.keeps = stream["config"].get("retention") not in ("workqueue", "interest")
        try:
            info = await self._broker.api(self._info, timeout=LOOK_SECONDS)
        except NotFound:
            info = await self._create(await self._from_floor())
            log.info("created consumer %s of %s", self.consumer, self.stream)
        self._learn(info)

    @property
    def _info(self) -> str:
        return f"CONSUMER.INFO.{self.stream}.{self.consumer}"

    def _learn(self, info: Config) -> None:
        config = info["config"]
        waits = [config.get("ack_wait") or ACK_WAIT_SECONDS * NANO, *config.get("backoff", [])[:1]]
        self.ack_wait = min(waits) / NANO
        self.max_deliver = max(0, int(config.get("max_deliver") or 0))
        self._floor = max(self._floor, int(info.get("ack_floor", {}).get("stream_seq", 0)))

    async def _create(self, config: Config) -> Config:
        subject = f"CONSUMER.CREATE.{self.stream}.{self.consumer}"
        if filter_subject := config.get("filter_subject"):
            subject += f".{filter_subject}"
        request = {"stream_name": self.stream, "config": config}
        return await self._broker.api(subject, request)

    async def read(self, sequence: int, deliveries: int) -> Delivery:
        """A stored message, as if it had just been delivered for the n-th time."""
        request = {"seq": sequence}
        found = (await self._broker.api(f"STREAM.MSG.GET.{self.stream}", request))["message"]
        stored_ns = int(parse_time(found["time"]) * NANO)
        reply = f"$JS.ACK.{self.stream}.{self.consumer}.{deliveries}.{sequence}.0.{stored_ns}.0"
        headers = parse_headers(base64.b64decode(found.get("hdrs", "")) or None)
        body = base64.b64decode(found.get("data", ""))
        return Delivery(self._broker, found["subject"], body, headers, reply)

    # ---- the floor

    async def look(self) -> None:
        """Store how far the consumer has come, if it has moved."""
        before = self._floor
        self._learn(await self._broker.api(self._info, timeout=LOOK_SECONDS))
        if self.keeps and self._floor > before:
            key, body = floor_key(self.stream, self.consumer), Floor(self._created, self._floor)
            await self._put(key, FLOOR.encode(body), expected=None)

    async def _from_floor(self) -> Config:
        """The configuration of a consumer that starts after the floor."""
        floor = self._floor
        try:
            entry = await self._bucket.get(floor_key(self.stream, self.consumer))
        except NotFound:
            entry = None  # no worker has acknowledged anything yet
        found = self._bucket.read(FLOOR.decode, entry) if entry else None
        if found is not None and found.stream_created == self._created:
            floor = max(floor, found.sequence)
        if not floor or not self.keeps:
            return self._consumer_config
        return self._consumer_config | {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": floor + 1,
        }

    # ---- attempts

    async def attempts(self, sequence: int, stored_ns: int) -> tuple[int, Attempts]:
        """The attempts at a message, and the revision to change them at."""
        none = Attempts(sequence_run(sequence, stored_ns))
        try:
            revision, entry = await self._bucket.last(self._key(sequence))
        except NotFound:
            return 0, none
        found = self._bucket.read(ATTEMPTS.decode, entry) if entry else None
        return revision, found if found and found.message == none.message else none

    async def count(self, delivery: Delivery, *, failed: bool) -> Attempts:
        """Count the attempt of this delivery as started, and perhaps as failed; safe to repeat."""
        number = delivery.deliveries
        while True:
            revision, found = await self.attempts(delivery.sequence, delivery.stored_ns)
            added = Attempts(
                found.message,
                found.started + (found.started_in != number),
                found.failed + (failed and found.failed_in != number),
                number,
                number if failed else found.failed_in,
            )
            if added == found:
                return found
            key, body = self._key(delivery.sequence), ATTEMPTS.encode(added)
            try:
                await self._put(key, body, expected=revision)
            except Conflict:
                continue
            return added

    def _key(self, sequence: int) -> str:
        return attempts_key(self.stream, self.consumer, sequence)

    async def _put(self, key: str, value: bytes, expected: int | None) -> None:
        try:
            await self._bucket.put(key, value, expected=expected)
        except Unavailable:  # the bucket may not exist yet: the first write creates it
            topology = Topology(self._broker, RecordConfig())
            replicas = await topology.wanted_replicas()
            config = bucket_config(self._broker.names, "taskiq_queues", replicas)
            await topology.ensure_stream(config | {"max_age": KEPT_DAYS * DAY * NANO})
            await self._bucket.put(key, value, expected=0 if expected is not None else None)
