"""A small shop: `holdfast dev shop:app` in this directory runs it, `holdfast demo` shows it.

holdfast enqueue charge '{"id": 1, "item": "lamp", "cents": 4900}' --key order-1 --wait
"""

from __future__ import annotations

import asyncio
import random
import time

from pydantic import BaseModel

from holdfast import Backoff, Context, Discard, Holdfast, Limit

app = Holdfast("shop")


class Order(BaseModel):
    """What a customer bought."""

    id: int
    item: str
    cents: int


@app.job(retry=Backoff.list(["500ms", "1s", "2s", "4s"]), timeout="10s")
async def charge(ctx: Context, order: Order) -> str:
    """Take the money. The bank is away now and then: the run fails and is tried again."""
    await asyncio.sleep(random.uniform(0.1, 0.4))
    if random.random() < 0.15:
        raise ConnectionError("the bank does not answer")
    # `ctx.run` is the same in every attempt: the bank would refuse to take the money twice.
    receipt = f"receipt for {ctx.run}"
    await ctx.publish("order-paid", {"order": order.id, "item": order.item})
    return receipt


@app.job(on="order-paid")
async def ship(ctx: Context, order: int, item: str) -> None:
    """Every job that subscribes to an event gets each one."""
    await asyncio.sleep(random.uniform(0.5, 1.5))
    ctx.logger.info("order %d: %s is on its way", order, item)


@app.job(on="order-paid")
def invoice(order: int, item: str) -> str:
    """A plain function runs in a thread; it may block."""
    time.sleep(0.1)
    return f"invoice {order}: one {item}"


@app.job
async def remind(customer: str) -> None:
    """Sent with a delay: `await remind.enqueue("ann", delay="3s")`."""
    if customer == "bob":
        raise Discard("bob does not want to be reminded")


@app.job(retry=Backoff.list(["300ms", "300ms"]))
async def stock(page: int) -> int:
    """Page 13 is broken for good: after three attempts it is a dead letter for a person."""
    await asyncio.sleep(0.2)
    if page == 13:
        raise ValueError(f"page {page} cannot be read")
    return page


@app.every("10s", overlap="skip")
async def restock() -> int:
    """A schedule: each instant fires once, whichever scheduler is alive."""
    return random.randrange(5)


@app.job(timeout="1m", limits=[Limit(running=2)])
async def report(ctx: Context, day: str) -> str:
    """Takes a while, and runs twice at the same time at most: others wait for a place."""
    for step in range(20):
        await ctx.progress(step / 20)
        await asyncio.sleep(0.25)
    return f"report of {day}"
