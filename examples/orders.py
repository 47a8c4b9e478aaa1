"""A web API that sends jobs: `holdfast dev examples.orders:app`, `uvicorn examples.orders:api`."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from holdfast import Backoff, Context, Holdfast
from holdfast.web import Queue

app = Holdfast("orders")
api = FastAPI(lifespan=Queue(app).lifespan)


class Order(BaseModel):
    id: int
    cents: int


Ledger = dict[int, int]  # stands for your database


@app.resource
async def ledger() -> AsyncIterator[Ledger]:
    yield {}


@app.job(key="id", retry=Backoff.exponential(first="1s", last="1m", attempts=5), timeout="30s")
async def charge(ctx: Context, order: Order, books: Ledger = ledger.injected) -> str:
    await ctx.progress(0.5, "charging the card")
    books[order.id] = order.cents
    return f"receipt-{order.id}"


@app.cron("0 6 * * *", tz="Europe/Paris", catch_up="last")
async def report(books: Ledger = ledger.injected) -> int:
    return sum(books.values())


@api.post("/orders", status_code=202)
async def create(order: Order) -> dict[str, str]:
    run = await charge.enqueue(order)  # the same order again is the same run
    return {"run": run.id, "state": run.state}


@api.get("/progress/{run:path}")
async def progress(run: str) -> StreamingResponse:
    if not (await app.run(run).status()).known:
        raise HTTPException(404, f"no run {run}")

    async def lines() -> AsyncIterator[str]:
        while not (status := await app.run(run).status()).ended:
            yield f"data: {status.state} {status.progress.note if status.progress else ''}\n\n"
            await asyncio.sleep(0.2)
        yield f"data: {status.state} {status.error}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")
