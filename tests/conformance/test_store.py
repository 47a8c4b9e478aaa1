"""What a store of records guarantees, in memory as on the server."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.errors import Conflict
from holdfast.names import keyed_run
from tests.conformance.places import TTL, Place

KEYS = [
    "plain-key_1",
    "a b",
    "document:created",
    "*.>",
    "..",
    "line\r\nbreak",
    "naïve – 名前",
    "\udc80",
    "/etc/passwd",
    "=h",
    "k" * 5_000,
]


async def test_put_creates_a_key_once(place: Place) -> None:
    """Revision 0 means "not there": the second creator is refused and changes nothing."""
    async with place.open(2) as (one, other):
        revision = await one.put("key", b"first", expected=0)
        assert revision > 0
        with pytest.raises(Conflict):
            await other.put("key", b"second", expected=0)
        entry = await other.get("key")
    assert entry is not None
    assert (entry.key, entry.value, entry.revision) == ("key", b"first", revision)


async def test_put_replaces_only_the_revision_it_names(place: Place) -> None:
    """Who names an older revision, or one that never was, is refused."""
    async with place.open(1) as (store,):
        first = await store.put("key", b"1", expected=0)
        second = await store.put("key", b"2", expected=first)
        for stale in (first, second + 100):
            with pytest.raises(Conflict):
                await store.put("key", b"3", expected=stale)
        with pytest.raises(Conflict):
            await store.put("absent", b"3", expected=second)
        entry = await store.get("key")
        assert await store.get("absent") is None
    assert entry is not None
    assert entry.value == b"2"


async def test_revisions_grow_over_all_keys(place: Place) -> None:
    """A revision is a fencing number: each write of the store gets a higher one."""
    async with place.open(2) as stores:
        seen = [
            await store.put(f"key-{store_number}-{number}", b"", expected=0)
            for number in range(5)
            for store_number, store in enumerate(stores)
        ]
        again = await stores[0].put("key-0-0", b"x", expected=seen[0])
    assert seen == sorted(set(seen))
    assert again > seen[-1]


async def test_revisions_grow_when_a_key_comes_back(place: Place) -> None:
    """A key that was deleted starts with a revision higher than it ever had."""
    async with place.open(1) as (store,):
        before = await store.put("key", b"1", expected=0)
        await store.delete("key")
        assert await store.get("key") is None
        with pytest.raises(Conflict):
            await store.put("key", b"2", expected=before)
        assert await store.put("key", b"2", expected=0) > before


async def test_delete_of_an_absent_key_is_fine(place: Place) -> None:
    """Deleting twice is deleting once, and leaves other keys alone."""
    async with place.open(1) as (store,):
        await store.put("other", b"", expected=0)
        await store.delete("key")
        await store.delete("key")
        assert await store.get("other") is not None


async def test_put_with_ttl_expires(place: Place) -> None:
    """An expired key is absent for reads and for writes, and leaves nothing behind."""
    async with place.open(1) as (store,):
        before = await store.put("key", b"1", expected=0, ttl=TTL)
        assert await store.get("key") is not None
        await place.outlive(store, "key")
        with pytest.raises(Conflict):
            await store.put("key", b"2", expected=before)
        assert await store.put("key", b"2", expected=0) > before


async def test_put_with_a_ttl_too_short_lasts_a_second(place: Place) -> None:
    """The server takes no TTL under a second: it is not ignored, it becomes one second."""
    async with place.open(1) as (store,):
        await store.put("key", b"1", expected=0, ttl=0.01)
        assert await store.get("key") is not None
        await place.outlive(store, "key")


async def test_put_without_ttl_takes_the_ttl_away(place: Place) -> None:
    """A finished run that is sent again must not vanish while it runs."""
    async with place.open(1) as (store,):
        first = await store.put("kept", b"1", expected=0, ttl=TTL)
        await store.put("kept", b"2", expected=first)
        await store.put("gone", b"1", expected=0, ttl=TTL)
        await place.outlive(store, "gone")
        entry = await store.get("kept")
    assert entry is not None
    assert entry.value == b"2"


async def test_put_has_one_winner_among_many_connections(place: Place) -> None:
    """Of many who write the same revision at once, one is first and all others know it."""
    async with place.open(8) as stores:
        revision = 0
        for _ in range(5):
            answers = await asyncio.gather(
                *(store.put("key", b"%d" % n, expected=revision) for n, store in enumerate(stores)),
                return_exceptions=True,
            )
            won = [(n, a) for n, a in enumerate(answers) if isinstance(a, int)]
            assert len(won) == 1
            assert all(isinstance(a, Conflict) for a in answers if not isinstance(a, int))
            entry = await stores[0].get("key")
            assert entry is not None
            assert (entry.value, entry.revision) == (b"%d" % won[0][0], won[0][1])
            revision = won[0][1]


async def test_put_takes_any_bytes(place: Place) -> None:
    """A value comes back as it was written, also an empty one and one that is no text."""
    async with place.open(1) as (store,):
        for number, value in enumerate((b"", b"\x00\xff\r\n", bytes(range(256)) * 400)):
            await store.put(f"key-{number}", value, expected=0)
            entry = await store.get(f"key-{number}")
            assert entry is not None
            assert entry.value == value


@pytest.mark.parametrize("key", KEYS, ids=range(len(KEYS)))
async def test_keys_of_any_characters_are_kept_apart(place: Place, key: str) -> None:
    """A user's key may be any text: encoded it is one key, and no other's."""
    run, other = keyed_run("default", "job", key), keyed_run("default", "job", key + "!")
    async with place.open(1) as (store,):
        await store.put(run, b"mine", expected=0)
        assert await store.get(other) is None
        await store.put(other, b"other", expected=0)
        entry = await store.get(run)
        assert entry is not None
        assert (entry.key, entry.value) == (run, b"mine")
        await store.delete(run)
        assert await store.get(other) is not None
