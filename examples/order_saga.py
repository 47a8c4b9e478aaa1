"""An order as a saga: charge, pack, ship; whatever was done is undone when a later step fails.

holdfast dev order_saga:app          # in this directory
holdfast enqueue order '{"id": "o1", "card": "4242", "items": ["tea"]}'
"""

from __future__ import annotations

from holdfast import Backoff, Flow, Holdfast, current_step

app = Holdfast("saga")

ledger: list[str] = []
"""What happened, in the order in which it happened; a real shop has a database."""


async def charge(card: str, total: int) -> str:
    """Charge a card; the step's key keeps a repeat from charging twice."""
    ledger.append(f"charge {total} with {current_step().key.rpartition('.')[2]}")
    return f"payment-{card}"


async def refund(payment: str) -> None:
    """Give the money back."""
    ledger.append(f"refund {payment}")


async def reserve(items: list[str]) -> list[str]:
    """Reserve items in the warehouse."""
    if "unicorn" in items:
        raise ValueError("out of stock: unicorn")
    ledger.append(f"reserve {len(items)}")
    return items


async def release(items: list[str]) -> None:
    """Put them back."""
    ledger.append(f"release {len(items)}")


@app.job(retry=Backoff.exponential("1s", attempts=3))
async def ship(item: str) -> str:
    """Ship one item, on any worker."""
    ledger.append(f"ship {item}")
    return f"parcel of {item}"


@app.flow(key="id", timeout="30d")
async def order(ctx: Flow, id: str, card: str, items: list[str]) -> list[str]:
    """The whole order."""
    payment = await ctx.step(charge, card, 10 * len(items))
    ctx.undo(refund, payment)
    reserved = await ctx.step(reserve, items, retry=Backoff.never())
    ctx.undo(release, reserved)
    return await ctx.gather(ship.request(item) for item in reserved)
