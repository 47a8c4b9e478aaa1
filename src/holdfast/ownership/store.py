"""The contract of a bucket, and an implementation in memory.

`broker.Bucket` implements it on NATS, `MemoryStore` in a dict for users' unit tests. One
conformance suite runs against both, so code that passes in memory also works on the server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from holdfast.clock import Clock, SystemClock
from holdfast.errors import Conflict, Unreadable

T = TypeVar("T")


class Stamped(Protocol):
    """A value with the revision that wrote it."""

    @property
    def key(self) -> str: ...
    @property
    def value(self) -> bytes: ...
    @property
    def revision(self) -> int: ...


class Store(Protocol):
    """Keys written by compare-and-swap."""

    def put(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> Awaitable[int]:
        """Write if the key is still at `expected` (0: absent), else raise `Conflict`."""
        ...

    async def get(self, key: str) -> Stamped | None:
        """The newest value, or None."""
        ...

    def read(self, decode: Callable[[bytes], T], entry: Any) -> T | None:
        """Decode a value; an unreadable one is reported and gives None."""
        ...

    async def delete(self, key: str) -> None:
        """Delete a key."""
        ...


class MemoryEntry(NamedTuple):
    """A stored value."""

    key: str
    value: bytes
    revision: int
    expires: float | None = None
    stored: float = 0.0
    """When it was stored, by the server's clock; 0 if only its writer knows."""


SWEEP_LEAST = 1_000
"""Entries before the first sweep of expired ones. Each later sweep comes when their number has
doubled, so that the cost of a write does not depend on their number."""


class MemoryStore:
    """The same contract in memory: revisions increase across the whole store, and TTLs expire."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._entries: dict[str, MemoryEntry] = {}
        self._revision = 0
        self._sweep_at = SWEEP_LEAST

    async def put(
        self, key: str, value: bytes, *, expected: int | None, ttl: float | None = None
    ) -> int:
        current = self._live(key)
        if expected is not None and (current.revision if current else 0) != expected:
            raise Conflict(f"{key} is at {current.revision if current else 0}, not {expected}")
        self._revision += 1
        expires = self._clock.monotonic() + max(1.0, ttl) if ttl is not None else None
        self._entries[key] = MemoryEntry(key, value, self._revision, expires)
        if len(self._entries) > self._sweep_at:
            self._sweep_at = max(SWEEP_LEAST, 2 * len(self.keys()))
        return self._revision

    async def get(self, key: str) -> MemoryEntry | None:
        return self._live(key)

    def read(self, decode: Callable[[bytes], T], entry: Stamped) -> T | None:
        try:
            return decode(entry.value)
        except Unreadable:
            return None

    async def delete(self, key: str) -> None:
        self._entries.pop(key, None)

    def keys(self) -> list[str]:
        """All keys that have not expired; forgets those that have."""
        return [key for key in list(self._entries) if self._live(key)]

    def _live(self, key: str) -> MemoryEntry | None:
        entry = self._entries.get(key)
        if entry and entry.expires is not None and entry.expires <= self._clock.monotonic():
            del self._entries[key]
            return None
        return entry
