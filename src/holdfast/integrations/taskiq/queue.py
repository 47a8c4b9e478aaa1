"""A taskiq queue on the server: its stream and its durable consumer, as taskiq-nats makes them.

What exists is used as it is; a consumer is changed only where the user hands in a configuration.
What is missing is made, at the start and whenever it vanishes.

A consumer that vanishes from a stream which keeps its messages (taskiq-nats' default) must not
start at the beginning again: that would run everything once more that was ever sent. It is made
anew from behind what was known to be acknowledged; a stream made anew starts at its beginning.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from holdfast.broker import Broker
from holdfast.errors import (
    BrokerError,
    ConfigError,
    NotConnected,
    NotFound,
    OutcomeUnknown,
    Unavailable,
)

log = logging.getLogger("holdfast.taskiq")

NANO: Final = 1_000_000_000
ACK_WAIT_SECONDS: Final = 30.0
"""The server's own default."""
LOOK_SECONDS: Final = 1.0

Config = dict[str, Any]


def as_config(given: object) -> Config:
    """A configuration of the NATS client, or a dict of the server's own names, as a dict."""
    if given is None:
        return {}
    if isinstance(given, dict):
        return dict(given)
    made: Config = given.as_dict()  # type: ignore[attr-defined]  # the client's records have it
    return {key: value for key, value in made.items() if value is not None}


class Queue:
    """One stream with one consumer."""

    def __init__(
        self,
        subject: str,
        stream: str,
        durable: str,
        stream_config: object = None,
        consumer_config: object = None,
    ) -> None:
        self.subject = subject
        self._stream_config = as_config(stream_config)
        self._stream_config.setdefault("name", stream)
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
        """How long the server waits for a sign of life, as its consumer says."""
        self._created = ""
        self._floor = 0

    # ---- making

    async def prepare(self, broker: Broker) -> None:
        """At the start: make what is missing, and give the consumer the user's configuration."""
        await self.ensure_stream(broker)
        if self._given:
            await self._update(broker)
        await self.ensure(broker)

    async def _update(self, broker: Broker) -> None:
        """Some members of a consumer cannot be changed: then the existing one is used as it is."""
        try:
            await self._create(broker, self._consumer_config)
        except (OutcomeUnknown, Unavailable, NotConnected):
            raise
        except BrokerError as error:
            await broker.api(self._info, timeout=LOOK_SECONDS)
            log.warning("consumer %s is used as it is: %s", self.consumer, error)

    async def ensure_stream(self, broker: Broker) -> Config:
        """The stream as it is; made when it is missing."""
        try:
            return await broker.api(f"STREAM.INFO.{self.stream}", timeout=LOOK_SECONDS)
        except NotFound:
            pass
        try:
            return await broker.api(f"STREAM.CREATE.{self.stream}", self._stream_config)
        except (OutcomeUnknown, Unavailable):
            raise
        except BrokerError as error:
            if "already in use" not in str(error):  # another worker was faster
                raise BrokerError(f"cannot create stream {self.stream}: {error}") from None
        return await broker.api(f"STREAM.INFO.{self.stream}", timeout=LOOK_SECONDS)

    async def ensure(self, broker: Broker) -> None:
        """Stream and consumer are there when this returns."""
        stream = await self.ensure_stream(broker)
        if stream.get("created") != self._created:
            self._created, self._floor = stream.get("created", ""), 0
        try:
            info = await broker.api(self._info, timeout=LOOK_SECONDS)
        except NotFound:
            info = await self._create(broker, self._anew(stream["config"]))
            log.info("consumer %s of %s was made", self.consumer, self.stream)
        self._learn(info)

    async def look(self, broker: Broker) -> None:
        """Remember how far the consumer has come."""
        self._learn(await broker.api(self._info, timeout=LOOK_SECONDS))

    @property
    def _info(self) -> str:
        return f"CONSUMER.INFO.{self.stream}.{self.consumer}"

    def _learn(self, info: Config) -> None:
        config = info["config"]
        waits = [config.get("ack_wait") or ACK_WAIT_SECONDS * NANO, *config.get("backoff", [])[:1]]
        self.ack_wait = min(waits) / NANO
        self._floor = max(self._floor, int(info.get("ack_floor", {}).get("stream_seq", 0)))

    def _anew(self, stream: Config) -> Config:
        if not self._floor or stream.get("retention") == "workqueue":
            return self._consumer_config
        return self._consumer_config | {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._floor + 1,
        }

    async def _create(self, broker: Broker, config: Config) -> Config:
        subject = f"CONSUMER.CREATE.{self.stream}.{self.consumer}"
        if filter_subject := config.get("filter_subject"):
            subject += f".{filter_subject}"
        return await broker.api(subject, {"stream_name": self.stream, "config": config})
