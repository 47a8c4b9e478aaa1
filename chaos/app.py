"""The app under test in a chaos run: two groups, a chain, failures, long runs and schedules.

A third group, `zoo`, has handlers that misbehave in every way we know, beside ordinary ones that
must not suffer from it.

Each handler logs that it started, works for a while, and logs its effect, under a mark that names
the operation. The log's directory is `HOLDFAST_CHAOS_DIR`, read when the first handler starts.
"""

from __future__ import annotations

import asyncio
import functools
import os
from typing import Any, Final

from chaos import flows, zoo
from chaos.effects import Effects
from chaos.limits import NARROW
from holdfast.app import Holdfast
from holdfast.context import Context, SyncContext
from holdfast.model.backoff import Backoff
from holdfast.model.limit import Limit

QUICK: Final = "quick"
STEADY: Final = "steady"
ZOO: Final = "zoo"
LINKED: Final = "chaos-linked"
ANNOUNCED: Final = "chaos-announced"
RETRY: Final = Backoff.list(["200ms", "500ms", "1s", "12s"] + ["1s"] * 40)
"""Short waits, and one that is long enough to become a scheduled message."""
LATER_SECONDS: Final = 2.0
INTERVALS: Final = (1, 2, 3, 5)
LARGE_BYTES: Final = 400_000
"""Too large for a message, so the result goes to the object store."""
ZOO_TIMEOUT_SECONDS: Final = 15.0
"""Longer than the loop is blocked, so that neighbours of the blocking run do not time out."""
LASTING: Final[dict[str, dict[str, Any]]] = {
    "blocks_the_loop": {"seconds": 3.0},
    "holds_the_interpreter": {"numbers": 10_000_000},
    "stays_in_its_thread": {"seconds": 30.0},
    "swallows_cancellation": {"seconds": 30.0},
    "forks": {"seconds": 20.0},
}
"""How long misbehaviour lasts: beyond two heartbeats, or far beyond the timeout and clean-up."""
ANIMALS: Final = {name: animal for name, animal in zoo.ZOO.items() if animal.fate != "crashed"}
"""Misbehaviour that neighbours must not notice; `poison` is separate, since it ends its process."""
POISON_CODE: Final = 77
"""The exit code that identifies a worker killed by `poison`."""


class MeantToFail(Exception):
    """A failure that a handler was asked for."""


effects = functools.cache(Effects.here)


def _begin(ctx: Context | SyncContext, mark: str) -> None:
    effects().write("start", mark, ctx.run, ctx.epoch, ctx.attempt)


async def _attempt(ctx: Context, mark: str, seconds: float) -> None:
    _begin(ctx, mark)
    await asyncio.sleep(seconds)


def _fail(ctx: Context | SyncContext, mark: str) -> None:
    """Log that the attempt fails, as intended."""
    effects().write("fail", mark, ctx.run, ctx.epoch, ctx.attempt)


def _apply(ctx: Context | SyncContext, mark: str) -> None:
    effects().write("effect", mark, ctx.run, ctx.epoch, ctx.attempt)


def make_app(nats_url: str | None = None, namespace: str | None = None) -> Holdfast:
    """The app, for workers and for senders."""
    app = Holdfast("chaos", nats_url=nats_url, namespace=namespace)
    _define_quick(app)
    _define_limited(app)
    _define_steady(app)
    flows.define(app, RETRY)
    _define_zoo(app)
    _define_schedules(app)
    return app


def _define_quick(app: Holdfast) -> None:
    @app.job(group=QUICK, retry=RETRY)
    async def touch(ctx: Context, mark: str, seconds: float) -> str:
        """One effect."""
        await _attempt(ctx, mark, seconds)
        _apply(ctx, mark)
        return mark

    @app.job(group=QUICK, retry=RETRY)
    async def flaky(ctx: Context, mark: str, failures: int) -> str:
        """Fails some times before its effect."""
        await _attempt(ctx, mark, 0.01)
        if ctx.attempt <= failures:
            _fail(ctx, mark)
            raise MeantToFail(f"attempt {ctx.attempt} of {failures} that fail")
        _apply(ctx, mark)
        return mark

    @app.job(group=QUICK, retry=RETRY)
    async def link(ctx: Context, mark: str) -> None:
        """The first link of a chain: publishes, then has its effect."""
        await _attempt(ctx, mark, 0.01)
        await ctx.publish(LINKED, {"mark": f"{mark}/next"})
        _apply(ctx, mark)

    @app.job(group=QUICK, retry=RETRY)
    async def put_off(ctx: Context, mark: str) -> None:
        """Enqueues a delayed part: a worker with a wrong clock must not get the time wrong."""
        await _attempt(ctx, mark, 0.01)
        later = f"{mark}/later"
        await touch.options(key=later, delay=LATER_SECONDS).enqueue(mark=later, seconds=0.01)
        _apply(ctx, mark)


def _define_limited(app: Holdfast) -> None:
    async def visit(ctx: Context, mark: str, seconds: float, failures: int) -> None:
        await _attempt(ctx, mark, seconds)
        if ctx.attempt <= failures:
            _fail(ctx, mark)
            raise MeantToFail(f"attempt {ctx.attempt} of {failures} that fail")
        _apply(ctx, mark)

    @app.job(group=QUICK, retry=RETRY, limits=[Limit(running=NARROW, per="lane")])
    async def narrow(ctx: Context, mark: str, lane: int, seconds: float, failures: int) -> None:
        """At most two of a key at the same time."""
        await visit(ctx, mark, seconds, failures)

    @app.job(
        name="sorted",
        group=QUICK,
        retry=RETRY,
        limits=[Limit(running=1, per="lane", ordered=True)],
    )
    async def in_order(ctx: Context, mark: str, lane: int, seconds: float, failures: int) -> None:
        """One of a key after the other, in the order of acceptance."""
        await visit(ctx, mark, seconds, failures)

    @app.job(group=QUICK, retry=RETRY, limits=[Limit(starts="5/s", burst=2)])
    async def paced(ctx: Context, mark: str, lane: int, seconds: float, failures: int) -> None:
        """At most five starts a second."""
        await visit(ctx, mark, seconds, failures)


def _define_steady(app: Holdfast) -> None:
    @app.job(group=STEADY, retry=RETRY, on=LINKED)
    async def follow(ctx: Context, mark: str) -> None:
        """The second link of a chain."""
        await _attempt(ctx, mark, 0.01)
        _apply(ctx, mark)

    @app.job(group=STEADY, retry=RETRY, on=ANNOUNCED)
    async def hear(ctx: Context, mark: str) -> None:
        """An event from outside."""
        await _attempt(ctx, mark, 0.01)
        _apply(ctx, mark)

    @app.job(group=STEADY, delivery="at_most_once")
    async def once(ctx: Context, mark: str, seconds: float) -> None:
        """Never starts twice; its outcome is recorded in any case."""
        await _attempt(ctx, mark, seconds)
        _apply(ctx, mark)

    @app.job(group=STEADY, retry=RETRY)
    async def long(ctx: Context, mark: str, seconds: float) -> str:
        """Outlasts most timeouts."""
        await _attempt(ctx, mark, seconds)
        _apply(ctx, mark)
        return mark

    @app.job(group=STEADY, retry=RETRY)
    async def bulky(ctx: Context, mark: str, seconds: float) -> dict[str, Any]:
        """Returns a result stored apart from its record, naming the attempt that wrote it."""
        await _attempt(ctx, mark, seconds)
        _apply(ctx, mark)
        return {"mark": mark, "epoch": ctx.epoch, "filler": "x" * LARGE_BYTES}

    @app.job(group=STEADY, retry=RETRY)
    def compute(ctx: SyncContext, mark: str, seconds: float) -> None:
        """A synchronous function that uses CPU time."""
        _begin(ctx, mark)
        zoo.computes(_unheard, seconds)
        _apply(ctx, mark)


def _unheard(_: str) -> None:
    """Ignores an animal's notes: the effects already record them."""


def _misbehaves(ctx: Context | SyncContext, mark: str, how: str) -> bool:
    """Log the start; return whether to misbehave now: always if it succeeds, else only at first."""
    _begin(ctx, mark)
    if ANIMALS[how].fate == "done":
        return True
    if ctx.attempt == 1:
        _fail(ctx, mark)
    return ctx.attempt == 1


def _define_zoo(app: Holdfast) -> None:
    @app.job(group=ZOO, retry=RETRY)
    async def beside(ctx: Context, mark: str, seconds: float) -> None:
        """An ordinary run beside those that misbehave."""
        await _attempt(ctx, mark, seconds)
        _apply(ctx, mark)

    @app.job(group=ZOO, retry=RETRY, timeout=ZOO_TIMEOUT_SECONDS)
    async def misbehave(ctx: Context, mark: str, how: str) -> None:
        """Misbehaves at first; if that fails the attempt, the second one has the effect."""
        if _misbehaves(ctx, mark, how):
            await ANIMALS[how].handler(_unheard, **LASTING.get(how, {}))
        if ctx.attempt > 1 or ANIMALS[how].fate == "done":
            _apply(ctx, mark)

    @app.job(group=ZOO, retry=RETRY, timeout=ZOO_TIMEOUT_SECONDS)
    def misbehave_plainly(ctx: SyncContext, mark: str, how: str) -> None:
        """The same for a synchronous function."""
        if _misbehaves(ctx, mark, how):
            ANIMALS[how].handler(_unheard, **LASTING.get(how, {}))
        if ctx.attempt > 1 or ANIMALS[how].fate == "done":
            _apply(ctx, mark)

    @app.job(group=ZOO, retry=RETRY)
    async def poison(ctx: Context, mark: str) -> None:
        """Takes its process down whenever it starts."""
        await _attempt(ctx, mark, 0.2)
        os._exit(POISON_CODE)


def schedule_name(interval: int) -> str:
    """The schedule with slots this many seconds apart."""
    return f"tick{interval}"


def slot_mark(run: str) -> str:
    """The mark of a slot, derived from its run id."""
    return f"slot {run}"


def _define_schedules(app: Holdfast) -> None:
    async def tick(ctx: Context) -> None:
        mark = slot_mark(ctx.run)
        await _attempt(ctx, mark, 0.01)
        _apply(ctx, mark)

    for interval in INTERVALS:
        define = app.every(interval, name=schedule_name(interval), group=QUICK, limit=10_000)
        define(tick)


app = make_app()
