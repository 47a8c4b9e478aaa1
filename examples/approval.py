"""A person decides: remind them after a day, give up after a week.

holdfast dev approval:app            # in this directory
holdfast enqueue expense '{"id": "e1", "amount": 120}'
holdfast flows signal decided e1 '{"approved": true}'
"""

from __future__ import annotations

from holdfast import Flow, Holdfast

app = Holdfast("approval")

mails: list[str] = []
"""What was sent; a real program sends mail."""


async def mail(text: str) -> None:
    """Send a mail."""
    mails.append(text)


@app.flow(key="id")
async def expense(ctx: Flow, id: str, amount: int) -> str:
    """Wait for a decision about an expense."""
    if amount < 50:
        return "paid"
    await ctx.step(mail, f"please decide about {id}: {amount}")
    decided = await ctx.event("decided", key=id, timeout="1d")
    if decided is None:
        await ctx.step(mail, f"reminder: {id} waits for you", name="remind")
        decided = await ctx.event("decided", key=id, timeout="6d")
    if decided is None:
        return "expired"
    return "paid" if decided.data["approved"] else f"rejected by {decided.by or 'somebody'}"
