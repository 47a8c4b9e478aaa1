"""Lost answers: whoever sends is told what is stored, what is not, and what nobody knows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.broker import Broker
from holdfast.broker.kv import direct_batch
from holdfast.broker.streams import Topology
from holdfast.client.run import Request
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.errors import NotConnected, OutcomeUnknown, PartlyStored, Unavailable
from holdfast.names import H_MSG_ID
from holdfast.server import Server
from tests.faults.proxy import Proxy
from tests.support import until


@asynccontextmanager
async def _sending(
    nats: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Holdfast, Proxy, Broker]]:
    """An app whose connection can be cut, and one beside it that can always look."""
    monkeypatch.setenv("HOLDFAST_REQUEST_TIMEOUT_SECONDS", "2")
    config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    async with Proxy(nats.port) as proxy, Broker(config, name="look") as look:
        await Topology(look, RecordConfig()).ensure()
        app = Holdfast("shop", nats_url=proxy.url, namespace=namespace)
        app.job(name="work")(_work)
        app.job(name="loose", delivery="at_least_once")(_work)
        async with app:
            yield app, proxy, look


async def _work(n: int) -> None:
    """Nobody executes it."""


async def _stored(look: Broker) -> Counter[str]:
    """How often each run is in the queue."""
    pattern = f"{look.names.namespace}.job.>"
    found = direct_batch(look, look.names.jobs, pattern)
    return Counter([message.headers[H_MSG_ID] async for message in found])


async def test_run_whose_answer_was_lost_is_not_called_unsent(
    nats: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer first, then the connection: the outcome is unknown, and a repeat is safe."""
    async with _sending(nats, namespace, monkeypatch) as (app, proxy, look):
        proxy.deaf = True
        sending = asyncio.create_task(app.jobs["work"].enqueue(1))
        await until(lambda: _stored(look), 10, "the stored message")
        proxy.hang_up()
        with pytest.raises(OutcomeUnknown, match="may or may not be stored") as caught:
            await sending
        [request] = caught.value.requests
        assert await _stored(look) == {request.run: 1}
        await proxy.pick_up()
        [run] = await app.enqueue_many(caught.value.requests)
        assert run.id == request.run
        assert await _stored(look) == {request.run: 1}


async def test_run_that_never_left_is_called_unsent(
    nats: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a connection nothing is sent, the error says so, and it was not sent later either."""
    async with _sending(nats, namespace, monkeypatch) as (app, proxy, look):
        backend: Any = await app.backend()
        proxy.hang_up()
        await until(lambda: not backend.broker.connected, 10, "the lost connection")
        with pytest.raises((NotConnected, Unavailable)) as caught:
            await app.jobs["work"].enqueue(1)
        assert not isinstance(caught.value, OutcomeUnknown)
        assert len(caught.value.requests) == 1
        with pytest.raises((NotConnected, Unavailable)) as caught:
            await app.jobs["work"].enqueue_many(range(2000))
        assert len(caught.value.requests) == 2000
        await proxy.pick_up()
        await until(lambda: backend.broker.connected, 10, "the connection")
        await backend.broker.flush()
        assert not await _stored(look)


@pytest.mark.parametrize("job", ["work", "loose"])
@pytest.mark.parametrize("lost", ["answers", "connection"])
async def test_many_say_which_are_stored_and_a_repeat_doubles_nothing(
    nats: Server, namespace: str, monkeypatch: pytest.MonkeyPatch, job: str, lost: str
) -> None:
    """Cut in the middle: no run is called stored that is not, none unsent that is stored."""
    count = 6_000
    async with _sending(nats, namespace, monkeypatch) as (app, proxy, look):
        requests = [app.jobs[job].request(n) for n in range(count)]
        proxy.fuse = (200_000, proxy.fall_silent if lost == "answers" else proxy.hang_up)
        with pytest.raises(PartlyStored) as caught:
            await app.enqueue_many(requests)
        proxy.hang_up()
        error = caught.value
        found = await _stored(look)
        assert error.requests == tuple(requests)
        for request, outcome in zip(error.requests, error.outcomes, strict=True):
            assert outcome == "unknown" or (outcome == "stored") == (request.run in found)
        assert error.outcomes.count("stored") > 0
        assert error.outcomes.count("not sent") > 0
        await proxy.pick_up()
        assert await _send_again(app, error.unstored) == {r.run for r in error.unstored}
        assert await _stored(look) == {r.run: 1 for r in requests}
        await _send_again(app, error.requests)
        assert await _stored(look) == {r.run: 1 for r in requests}


async def _send_again(app: Holdfast, unstored: Sequence[Request]) -> set[str]:
    """Send as the error says until all are stored: a slow machine may need more than one try."""
    stored: set[str] = set()
    while unstored:
        try:
            stored |= {run.id for run in await app.enqueue_many(unstored)}
            break
        except PartlyStored as error:
            unstored = error.unstored
            stored |= {r.run for r in error.requests} - {r.run for r in unstored}
    return stored
