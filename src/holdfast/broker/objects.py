"""Large values that no message can carry: results and dead bodies, in the object store."""

from __future__ import annotations

import nats.js.errors
from nats.js.api import ObjectStoreConfig
from nats.js.object_store import ObjectStore

from holdfast import errors
from holdfast.broker.connection import Broker

KEPT_SECONDS = 30 * 86_400


class Objects:
    """An object bucket, the namespace's own unless another is named; made on first use."""

    def __init__(self, broker: Broker, bucket: str = "", ttl: float | None = KEPT_SECONDS) -> None:
        self._broker = broker
        self._bucket = bucket or broker.names.objects
        self._ttl = ttl
        self._store: ObjectStore | None = None

    @property
    def _replicas(self) -> int:
        """As many copies as the streams have: a record must not outlive what it refers to."""
        broker = self._broker
        clustered = min(3, max(1, broker.known_servers)) if broker.cluster_name else 1
        return broker.config.replicas or clustered

    async def _open(self) -> ObjectStore:
        if self._store is None:
            js = self._broker._nc.jetstream()
            name = self._bucket
            try:
                self._store = await js.object_store(name)
            except nats.js.errors.NotFoundError:
                config = ObjectStoreConfig(bucket=name, ttl=self._ttl, replicas=self._replicas)
                self._store = await js.create_object_store(name, config=config)
        return self._store

    async def put(self, name: str, body: bytes) -> str:
        """Store a value under a name; returns the name."""
        try:
            await (await self._open()).put(name, body)
        except (nats.errors.Error, OSError) as error:
            raise errors.OutcomeUnknown(f"object {name} could not be stored: {error}") from None
        return name

    async def get(self, name: str) -> bytes:
        """A stored value."""
        try:
            found = await (await self._open()).get(name)
        except nats.js.errors.NotFoundError:
            raise errors.NotFound(f"object {name} is not there (any more)") from None
        except (nats.errors.Error, OSError) as error:
            raise errors.Unavailable(f"object {name} could not be read: {error}") from None
        return found.data or b""

    async def exists(self, name: str) -> bool:
        """Whether a value is there, without reading it."""
        try:
            await (await self._open()).get_info(name)
        except nats.js.errors.NotFoundError:
            return False
        except (nats.errors.Error, OSError) as error:
            raise errors.Unavailable(f"object {name} could not be read: {error}") from None
        return True

    async def delete(self, name: str) -> None:
        """Remove a value; it not being there is fine."""
        try:
            await (await self._open()).delete(name)
        except (nats.errors.Error, OSError):
            return
