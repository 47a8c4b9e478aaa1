"""Schedules whose payload the server does not take: refused when defined, told when due."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.client import Client
from holdfast.client.schedules import Schedules, UnknownSchedule
from holdfast.errors import InvalidInput
from holdfast.model.schedule import Schedule, define
from holdfast.model.slot import Slot
from holdfast.server import Server
from holdfast.status.schedules import SlotHistory
from tests.integration.test_schedules import client_of, scheduling
from tests.support import until

LOWERED = 64 * 1024


def sized(name: str, size: int, **options: str) -> Schedule:
    """A schedule of every second, whose payload has that size."""
    return define(name, "tick", every=1, body=json.dumps("x" * (size - 2)).encode(), **options)  # type: ignore[arg-type]


async def newest(client: Client, name: str, state: str) -> Slot:
    """The newest slot of a schedule, once it is in that state."""
    history = SlotHistory(client)
    found: list[Any] = []

    async def there() -> bool:
        found[:] = [slot for _, slot in await history.recent(name, 1)]
        return bool(found) and found[0].state == state

    await until(there, 15, f"a slot of {name} that is {state}")
    return found[0]


@pytest.mark.parametrize("over", [1, 4_096])
async def test_schedule_larger_than_the_server_takes_is_refused_at_once(over: int) -> None:
    """Also one that could be stored, but whose slots could not; a set of them changes nothing."""
    with Server(fast=True, max_payload=LOWERED) as server:
        app = Holdfast("shop", nats_url=server.url)
        registry = Schedules(await client_of(app))
        large = sized("large", LOWERED - 4_096 + over)
        with pytest.raises(InvalidInput, match=r"schedule 'large' .* max_payload of 65,536 leaves"):
            await registry.add(large)
        with pytest.raises(InvalidInput, match="put the data into an object store"):
            await registry.sync("shop", [define("small", "tick", every=1), large])
        assert await registry.list() == []
        await registry.add(sized("just-fits", LOWERED - 4_096))
        async with scheduling(app):
            await newest(registry.client, "just-fits", "dispatched")
        await app.close()


async def test_slot_larger_than_a_lowered_limit_is_skipped_and_told() -> None:
    """The others fire, `why` says what to do, and the schedule can be removed."""
    with Server(fast=True) as server:
        app = Holdfast("shop", nats_url=server.url)
        registry = Schedules(await client_of(app))
        await registry.add(sized("large", LOWERED))
        await registry.add(define("small", "tick", every=1))
        await app.close()
        server.stop()
        server.max_payload = LOWERED
        server.start()

        app = Holdfast("shop", nats_url=server.url)
        client = await client_of(app)
        async with scheduling(app):
            assert (await newest(client, "large", "skipped")).reason == "too_large"
            await newest(client, "small", "dispatched")
        why = await SlotHistory(client).why("large")
        assert why.verdict == "skipped"
        assert "larger than the server accepts" in why.explanation
        assert "raise max_payload" in why.explanation
        registry = Schedules(client)
        await registry.remove("large")
        with pytest.raises(UnknownSchedule):
            await registry.show("large")
        await app.close()


async def test_slot_larger_than_the_stream_takes_is_skipped_and_the_next_one_fires(
    app: Holdfast,
) -> None:
    """A planned slot that the stream refuses for good is settled, and is no run that goes on."""
    client = await client_of(app)
    jobs = client.broker.names.jobs
    await client.topology.update_stream(jobs, {"max_msg_size": 2_000})
    registry = Schedules(client)
    await registry.add(sized("large", 4_000, overlap="skip"))
    await registry.add(define("small", "tick", every=1))
    async with scheduling(app) as scheduler:
        assert (await newest(client, "large", "skipped")).reason == "too_large"
        await newest(client, "small", "dispatched")
        await client.topology.update_stream(jobs, {"max_msg_size": -1})
        await newest(client, "large", "dispatched")
        await until(lambda: scheduler._leader is not None and not scheduler._leader.unsent, 5)
    await app.close()
