"""Where the conformance suite runs: a store in memory, and a bucket on a real server.

A place opens any number of views of one store: on the server each has its own connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from holdfast.broker import Broker, Bucket
from holdfast.broker.streams import Topology
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.errors import BrokerError, Conflict, OutcomeUnknown
from holdfast.model.run import RunRecord, Verdict
from holdfast.ownership.claims import Claim, Claims
from holdfast.ownership.store import MemoryStore, Stamped, Store
from holdfast.telemetry import Telemetry
from holdfast.testing import FakeClock
from tests.support import until

TTL = 1.0
"""The shortest that a server accepts."""


class Place(Protocol):
    """Memory or server."""

    def open(self, count: int) -> contextlib.AbstractAsyncContextManager[list[Store]]:
        """`count` views of one store."""
        ...

    async def outlive(self, store: Store, key: str) -> None:
        """Wait until a key written with `TTL` has expired."""
        ...


class MemoryPlace:
    """The store in memory, with its own clock."""

    def __init__(self) -> None:
        self._clock = FakeClock()

    @contextlib.asynccontextmanager
    async def open(self, count: int) -> AsyncIterator[list[Store]]:
        store = MemoryStore(self._clock)
        yield [store for _ in range(count)]

    async def outlive(self, store: Store, key: str) -> None:
        self._clock.advance(TTL)
        assert await store.get(key) is None


class ServerPlace:
    """A bucket on NATS."""

    def __init__(self, url: str, namespace: str) -> None:
        self._config = ConnectionConfig(nats_url=url, namespace=namespace)

    @contextlib.asynccontextmanager
    async def open(self, count: int) -> AsyncIterator[list[Store]]:
        async with contextlib.AsyncExitStack() as stack:
            brokers = [await stack.enter_async_context(Broker(self._config)) for _ in range(count)]
            await Topology(brokers[0], RecordConfig()).ensure()
            yield [Bucket(broker, broker.names.runs) for broker in brokers]

    async def outlive(self, store: Store, key: str) -> None:
        async def gone() -> bool:
            return await store.get(key) is None

        await until(gone, 10, f"the end of {key}")


class FaultyStore:
    """A store whose next writes get no answer, whether applied or not."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.faults: list[str] = []
        """For each of the next writes: `applied`, `dropped`, `full`, or anything else for none.

        Of a leader that cannot reach the others: `taken in` (no answer), `in process` (a later
        one is refused for it), `stored late` (the first one is stored before this one).
        """
        self.meanwhile: Callable[[], object] | None = None
        self.wrote = asyncio.Event()

    async def put(self, key: str, value: bytes, *, expected: int, ttl: float | None = None) -> int:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "taken in":
            self._taken_in = (key, value, expected, ttl)
            raise OutcomeUnknown("no answer from NATS in time")
        if fault == "in process":
            raise Conflict("wrong last sequence: an earlier write is in process")
        if fault == "stored late":
            late, first, at, kept = self._taken_in
            await self._store.put(late, first, expected=at, ttl=kept)
        if fault == "full":
            raise BrokerError("no space left on device")
        revision = 0
        if fault != "dropped":
            revision = await self._store.put(key, value, expected=expected, ttl=ttl)
            self.wrote.set()
        if fault == "cut off":
            await asyncio.Event().wait()
        if fault in ("applied", "dropped"):
            await self._let_others()
            raise OutcomeUnknown("no answer from NATS in time")
        return revision

    async def _let_others(self) -> None:
        if self.meanwhile is not None:
            result = self.meanwhile()
            if asyncio.iscoroutine(result):
                await result

    async def get(self, key: str) -> Stamped | None:
        return await self._store.get(key)

    def read(self, decode: Callable[[bytes], Any], entry: Any) -> Any:
        return self._store.read(decode, entry)

    async def delete(self, key: str) -> None:
        await self._store.delete(key)


class QuickClock(FakeClock):
    """A clock whose waits return at once."""

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)


class Node:
    """A node that claims runs; `alive` is what the others believe."""

    alive: set[str]

    def __init__(
        self, name: str, store: Store, alive: set[str], *, crash_limit: int = 3, ttl: float = 60.0
    ) -> None:
        self.name = name
        self.telemetry = Telemetry()
        self.in_grace: set[str] = set()
        alive.add(name)

        async def is_alive(node: str) -> bool:
            return node in alive

        async def in_grace(node: str) -> bool:
            return node in self.in_grace

        self.claims = Claims(
            store,
            name,
            QuickClock(),
            self.telemetry,
            now=lambda: 5.0,
            node_alive=is_alive,
            in_grace=in_grace,
            crash_limit=crash_limit,
            keyed_ttl=ttl,
            keyless_ttl=ttl,
        )

    async def claim(
        self, run: str = "run", *, message: int = 1, fresh: RunRecord | None = None
    ) -> Claim | Verdict:
        """Claim as for a delivered message."""
        fresh = fresh or RunRecord("running", "default", "job")
        return await self.claims.claim(run, fresh, message=message, reply="reply")

    async def won(self, run: str = "run", *, message: int = 1) -> Claim:
        """Claim, and assert success."""
        claim = await self.claim(run, message=message)
        assert isinstance(claim, Claim), claim
        return claim

    async def record(self, run: str = "run") -> RunRecord:
        """The run's stored record."""
        found = await self.claims.read(run)
        assert found is not None
        return found[0]

    @property
    def fenced(self) -> float:
        """How many of its writes were rejected."""
        labels = {"what": "settle"}
        return (
            self.telemetry.registry.get_sample_value("holdfast_fenced_writes_total", labels) or 0.0
        )
