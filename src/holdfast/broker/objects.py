"""Values too large for a message: results and dead-letter bodies, in the object store.

An object is compatible with every NATS tool: chunks under a unique subject, then a record that
names them. It exists completely or not at all, since the record comes last. With a TTL the server
removes both; without one they live as long as the bucket's age limit allows.

A bucket is created on first use, and again if it was deleted. The first write with a TTL changes a
bucket of an earlier version to allow TTLs; if this login may not change it, the bucket's own age
limit applies.

A record that cannot be read, or that names chunks by anything but an id, counts as no object: a
wildcard there would read and remove the chunks of all others. Writing the object replaces it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import secrets
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from holdfast import errors
from holdfast.broker.connection import Broker
from holdfast.broker.kv import direct_batch, ttl_text
from holdfast.broker.wire import Headers, Received, read_ack
from holdfast.clock import rfc3339
from holdfast.durations import DAY, NANO
from holdfast.model.codec import Codec
from holdfast.names import H_ROLLUP, H_TTL, object_chunks, object_meta, object_stream

log = logging.getLogger("holdfast.broker")

KEPT_SECONDS: Final = 30 * DAY
"""As long as a dead letter; objects with a TTL are removed earlier."""
CHUNK_BYTES: Final = 128 * 1024
"""The default of every client of the object store."""
HEADROOM_BYTES: Final = 1024
"""For the headers of a chunk, on a server that accepts less than a whole chunk."""
UNDER_WAY: Final = 8
"""Chunks sent before the first is confirmed: 1 MB, as much as one large message."""
LAG_SECONDS: Final = (0.1, 0.3, 1.0)
"""Waits for a replica that does not have the newest chunks yet."""


class ObjectRecord(msgspec.Struct):
    """The record of an object, as every NATS client writes it."""

    name: str
    bucket: str = ""
    nuid: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{0,64}$(?!\n)")] = ""
    """The id in the subject of its chunks."""
    size: int = 0
    chunks: int = 0
    digest: str = ""
    mtime: str = ""
    options: Any = None
    deleted: bool = False


RECORD: Final = Codec[ObjectRecord](ObjectRecord, "the record of an object")


class Objects:
    """An object bucket, by default the namespace's own; created on first use."""

    def __init__(self, broker: Broker, bucket: str = "", ttl: float | None = KEPT_SECONDS) -> None:
        self._broker = broker
        self._bucket = bucket or broker.names.objects
        self._stream = object_stream(self._bucket)
        self._ttl = ttl
        self._expires: bool | None = None  # whether objects may have TTLs; None until known

    # ---- the bucket

    @property
    def _replicas(self) -> int:
        """As many replicas as the streams have: an object must not be lost before the record that
        refers to it."""
        broker = self._broker
        clustered = min(3, max(1, broker.known_servers)) if broker.cluster_name else 1
        return broker.config.replicas or clustered

    async def _create(self) -> None:
        config = {
            "name": self._stream,
            "subjects": [object_chunks(self._bucket, ">"), object_meta(self._bucket, None)],
            "storage": "file",
            "retention": "limits",
            "discard": "new",
            "max_age": int((self._ttl or 0) * NANO),
            "num_replicas": self._replicas,
            "allow_rollup_hdrs": True,
            "allow_direct": True,
            "allow_msg_ttl": True,
        }
        try:
            await self._broker.api(f"STREAM.CREATE.{self._stream}", config)
        except errors.BrokerError as error:
            if "already in use" not in str(error):
                raise

    async def ensure(self) -> None:
        """Create the bucket unless it exists."""
        self._expires = None  # check again: it may have been deleted
        await self._may_expire()

    async def _may_expire(self) -> bool:
        """Whether the bucket allows TTLs; creates or changes it if necessary."""
        if self._expires is None:
            try:
                config = (await self._broker.api(f"STREAM.INFO.{self._stream}"))["config"]
            except errors.NotFound:
                await self._create()
                config = {"allow_msg_ttl": True}
            self._expires = bool(config.get("allow_msg_ttl")) or await self._teach(config)
        return self._expires

    async def _teach(self, config: dict[str, Any]) -> bool:
        try:
            changed = config | {"allow_msg_ttl": True}
            await self._broker.api(f"STREAM.UPDATE.{self._stream}", changed)
        except errors.PermissionDenied:
            log.info("%s has no TTLs: its own age limit applies to objects", self._stream)
            return False
        return True

    # ---- values

    async def put(self, name: str, body: bytes, ttl: float | None = None) -> str:
        """Store a value under a name, for `ttl` seconds; returns the name."""
        for last in (False, True):
            expires = await self._may_expire()
            headers = {H_TTL: ttl_text(ttl)} if ttl is not None and expires else {}
            try:
                await self._put(name, body, headers)
                break
            except errors.Unavailable:
                self._expires = None
                if last:
                    raise
        return name

    async def _put(self, name: str, body: bytes, headers: Headers) -> None:
        before = await self._record(name)
        chunks, id = self._cut(body), secrets.token_hex(11)
        try:
            await self._store_chunks(object_chunks(self._bucket, id), chunks, headers)
            record = ObjectRecord(
                name,
                bucket=self._bucket,
                nuid=id,
                size=len(body),
                chunks=len(chunks),
                digest=_digest(body),
                mtime=rfc3339(self._broker.server_now()),
                options={"max_chunk_size": CHUNK_BYTES},
            )
            meta = object_meta(self._bucket, name)
            rollup = {**headers, H_ROLLUP: "sub"}
            await self._broker.store(meta, RECORD.encode(record), rollup)
        except BaseException:
            with contextlib.suppress(errors.BrokerError):
                await self._purge(object_chunks(self._bucket, id))
            raise
        if before:
            await self._purge(object_chunks(self._bucket, before.nuid))

    def _cut(self, body: bytes) -> list[bytes]:
        size = min(CHUNK_BYTES, self._broker.max_message_bytes - HEADROOM_BYTES)
        return [body[start : start + size] for start in range(0, len(body), size)]

    async def _store_chunks(self, subject: str, chunks: list[bytes], headers: Headers) -> None:
        for start in range(0, len(chunks), UNDER_WAY):
            sent: list[asyncio.Future[Received]] = [
                await self._broker.send(subject, chunk, headers)
                for chunk in chunks[start : start + UNDER_WAY]
            ]
            for future in sent:
                await read_ack(future)

    async def _record(self, name: str) -> ObjectRecord | None:
        """A value's record; None if there is no such value or its record is unreadable."""
        request = {"last_by_subj": object_meta(self._bucket, name)}
        try:
            answer = await self._broker.api(f"STREAM.MSG.GET.{self._stream}", request)
        except errors.NotFound:
            return None
        body = base64.b64decode(answer["message"].get("data", ""))
        found = self._broker.unreadable.read(RECORD.decode, self._bucket, name, body)
        return found if found and found.nuid and not found.deleted else None

    async def _purge(self, subject: str) -> None:
        await self._broker.api(f"STREAM.PURGE.{self._stream}", {"filter": subject})

    async def get(self, name: str) -> bytes:
        """A stored value; retries while a replica lags."""
        for wait in (0.0, *LAG_SECONDS):
            await self._broker.clock.sleep(wait)
            record = await self._record(name)
            if record is None:
                raise errors.NotFound(f"object {name} does not exist, or no longer does")
            body = await self._chunks_of(record.nuid)
            if _digest(body) == record.digest:
                return body
        raise errors.Unavailable(f"object {name} could not be read: its parts do not fit together")

    async def _chunks_of(self, id: str) -> bytes:
        subject = object_chunks(self._bucket, id)
        return b"".join([m.body async for m in direct_batch(self._broker, self._stream, subject)])

    async def exists(self, name: str) -> bool:
        """Whether a value exists, without reading it."""
        return await self._record(name) is not None

    async def delete(self, name: str) -> None:
        """Remove a value and its chunks; a missing one is fine."""
        with contextlib.suppress(errors.BrokerError):
            record = await self._record(name)
            await self._purge(object_meta(self._bucket, name))
            if record:
                await self._purge(object_chunks(self._bucket, record.nuid))


def _digest(body: bytes) -> str:
    return f"SHA-256={base64.urlsafe_b64encode(hashlib.sha256(body).digest()).decode()}"
