"""Flows in memory: the same engine as in a worker, with a clock that jumps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast import Backoff, Context, Flow, Holdfast, Limit, current_step
from holdfast.config import WorkerConfig
from holdfast.errors import (
    DefinitionError,
    FlowMismatch,
    InvalidInput,
    RunError,
    RunFailed,
    StepFailed,
)
from holdfast.testing import memory, replay_flow
from holdfast.worker import flow_steps

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


async def test_key_that_is_used_again_gets_new_children_and_new_step_keys() -> None:
    """Nothing of the first life reaches the second one, though both have the same id."""
    app, _ = shop()
    keys: list[str] = []
    factor = 1

    @app.job
    async def times(n: int) -> int:
        return factor * n

    @app.flow
    async def multiply(ctx: Flow) -> list[int]:
        await ctx.step(lambda: keys.append(current_step().key), name="effect")
        return await ctx.gather(times.request(n) for n in (1, 2))

    async with memory(app) as mem:
        for factor in (1, 2):
            run = await multiply.options(key="k", on_duplicate="replace").enqueue()
            await mem.drain()
            assert await run.result() == [factor, 2 * factor]
        await mem.advance("60d")
        factor = 3
        again = await multiply.options(key="k").enqueue()  # the old journal is still there
        await mem.advance("1s")
        assert await again.result() == [3, 6]
    assert len(set(keys)) == 3


@pytest.mark.parametrize("at", ["before", "called", "after"])
@pytest.mark.parametrize("key", [None, "k"])
async def test_step_key_survives_a_crash_before_anything_is_stored(at: Any, key: Any) -> None:
    """The first step of a flow, too: its journal begins with its result."""
    app, _ = shop()
    keys: list[str] = []

    def effect() -> None:
        keys.append(current_step().key)

    @app.flow
    async def one(ctx: Flow) -> None:
        await ctx.step(effect)

    async with memory(app) as mem:
        mem.crash_step("effect", at=at)
        run = await one.options(key=key).enqueue()
        await mem.drain()
        assert (await run.status()).state == "done"
    assert len(set(keys)) == 1


async def test_replay_after_undo_gives_every_step_a_new_key_and_asks_children_again() -> None:
    """A provider would answer the old key with the payment that was refunded."""
    app, _ = shop()
    keys: list[str] = []
    broken = True

    def charge() -> None:
        keys.append(current_step().key)

    @app.job(retry=Backoff.never())
    async def pack() -> str:
        if broken:
            raise ValueError("no box")
        return "packed"

    @app.flow
    async def order(ctx: Flow) -> str:
        await ctx.step(charge)
        ctx.undo(charge)
        return await ctx.call(pack.request())

    async with memory(app) as mem:
        run = await order.enqueue()
        await mem.drain()
        assert (await run.status()).state == "dead"
        broken = False
        await run.retry()
        await mem.drain()
        assert await run.result() == "packed"
    charged, refunded, charged_again = keys
    assert len({charged, refunded, charged_again}) == 3


class Small(msgspec.Struct):
    """A value as the code knew it when the flow began."""

    n: int


class Grown(msgspec.Struct):
    """The same after a release that added a member without a default."""

    n: int
    colour: str


class Tolerant(msgspec.Struct):
    """The repair."""

    n: int
    colour: str = "grey"


@pytest.mark.parametrize("where", ["input", "step", "child", "event"])
async def test_type_that_no_longer_fits_stops_a_flow_and_keeps_it(where: str) -> None:
    """Whatever is stored in a form that the new code cannot read; nothing is undone."""
    app, effects = shop()
    kind: Any = Small

    def compute() -> Any:
        return Small(1)

    @app.job
    async def child() -> Any:
        return Small(1)

    async def body(ctx: Flow, given: Any) -> int:
        ctx.undo(effects.append, "undone")
        compute.__annotations__["return"] = kind if where == "step" else Any
        flow_steps._annotated.cache_clear()
        found = await ctx.step(compute)
        child.signature.returns = kind if where == "child" else Any
        await ctx.call(child.request())
        await ctx.event("e", key="k", type=kind if where == "event" else Any)
        await ctx.sleep("1d")
        return int(found.n if where == "step" else 1)

    def release(version: type[Any]) -> tuple[Holdfast, Any]:
        nonlocal kind
        kind = version

        async def flow(ctx: Flow, given: Any) -> int:
            return await body(ctx, given)

        flow.__annotations__["given"] = version if where == "input" else Any
        flow.__annotations__["ctx"] = Flow
        app.jobs.pop("flow", None)
        return app, app.flow(flow)

    _, flow = release(Small)
    async with memory(app) as mem:
        run = await flow.enqueue({"n": 1})
        await mem.drain()
        await app.publish("e", {"n": 1}, key="k")
        await mem.drain()
        stored = mem.journal(run.id)
        _, grown = release(Grown)
        await mem.advance("1d")
        status = await run.status()
        assert (status.state, effects) == ("parked", []), status
        assert "no longer fits" in status.error
        assert "resume the flow" in status.error
        with pytest.raises(FlowMismatch, match="no longer fits"):
            await replay_flow(grown, stored)
        release(Tolerant)
        await mem.advance("2h")
        assert await run.result() == 1


async def test_replayed_journal_raises_if_the_code_fails_on_its_way() -> None:
    """An exception before the frontier would end the flow, with or without compensations."""
    app, effects = shop()
    fails = False

    @app.flow
    async def flow(ctx: Flow, undo: bool) -> None:
        if undo:
            ctx.undo(effects.append, "undone")
        await ctx.step(len, "x")
        if fails:
            raise TypeError("new code")
        await ctx.sleep("1d")

    async with memory(app) as mem:
        runs = [await flow.enqueue(undo) for undo in (False, True)]
        await mem.drain()
        stored = [mem.journal(run.id) for run in runs]
    fails = True
    for journal in stored:
        with pytest.raises(FlowMismatch, match="TypeError: new code"):
            await replay_flow(flow, journal)
    assert effects == []


async def test_result_that_its_own_annotation_refuses_fails_the_step() -> None:
    """At its first call as in every replay: the code has not changed."""
    app, _ = shop()

    def wrong() -> int:
        return "text"  # type: ignore[return-value]

    @app.flow
    async def flow(ctx: Flow) -> str:
        try:
            await ctx.step(wrong)
        except StepFailed as error:
            await ctx.sleep("1d")
            return error.step
        return "never"

    async with memory(app) as mem:
        run = await flow.enqueue()
        await mem.advance("2d")
        assert await run.result() == "wrong"


async def test_event_with_wrong_data_fails_the_flow_the_same_in_every_replay() -> None:
    """Anybody may publish it, so it is no change of the code."""
    app, _ = shop()

    @app.flow
    async def flow(ctx: Flow) -> str:
        try:
            await ctx.event("e", key="k", type=Small)
        except InvalidInput:
            await ctx.sleep("1d")
            return "refused"
        return "never"

    async with memory(app) as mem:
        run = await flow.enqueue()
        await mem.drain()
        await app.publish("e", "no object", key="k")
        await mem.advance("2d")
        assert await run.result() == "refused"


async def test_changed_may_be_removed_from_the_code() -> None:
    """Alone, before another operation, beside another change, and at the end of the function."""
    app, effects = shop()
    names = ["one", "two"]

    @app.flow
    async def flow(ctx: Flow) -> None:
        for name in names:
            if ctx.changed(name):
                effects.append(name)
        await ctx.sleep("1d")
        if names:
            ctx.changed("three")

    async with memory(app) as mem:
        runs = [await flow.enqueue() for _ in range(2)]
        await mem.drain()
        names, seen = ["two"], len(effects)
        stored = mem.journal(runs[0].id)
        assert (await replay_flow(flow, stored)).startswith("until ")
        assert effects[seen:] == ["two"]
        names = []
        await mem.advance("1d")
        for run in runs:
            assert (await run.status()).state == "done"


async def test_large_result_that_is_gone_stops_the_flow_without_a_busy_loop() -> None:
    """A broker error that would repeat is a reason to stop; the flow is called now and then."""
    app, _ = shop()
    calls = 0

    def large() -> str:
        return "x" * 500_000

    @app.flow
    async def flow(ctx: Flow) -> int:
        nonlocal calls
        calls += 1
        found = await ctx.step(large)
        await ctx.sleep("1d")
        return len(found)

    async with memory(app) as mem:
        run = await flow.enqueue()
        await mem.drain()
        objects = mem._outbox.objects
        (name,) = objects
        kept = objects.pop(name)
        await mem.advance("1d")
        status = await run.status()
        assert status.state == "parked"
        assert "does not exist" in status.error
        await mem.advance("12h")
        assert calls < 40
        objects[name] = kept
        await mem.advance("2h")
        assert await run.result() == 500_000
        assert name not in objects, "its flow has ended"


async def test_flow_that_is_given_up_stops_its_children_and_folds_its_journal() -> None:
    """Its workers died again and again: nothing of it waits or runs on."""
    app, effects = shop()

    @app.job
    async def child() -> None:
        effects.append("child")

    @app.flow
    async def flow(ctx: Flow) -> None:
        await ctx.gather([child.options(delay="30d").request()])

    async with memory(app, worker=WorkerConfig(crash_limit=1)) as mem:
        run = await flow.enqueue()
        await mem.drain()
        mem.crash_next(flow, at="start", times=5)
        await mem.journals.wake("default", "flow", run.id, "early")
        await mem.drain()
        assert (await run.status()).state == "dead"
        await mem.advance("40d")
        assert effects == []
        assert (await mem.journals.load(run.id)).end is not None


async def test_cancel_that_comes_too_late_does_not_cancel_a_replay() -> None:
    """The flow has ended meanwhile; its cancellation is forgotten."""
    app, _ = shop()
    fails = True

    @app.flow
    async def flow(ctx: Flow) -> str:
        await ctx.step(len, "x")
        if fails:
            raise ValueError("broken")
        return "done"

    async with memory(app) as mem:
        run = await flow.enqueue()
        await mem.drain()
        await mem.journals.stop(run.id, "cancelled")
        await mem.journals.wake("default", "flow", run.id, "x1")
        await mem.drain()
        fails = False
        await run.retry()
        await mem.drain()
        assert await run.result() == "done"
