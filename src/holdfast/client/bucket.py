"""`app.bucket(name)`: a program's own records, stored beside its runs.

    carts = app.bucket("carts", Cart)
    await carts.put("ann", Cart(...))                          # the last writer wins
    entry = await carts.get("ann")                             # with value and revision
    await carts.put("ann", cart, expected=entry.revision)      # or Conflict: somebody was faster
    await carts.change("ann", lambda cart: cart.with_item(7))  # read, change, write, or all again

Keys are one or more words with dots between them; `entries("ann")` lists `ann.1`, `ann.2`. Values
are whatever a payload may be, checked against the type that the bucket was given.

Guaranteed: a write with `expected` is decided by the server, and a write that returned is stored.
Reads go to the stream's leader. Not guaranteed: that a listing is a snapshot, or that a write which
raised `OutcomeUnknown` was not applied. So `change` may call its function again on the function's
own result: it has to be idempotent, like every effect of a run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from holdfast import errors
from holdfast.broker import Broker
from holdfast.broker import Bucket as Records
from holdfast.broker.kv import Entry
from holdfast.broker.streams import Topology
from holdfast.durations import Duration, seconds
from holdfast.names import check_key, check_name
from holdfast.payload import decode_result, encode_value

T = TypeVar("T")

TRIES = 50
"""In each round one writer wins, so only more than 50 writers of one key can exhaust this."""
_AWAY = (errors.NotConnected, errors.Unavailable)
_UNSURE = (*_AWAY, errors.OutcomeUnknown)
_WAIT_SECONDS = 0.1
"""Between two tries of a write: a reconnect takes about as long."""


class Data(Protocol):
    """Where a bucket's bytes are: on NATS, or in memory in unit tests."""

    async def put(
        self, key: str, value: bytes, *, expected: int | None, ttl: float | None = None
    ) -> int:
        """Write, if the key is still at `expected` (0: absent; None: any)."""
        ...

    async def get(self, key: str) -> Entry | None:
        """The newest value, or None."""
        ...

    async def delete(self, key: str) -> None:
        """Remove a key."""
        ...

    def entries(self, prefix: str = "") -> AsyncIterator[Entry]:
        """Every key below `prefix`."""
        ...

    def pass_over(self, entry: Entry, error: errors.Unreadable) -> None:
        """Log an entry that cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class BucketEntry(Generic[T]):
    """A value with its key, the revision that wrote it, and when the server stored it."""

    key: str
    value: T
    revision: int
    stored: float


class Bucket(Generic[T]):
    """One bucket of an app. Made by `app.bucket`; does no I/O until it is used."""

    def __init__(self, data: Callable[[str], Awaitable[Data]], name: str, type: Any = Any) -> None:
        self.name = check_name(name, "bucket")
        self._data = data
        self._type = type

    def __repr__(self) -> str:
        return f"<Bucket {self.name}>"

    async def get(self, key: str) -> BucketEntry[T] | None:
        """A key's newest value, or None."""
        data = await self._data(self.name)
        found = await data.get(check_key(key))
        return self._read(found) if found else None

    async def put(
        self, key: str, value: T, *, expected: int | None = None, ttl: Duration | None = None
    ) -> int:
        """Write and return the new revision.

        `expected` is the revision that must still be there (0: none), else `Conflict`. The server
        removes a value after its `ttl`; a later write without one stays.
        """
        data = await self._data(self.name)
        body = encode_value(value)
        lasts = seconds(ttl, "ttl") if ttl is not None else None
        return await data.put(check_key(key), body, expected=expected, ttl=lasts)

    async def change(
        self, key: str, change: Callable[[T | None], T], *, ttl: Duration | None = None
    ) -> T:
        """Write what `change` returns for the value (None if absent).

        If another write came first, `change` is called again with the new value. An unchanged value
        is not written.
        """
        for _ in range(TRIES):
            entry = await self.get(key)
            before = encode_value(entry.value) if entry else None
            new = change(entry.value if entry else None)
            if before is not None and encode_value(new) == before:
                return new
            try:
                await self.put(key, new, expected=entry.revision if entry else 0, ttl=ttl)
            except (errors.Conflict, errors.OutcomeUnknown):
                continue
            return new
        raise errors.Conflict(
            f"{key} in bucket {self.name}: {TRIES} tries lost to other writers; try again"
        )

    async def delete(self, key: str) -> None:
        """Remove a key, if it exists."""
        data = await self._data(self.name)
        await data.delete(check_key(key))

    async def entries(self, prefix: str = "") -> AsyncIterator[BucketEntry[T]]:
        """Every key below `prefix` (whole words), in the order of the last write.

        A record that does not fit the bucket's type is skipped and logged; `get` says why.
        """
        data = await self._data(self.name)
        async for found in data.entries(check_key(prefix) if prefix else ""):
            try:
                entry = self._read(found)
            except errors.Unreadable as error:
                data.pass_over(found, error)
                continue
            yield entry

    def _read(self, found: Entry) -> BucketEntry[T]:
        try:
            value = decode_result(found.value, self._type)
        except errors.InvalidPayload as error:
            raise errors.Unreadable(
                f"{found.key} in bucket {self.name} cannot be read: {error}"
            ) from None
        return BucketEntry(found.key, value, found.revision, found.stored)


class NatsData:
    """A bucket on NATS: created on first use, and again if it was deleted."""

    def __init__(self, broker: Broker, topology: Topology, name: str) -> None:
        self._broker = broker
        self._topology = topology
        self._name = name
        self._records = Records(broker, broker.names.data(name))

    async def ensure(self) -> None:
        """Create the bucket if it is missing."""
        await self._topology.ensure_buckets(f"data_{self._name}")

    async def put(
        self, key: str, value: bytes, *, expected: int | None, ttl: float | None = None
    ) -> int:
        """Write; an idempotent write is repeated until it is confirmed."""
        deadline = self._broker.clock.monotonic() + self._broker.config.request_timeout_seconds
        repeated = _UNSURE if expected is None else _AWAY
        while True:
            try:
                return await self._records.put(key, value, expected=expected, ttl=ttl)
            except errors.Conflict:
                # Tools that delete a key leave a marker, which has a revision.
                revision, there = await self._records.last(key)
                if expected != 0 or there or not revision:
                    raise
                expected = revision
                continue
            except repeated as error:
                if self._broker.clock.monotonic() > deadline:
                    raise
                if isinstance(error, errors.Unavailable):
                    await self.ensure()
            await self._broker.clock.sleep(_WAIT_SECONDS)

    async def get(self, key: str) -> Entry | None:
        try:
            return await self._records.get(key)
        except errors.NotFound:  # the bucket itself
            await self.ensure()
            return None

    async def delete(self, key: str) -> None:
        try:
            await self._records.delete(key)
        except errors.NotFound:  # the bucket itself
            await self.ensure()

    async def entries(self, prefix: str = "") -> AsyncIterator[Entry]:
        try:
            async for found in self._records.entries(prefix):
                yield found
        except errors.NotFound:  # the bucket itself
            await self.ensure()

    def pass_over(self, entry: Entry, error: errors.Unreadable) -> None:
        self._broker.unreadable.note(self._records.name, entry.key, error, entry.value)
