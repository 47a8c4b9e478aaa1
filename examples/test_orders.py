"""Tests of `orders`: in memory, and once with a real server and worker."""

from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from examples.orders import Order, api, app, charge, ledger, report
from holdfast.testing import RunningWorker, eager, make_context, memory


@pytest.fixture
async def web() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(api)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def test_order_is_charged_once(web: httpx.AsyncClient) -> None:
    """Two requests about one order are one run."""
    with ledger.override({}) as books:
        async with memory(app) as mem:
            for state in ("queued", "queued"):
                answer = await web.post("/orders", json={"id": 7, "cents": 100})
                assert answer.json() == {"run": "charge/7", "state": state}
            await mem.drain()
            again = await web.post("/orders", json={"id": 7, "cents": 100})
            assert again.json()["state"] == "done"
            assert (await web.get("/progress/charge/7")).text == "data: done \n\n"
            for unknown in ("charge/8", "charge/a%20b"):
                assert (await web.get(f"/progress/{unknown}")).status_code == 404
    assert books == {7: 100}


async def test_report_adds_up() -> None:
    """A handler is a plain function, and a job that is executed at once."""
    books = {1: 10}
    await charge(make_context(), Order(id=2, cents=20), books)
    with ledger.override(books), eager(app):
        assert await (await report.enqueue()).result() == 30


async def test_order_on_a_real_server(
    web: httpx.AsyncClient, holdfast_worker: Callable[..., RunningWorker]
) -> None:
    """The run that a route sent is found by its id, with the type of its result."""
    async with holdfast_worker(app):
        sent = await web.post("/orders", json={"id": 9, "cents": 5})
        assert await charge.run(sent.json()["run"]).result(timeout=60) == "receipt-9"
        assert "data: done" in (await web.get("/progress/charge/9")).text
