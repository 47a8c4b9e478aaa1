"""A deployment of changed code while a thousand flows sleep: none is lost."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable

from holdfast import Flow, Holdfast
from holdfast.server import Server
from holdfast.status.flows import Flows
from tests.integration.support import client_of, until, working

SLEEPING = 1_000
KINDS = ("same", "guarded", "swapped", "typed")
STOPS = {
    "swapped": "operation 2: the journal has step 'weigh', and the code asks for step 'measure'",
    "typed": "operation 1",
}


async def as_text(kind: str) -> str:
    """What the first release stores."""
    return kind


async def as_number(kind: str) -> int:
    """A step whose stored result no longer fits."""
    return len(kind)


def release(server: Server, namespace: str, done: Counter[str], *, number: int) -> Holdfast:
    """The same flow as another release has it; the second one is wrong for half of the flows."""
    app = Holdfast("shop", nats_url=server.url, namespace=namespace)
    wrong = number == 2

    @app.flow
    async def parcel(ctx: Flow, kind: str, n: int) -> str:
        label = as_number if wrong and kind == "typed" else as_text
        await ctx.step(label, kind, name="label")
        if number > 1 and kind == "guarded" and ctx.changed("insured"):
            await ctx.step(as_text, kind, name="insure")
        moved = "measure" if wrong and kind == "swapped" else "weigh"
        await ctx.step(as_text, kind, name=moved)
        await ctx.event("go", key="all")
        done[kind] += 1
        return f"{kind} {n}"

    return app


async def test_changed_code_over_a_thousand_sleeping_flows(
    app: Holdfast, nats: Server, namespace: str, report: Callable[[str], None]
) -> None:
    """Those that fit go on, the others are listed with their reason and go on after a repair."""
    done: Counter[str] = Counter()
    first, wrong, right = (release(nats, namespace, done, number=n) for n in (1, 2, 3))
    flows = Flows(await client_of(app))
    async with app:
        async with working(first, concurrency=100):
            parcel = first.jobs["parcel"]
            requests = [parcel.request(kind=KINDS[n % 4], n=n) for n in range(SLEEPING)]
            runs = [run.id for run in await parcel.enqueue_many(requests)]

            async def asleep() -> bool:
                return len(await flows.list(state="parked", limit=sys.maxsize)) == SLEEPING

            await until(asleep, 60)
        await app.publish("go", key="all")
        async with working(wrong, concurrency=100):

            async def settled() -> bool:
                states = Counter(f.state for f in await flows.list(limit=sys.maxsize))
                return states == {"done": SLEEPING // 2, "stopped": SLEEPING // 2}

            await until(settled, 90)
        assert done == {"same": SLEEPING // 4, "guarded": SLEEPING // 4}
        stopped = await flows.list(state="stopped", limit=sys.maxsize)
        reasons = Counter(kind for kind, why in STOPS.items() for f in stopped if why in f.error)
        assert reasons == dict.fromkeys(STOPS, SLEEPING // 4), stopped[0].error
        async with working(right, concurrency=100):
            await asyncio.gather(*(flows.resume(f.run) for f in stopped))
            results = [await app.run(run).result(timeout=60) for run in runs]
        assert results == [f"{KINDS[n % 4]} {n}" for n in range(SLEEPING)]
        assert done == dict.fromkeys(KINDS, SLEEPING // 4)
        report(f"{SLEEPING} flows slept, {len(stopped)} were stopped by the new code, 0 lost")
