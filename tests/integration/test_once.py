"""`app.once`: a guard for work that is no job."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from holdfast import Holdfast
from holdfast.client import once
from holdfast.client.once import Once, OnceStore
from holdfast.errors import ClaimLost, InvalidInput, NotConnected, OutcomeUnknown, StillHeld
from holdfast.ownership.store import SWEEP_LEAST, MemoryStore
from holdfast.server import Server
from holdfast.testing import FakeClock, memory
from tests.integration.support import until


@pytest.fixture(params=["nats", "process", "testing"])
async def guarded(
    app: Holdfast, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Holdfast]:
    """An app whose keys are on the server, in this process by configuration, or in a test."""
    if request.param == "process":
        monkeypatch.setenv("HOLDFAST_RECORD_ONCE", "memory")
        monkeypatch.setenv("HOLDFAST_NATS_URL", "nats://127.0.0.1:9")  # nobody is there
        app = Holdfast("alone")
    async with memory(app) if request.param == "testing" else _closing(app):
        yield app


@contextlib.asynccontextmanager
async def _closing(app: Holdfast) -> AsyncIterator[None]:
    yield
    await app.close()


async def test_work_is_done_once_and_again_after_a_failure(guarded: Holdfast) -> None:
    """An exception leaves the work to the next caller, the end of the block completes it."""
    done: list[str] = []
    with contextlib.suppress(ValueError):
        async with guarded.once("document 42/é") as first:
            assert first
            raise ValueError("no")
    for name in ("second", "third"):
        async with guarded.once("document 42/é", ttl="1h") as first:
            if first:
                done.append(name)
    async with guarded.once("document-43") as first:
        assert first
        await first.fail()
    async with guarded.once("document-43") as again:
        assert again
        assert again.epoch > first.epoch
        await again.complete()
    assert done == ["second"]


async def test_callers_at_once_wait_for_the_first(guarded: Holdfast) -> None:
    """Whoever is not first knows that the work is done."""
    effects: list[int] = []

    async def work(number: int) -> None:
        async with guarded.once("document-42") as first:
            if first:
                await asyncio.sleep(0.05)
                effects.append(number)
        assert len(effects) == 1

    await asyncio.gather(*(work(n) for n in range(20)))


async def test_key_that_stays_held_is_an_error_after_a_timeout(guarded: Holdfast) -> None:
    """The caller can give its message back."""
    async with guarded.once("document-42") as first:
        assert first
        with pytest.raises(StillHeld, match="document-42"):
            async with guarded.once("document-42", timeout=0.3):
                raise AssertionError("must not enter")
    with pytest.raises(InvalidInput):
        guarded.once("")
    with pytest.raises(InvalidInput):
        guarded.once("x", ttl="1ms")


async def test_dead_holder_is_replaced_and_learns_it(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that neither renews nor ends loses the key with its lease; its late end is refused."""
    monkeypatch.setattr(once, "HELD_SECONDS", 1.0)

    async def hangs(self: Once) -> None:
        await asyncio.sleep(600)

    async with app:
        with monkeypatch.context() as stopped:
            stopped.setattr(Once, "_renew", hangs)
            zombie = app.once("document-42")
            assert await zombie.__aenter__()
        async with app.once("document-42") as second:
            assert second
            assert second.epoch > zombie.epoch
            with pytest.raises(ClaimLost, match="taken over"):
                await zombie.complete()
        async with app.once("document-42") as third:
            assert not third


async def test_holder_renews_its_lease(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that takes longer than a lease keeps its key."""
    monkeypatch.setattr(once, "HELD_SECONDS", 1.0)
    monkeypatch.setattr(once, "RENEW_SECONDS", 0.2)
    async with app, app.once("document-42") as first:
        revision = first._revision
        await until(lambda: first._revision >= revision + 8, 60, "eight renewals")
        with pytest.raises(StillHeld):
            async with app.once("document-42", timeout=0.3):
                raise AssertionError("must not enter")


class _SlowAnswers:
    """A store that writes at once and answers when it is allowed to."""

    def __init__(self, store: OnceStore) -> None:
        self._store = store
        self.written = asyncio.Event()
        self.slow = False

    async def put(self, key: str, value: bytes, *, expected: int, ttl: float | None = None) -> int:
        revision = await self._store.put(key, value, expected=expected, ttl=ttl)
        if self.slow:
            self.slow = False
            self.written.set()
            await asyncio.Event().wait()
        return revision

    async def get(self, key: str) -> once.StoredOnce | None:
        return await self._store.get(key)


async def test_renewal_without_an_answer_is_known_as_ours(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completing while a renewal is on its way does not look like a take-over."""
    monkeypatch.setattr(once, "RENEW_SECONDS", 0.01)
    slow: list[_SlowAnswers] = []
    guard = app.once("document-42")
    connect = guard._connect

    async def slowly() -> OnceStore:
        slow.append(_SlowAnswers(await connect()))
        return slow[0]

    monkeypatch.setattr(guard, "_connect", slowly)
    async with guard as first:
        assert first
        slow[0].slow = True
        await slow[0].written.wait()
    async with app.once("document-42") as again:
        assert not again
    await app.close()


async def test_block_ends_while_nats_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the error of the work itself, or as unknown: never withheld until NATS is back."""
    monkeypatch.setenv("HOLDFAST_REQUEST_TIMEOUT_SECONDS", "0.2")
    with Server() as server:
        async with Holdfast("alone", nats_url=server.url) as app:

            async def fail() -> None:
                async with app.once("document-43"):
                    server.stop()
                    monkeypatch.setattr(once, "HELD_SECONDS", 0.1)
                    raise ValueError("bad page")

            async def succeed() -> None:
                async with app.once("document-42"):
                    with pytest.raises(ValueError, match="bad page"):
                        await fail()

            with pytest.raises(OutcomeUnknown, match="could not be marked as done"):
                await succeed()
            with pytest.raises(NotConnected, match=r"NATS did not answer within 0\.1 s"):
                await app.once("document-44", timeout=0.1).__aenter__()


async def test_keys_in_memory_are_forgotten_after_their_time() -> None:
    """A process that guards new keys for ever does not grow for ever."""
    clock = FakeClock()
    store = MemoryStore(clock)
    for number in range(3 * SWEEP_LEAST):
        clock.advance(1)
        await store.put(str(number), b"done", expected=0, ttl=60.0)
    assert len(store._entries) <= 2 * SWEEP_LEAST
    assert len(store.keys()) == 60
