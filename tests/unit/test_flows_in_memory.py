"""Flows in memory: the same engine as in a worker, with a clock that jumps."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import Backoff, Context, Flow, Holdfast, Limit, current_step
from holdfast.errors import DefinitionError, InvalidInput, RunError, RunFailed, StepFailed
from holdfast.testing import memory

DAY = 86_400.0


def shop() -> tuple[Holdfast, list[str]]:
    """An app and the log of its effects."""
    return Holdfast("shop"), []


async def test_flow_runs_its_steps_once_each_and_returns() -> None:
    """A flow of plain and async steps ends with its result."""
    app, effects = shop()

    def add(a: int, b: int) -> int:
        effects.append("add")
        return a + b

    async def double(a: int) -> int:
        effects.append("double")
        return 2 * a

    @app.flow
    async def calculate(ctx: Flow, a: int, b: int) -> int:
        return await ctx.step(double, await ctx.step(add, a, b))

    async with memory(app):
        run = await calculate.enqueue(1, 2)
        assert await run.result() == 6
        assert effects == ["add", "double"]
        assert (await run.status()).state == "done"


async def test_flow_sleeps_days_without_holding_anything() -> None:
    """A sleep parks the flow; steps before it are not repeated."""
    app, effects = shop()

    @app.flow
    async def remind(ctx: Flow, days: int) -> list[str]:
        await ctx.step(effects.append, "first", name="first")
        await ctx.sleep(days * DAY)
        await ctx.step(effects.append, "second", name="second")
        return effects

    async with memory(app) as mem:
        run = await remind.enqueue(30)
        await mem.drain()
        status = await run.status()
        assert (status.state, effects) == ("parked", ["first"])
        assert status.record is not None
        assert status.record.waits.startswith("until 2026-01-31")
        await mem.advance("29d")
        assert effects == ["first"]
        await mem.advance("1d")
        assert await run.result() == ["first", "second"]


async def test_gather_runs_children_anywhere_and_returns_their_results_in_order() -> None:
    """Children are ordinary runs of jobs and flows."""
    app, _ = shop()

    @app.job
    async def square(n: int) -> int:
        return n * n

    @app.flow
    async def cube(ctx: Flow, n: int) -> int:
        return n * await ctx.call(square.request(n))

    @app.flow
    async def total(ctx: Flow, upto: int) -> list[int]:
        squares = await ctx.gather(square.request(i) for i in range(upto))
        cubes = await ctx.gather(cube.request(i) for i in range(upto))
        return [*squares, *cubes]

    async with memory(app) as mem:
        run = await total.enqueue(5)
        await mem.drain()
        assert await run.result() == [0, 1, 4, 9, 16, 0, 1, 8, 27, 64]


async def test_failed_child_fails_its_flow_and_settled_reports_it() -> None:
    """`gather` raises the first failure; `settled=True` says how each ended."""
    app, _ = shop()

    @app.job(retry=Backoff.never())
    async def picky(n: int) -> int:
        if n == 1:
            raise ValueError("not one")
        return n

    @app.flow
    async def strict(ctx: Flow) -> list[int]:
        return await ctx.gather(picky.request(i) for i in range(3))

    @app.flow
    async def lenient(ctx: Flow) -> list[str]:
        ends = await ctx.gather((picky.request(i) for i in range(3)), settled=True)
        return [f"{one.state} {one.result}" for one in ends]

    async with memory(app) as mem:
        first, second = await strict.enqueue(), await lenient.enqueue()
        await mem.drain()
        assert await second.result() == ["done 0", "dead None", "done 2"]
        with pytest.raises(RunFailed, match="ValueError: not one"):
            await first.result()


async def test_step_is_retried_by_its_policy_and_then_fails_the_same_in_every_replay() -> None:
    """Attempts are stored, so a crash does not start them again from one."""
    app, effects = shop()

    def flaky() -> None:
        effects.append(f"try {current_step().attempt}")
        raise OSError("down")

    @app.flow
    async def patient(ctx: Flow) -> str:
        try:
            await ctx.step(flaky, retry=Backoff.exponential("1m", attempts=3, jitter=0))
        except StepFailed as error:
            await ctx.sleep("1h")
            return f"{error.step}: {error.error}"
        return "never"

    async with memory(app) as mem:
        run = await patient.enqueue()
        await mem.advance("2h")
        assert await run.result() == "flaky: OSError: down"
        assert effects == ["try 1", "try 2", "try 3"]


@pytest.mark.parametrize("at", ["before", "called", "after"])
async def test_crash_around_a_step_repeats_at_most_that_step(at: Any) -> None:
    """Only a step that ran and was not stored runs again, under the same key, a higher epoch."""
    app, _ = shop()
    seen: list[tuple[str, str, int]] = []

    def effect(name: str) -> str:
        step = current_step()
        seen.append((name, step.key, step.epoch))
        return name

    @app.flow
    async def three(ctx: Flow) -> list[str]:
        return [await ctx.step(effect, name, name=name) for name in ("a", "b", "c")]

    async with memory(app) as mem:
        mem.crash_step("b", at=at)
        run = await three.enqueue()
        await mem.drain()
        assert await run.result() == ["a", "b", "c"]
    names = [name for name, _, _ in seen]
    if at == "called":
        assert names == ["a", "b", "b", "c"]
        assert seen[1][1] == seen[2][1]
        assert seen[1][2] < seen[2][2]
    else:
        assert names == ["a", "b", "c"]


async def test_event_wakes_the_flow_that_waits_for_its_key() -> None:
    """Only the right key, with its data and who sent it."""
    app, _ = shop()

    @app.flow
    async def approve(ctx: Flow, order: str) -> str:
        found = await ctx.event("approved", key=order, timeout="1d")
        return f"{found.data['ok']} by {found.by}" if found else "timeout"

    async with memory(app) as mem:
        run = await approve.enqueue("o1")
        await mem.drain()
        await app.publish("approved", {"ok": False}, key="o2")
        await mem.drain()
        assert (await run.status()).state == "parked"
        await app.publish("approved", {"ok": True}, key="o1", by="ann")
        assert await run.result() == "True by ann"
        late = await approve.enqueue("o3")
        await mem.advance("1d")
        assert await late.result() == "timeout"


async def test_event_that_came_before_the_wait_counts_once() -> None:
    """The newest since the flow was sent; one that was received is not received again."""
    app, _ = shop()

    @app.flow
    async def listen(ctx: Flow) -> list[Any]:
        await ctx.sleep("1h")
        first = await ctx.event("tick", key="k", timeout="1h")
        second = await ctx.event("tick", key="k", timeout="1h")
        return [first and first.data, second and second.data]

    async with memory(app) as mem:
        await app.publish("tick", 0, key="k")
        await mem.advance("1m")
        run = await listen.enqueue()
        await mem.drain()
        await app.publish("tick", 1, key="k")
        await app.publish("tick", 2, key="k")
        await mem.advance("3h")
        assert await run.result() == [2, None]


async def test_undo_compensates_in_reverse_order_when_the_flow_fails() -> None:
    """What was done is undone, the last first, and the flow ends with its own error."""
    app, effects = shop()

    @app.flow
    async def saga(ctx: Flow) -> None:
        for name in ("flight", "hotel"):
            await ctx.step(effects.append, f"book {name}", name=f"book {name}")
            ctx.undo(effects.append, f"cancel {name}")
        raise ValueError("no car")

    async with memory(app) as mem:
        run = await saga.enqueue()
        await mem.drain()
        with pytest.raises(RunFailed, match="no car"):
            await run.result()
        assert effects == ["book flight", "book hotel", "cancel hotel", "cancel flight"]
        assert [letter.reason for letter in mem.dead] == ["failed"]


async def test_cancel_reaches_children_and_undoes() -> None:
    """A parked flow that is cancelled stops its children, then compensates."""
    app, effects = shop()

    @app.job
    async def slow(n: int) -> None:
        effects.append(f"child {n}")

    @app.flow
    async def inner(ctx: Flow) -> None:
        ctx.undo(effects.append, "inner undone")
        await ctx.sleep("10d")

    @app.flow
    async def outer(ctx: Flow) -> None:
        ctx.undo(effects.append, "outer undone")
        await ctx.gather([inner.request(), slow.options(delay="1d").request(1)])

    async with memory(app) as mem:
        run = await outer.enqueue()
        await mem.drain()
        assert await run.cancel()
        await mem.advance("20d")
        assert effects == ["inner undone", "outer undone"]
        assert (await run.status()).state == "cancelled"


async def test_deadline_ends_a_flow_that_waits() -> None:
    """`timeout` of a flow counts its waits, and compensates."""
    app, effects = shop()

    @app.flow(timeout="2d")
    async def endless(ctx: Flow) -> None:
        ctx.undo(effects.append, "undone")
        await ctx.event("never", key="k")

    async with memory(app) as mem:
        run = await endless.enqueue()
        await mem.advance("3d")
        with pytest.raises(RunFailed, match="longer than 2d"):
            await run.result()
        assert effects == ["undone"]
        assert mem.dead[0].reason == "timeout"


async def test_values_are_the_same_in_every_replay() -> None:
    """Time, UUIDs and random numbers are stored."""
    app, _ = shop()
    seen: list[tuple[str, str, float]] = []

    @app.flow
    async def draw(ctx: Flow) -> None:
        seen.append((ctx.now().isoformat(), str(ctx.uuid()), ctx.random()))
        await ctx.sleep("1d")
        await ctx.sleep("1d")

    async with memory(app) as mem:
        run = await draw.enqueue()
        await mem.advance("3d")
        await run.result()
        assert len(seen) == 3
        assert len(set(seen)) == 1


async def test_changed_code_stops_the_flow_with_a_sentence_and_continues_after_a_repair() -> None:
    """Nothing is lost: the flow waits for code that fits its journal."""
    app, effects = shop()
    order = ["charge", "ship"]

    @app.flow
    async def deliver(ctx: Flow) -> str:
        for name in order:
            await ctx.step(effects.append, name, name=name)
            await ctx.sleep("1d")
        return "ok"

    async with memory(app) as mem:
        run = await deliver.enqueue()
        await mem.drain()
        order[:] = ["invoice", "ship"]
        await mem.advance("2d")
        status = await run.status()
        assert status.state == "parked"
        assert (
            "operation 1: the journal has step 'charge', and the code asks for step 'invoice'"
            in (status.error)
        )
        order[:] = ["charge", "ship"]
        await mem.advance("2d")
        assert await run.result() == "ok"
        assert effects == ["charge", "ship"]


async def test_step_that_was_removed_is_a_mismatch_too() -> None:
    """A function that ends before its journal does has lost an operation."""
    app, _ = shop()
    steps = ["a", "b"]

    @app.flow
    async def shrink(ctx: Flow) -> None:
        for name in steps:
            await ctx.step(len, name, name=name)
        if steps == ["a", "b"]:
            await ctx.sleep("1d")

    async with memory(app) as mem:
        run = await shrink.enqueue()
        await mem.drain()
        steps.pop()
        await mem.advance("2d")
        assert "the code ends without asking for it" in (await run.status()).error


async def test_deliberate_change_applies_to_flows_that_have_not_passed_it() -> None:
    """`ctx.changed` keeps old flows on the old code."""
    app, effects = shop()
    new = False

    @app.flow
    async def taxed(ctx: Flow, name: str) -> str:
        await ctx.step(effects.append, name, name="begin")
        if name == "early":
            await ctx.sleep("1d")
        rate = "new" if new and ctx.changed("new-tax") else "old"
        await ctx.step(effects.append, f"{name} {rate}", name=f"tax {rate}")
        await ctx.sleep("1d")
        return rate

    async with memory(app) as mem:
        late, early = await taxed.enqueue("late"), await taxed.enqueue("early")
        await mem.drain()
        new = True
        await mem.advance("3d")
        assert (await late.result(), await early.result()) == ("old", "new")


async def test_mismatch_that_the_code_catches_still_stops_the_flow() -> None:
    """`except Exception` cannot carry a flow past its journal."""
    app, effects = shop()
    name = "old"

    @app.flow
    async def careless(ctx: Flow) -> str:
        try:
            await ctx.step(effects.append, name, name=name)
        except Exception:  # noqa: BLE001 - what a careless user writes
            effects.append("caught")
        await ctx.sleep("1d")
        return "end"

    async with memory(app) as mem:
        run = await careless.enqueue()
        await mem.drain()
        name = "new"
        await mem.advance("2d")
        assert (await run.status()).state == "parked"
        name = "old"
        await mem.advance("1d")
        assert await run.result() == "end"


async def test_sending_from_the_function_itself_is_refused_with_the_remedy() -> None:
    """A replay would send again; a step may send."""
    app, _ = shop()

    @app.job
    async def job() -> None: ...

    async def send() -> str:
        return (await job.options(key="k").enqueue()).id

    @app.flow
    async def sender(ctx: Flow) -> list[str]:
        with pytest.raises(InvalidInput, match=r"ctx\.start"):
            await job.enqueue()
        return [await ctx.step(send), await ctx.start(job.request())]

    async with memory(app) as mem:
        run = await sender.enqueue()
        await mem.drain()
        ids = await run.result()
        assert ids[0] == "job/k"
        assert ids[1].startswith("job/=c")


async def test_crash_anywhere_ends_the_flow_the_same() -> None:
    """The process dies at the start and the end of every call of the function."""
    app, effects = shop()

    @app.job
    async def child(n: int) -> int:
        return n

    @app.flow
    async def story(ctx: Flow) -> int:
        await ctx.step(effects.append, "a", name="a")
        await ctx.sleep("1h")
        return sum(await ctx.gather(child.request(i) for i in range(3)))

    async with memory(app) as mem:
        mem.crash_next(story, at="start")
        run = await story.enqueue()
        await mem.drain()
        mem.crash_next(story, at="end")
        mem.crash_next(child, times=2)
        await mem.advance("2h")
        assert await run.result() == 3
        assert effects == ["a"]


def test_flow_needs_async_and_a_context() -> None:
    """A definition that cannot work is refused."""
    app = Holdfast("shop")

    def plain(ctx: Flow) -> None: ...

    async def without() -> None: ...

    for func in (plain, without):
        with pytest.raises(DefinitionError, match="async def"):
            app.flow(func)  # type: ignore[arg-type]
    with pytest.raises(DefinitionError, match="no option 'retry'"):
        app.flow(retry=None)  # type: ignore[call-overload]


async def test_operations_at_the_same_time_are_refused() -> None:
    """Their order could differ between replays."""
    import asyncio

    app, _ = shop()

    async def wait() -> None:
        await asyncio.sleep(0.01)

    @app.flow
    async def greedy(ctx: Flow) -> None:
        await asyncio.gather(ctx.step(wait, name="a"), ctx.step(wait, name="b"))

    async with memory(app) as mem:
        run = await greedy.enqueue()
        await mem.drain()
        with pytest.raises(RunFailed, match="one operation at a time"):
            await run.result()


async def test_schedule_key_and_event_start_flows() -> None:
    """A flow is sent like a job."""
    app, effects = shop()

    @app.flow(on="order.paid", key="order", limits=[Limit(running=1)])
    async def ship(ctx: Flow, order: str) -> str:
        await ctx.step(effects.append, order, name="ship")
        await ctx.sleep("1d")
        return order

    async with memory(app) as mem:
        run = await ship.enqueue("o1")
        again = await ship.enqueue("o1")
        await app.publish("order.paid", {"order": "o2"})
        await mem.advance("2d")
        assert await run.result() == await again.result() == "o1"
        assert effects == ["o1", "o2"]


async def test_batch_runs_all_and_then_one_more() -> None:
    """However its runs ended, the last one gets what became of them."""
    app, effects = shop()

    @app.job(retry=Backoff.never())
    async def resize(n: int) -> int:
        if n == 2:
            raise ValueError("no image")
        return n * 10

    @app.job
    async def report(end: dict[str, Any], title: str = "none") -> str:
        effects.append(f"{title}: {end['done']} of {end['total']}, {end['results']}")
        return effects[-1]

    app.built_in_flows()
    async with memory(app) as mem:
        last = report.link(title="images")
        run = await app.batch([resize.request(n) for n in (1, 2, 3)], then=last)
        alone = await app.batch([resize.request(4)])
        await mem.drain()
        assert await run.result() == "images: 2 of 3, [10, None, 30]"
        assert (await alone.result())["results"] == [40]


async def test_chain_passes_each_result_on() -> None:
    """A link gets the result of the one before, beside its own arguments."""
    app, _ = shop()

    @app.job
    async def download(url: str) -> str:
        return f"image of {url}"

    @app.job
    async def resize(image: str, width: int) -> str:
        return f"{image} at {width}"

    @app.job
    async def upload(image: str) -> str:
        return f"stored {image}"

    with pytest.raises(InvalidInput, match="built_in_flows"):
        await app.chain(download.request("x"))
    app.built_in_flows()
    async with memory(app) as mem:
        run = await app.chain(download.request("x"), resize.link(width=200), upload.link())
        await mem.drain()
        assert await run.result() == "stored image of x at 200"


async def test_waiting_for_a_run_says_what_is_due() -> None:
    """In memory a parked flow needs `advance`."""
    app, _ = shop()

    @app.flow
    async def wait(ctx: Flow) -> None:
        await ctx.sleep("1d")

    async with memory(app):
        run = await wait.enqueue()
        with pytest.raises(RunError, match="advance"):
            await run.result()


async def test_context_of_a_flow_is_a_context() -> None:
    """Run, epoch and progress are there."""
    app, _ = shop()

    @app.flow
    async def known(ctx: Flow) -> bool:
        await ctx.progress(0.5, "half")
        seen: object = ctx
        return isinstance(seen, Context) and bool(ctx.run) and ctx.epoch > 0

    async with memory(app):
        run = await known.enqueue()
        assert await run.result() is True
