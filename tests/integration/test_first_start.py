"""The first start of an app: nothing is published before everybody who subscribes is there."""

from __future__ import annotations

from holdfast import Context, Holdfast
from tests.integration.support import Seen, working

SUBSCRIBERS = 25


async def test_first_start_loses_no_event(app: Holdfast, seen: Seen) -> None:
    """A run that waited for the first worker publishes at once; every subscriber gets it."""

    @app.job
    async def announce(ctx: Context) -> None:
        await ctx.publish("news", {})

    def subscriber(number: int) -> None:
        async def hear(data: dict[str, int]) -> None:
            seen.append(number)

        app.job(name=f"hear-{number}", on="news")(hear)

    for number in range(SUBSCRIBERS):
        subscriber(number)
    async with app:
        await announce.enqueue()
    async with working(app):
        await seen.wait(SUBSCRIBERS, 20)
    assert sorted(seen) == list(range(SUBSCRIBERS))
