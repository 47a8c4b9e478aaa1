"""Payloads in, results out: what a handler is given and what its caller gets back."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, TypedDict
from uuid import UUID

import pydantic
import pytest

from holdfast import Backoff, Context, Holdfast, SyncContext
from holdfast.errors import InvalidPayload, ResultTimeout, RunFailed, UnknownJob
from tests.integration.support import Seen, dead_letter, metric, record_of, until, working


class Image(pydantic.BaseModel):
    id: int
    name: str = "none"


@dataclass
class Size:
    width: int
    height: int = 1


class Place(TypedDict):
    city: str


class Colour(Enum):
    RED = "red"


@dataclass
class Mixed:
    """A bit of everything that JSON has no word for."""

    at: datetime
    on: date
    id: UUID
    price: Decimal
    colour: Colour
    raw: bytes
    sizes: list[Size]


MIXED = Mixed(
    datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    date(2026, 1, 2),
    UUID(int=7),
    Decimal("1.10"),
    Colour.RED,
    b"\x00\xff",
    [Size(1), Size(2, 3)],
)


async def test_payload_of_each_kind_arrives_as_its_type(app: Holdfast) -> None:
    """Pydantic models, dataclasses, TypedDicts and dicts arrive, and return, as what they are."""

    @app.job
    async def model(image: Image) -> Image:
        assert isinstance(image, Image)
        return Image(id=image.id + 1, name=image.name)

    @app.job
    async def record(size: Size) -> Size:
        assert isinstance(size, Size)
        return Size(size.height, size.width)

    @app.job
    async def typed_dict(place: Place) -> Place:
        return {"city": place["city"].upper()}

    @app.job
    async def plain(data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "seen": True}

    async with working(app):
        assert await (await model.enqueue(Image(id=1, name="é"))).result(60) == Image(
            id=2, name="é"
        )
        assert await (await record.enqueue(Size(2, 3))).result(60) == Size(3, 2)
        assert await (await typed_dict.enqueue({"city": "paris"})).result(60) == {"city": "PARIS"}
        assert await (await plain.enqueue({"n": [1, None]})).result(60) == {
            "n": [1, None],
            "seen": True,
        }


async def test_payload_of_several_arguments_uses_names_and_defaults(app: Holdfast) -> None:
    """Several parameters are the members of one object; defaults and keyword calls count."""

    @app.job
    async def area(ctx: Context, size: Size, factor: int = 2, *, note: str = "none") -> str:
        return f"{size.width * size.height * factor} {note} {ctx.attempt}"

    async with working(app):
        assert await (await area.enqueue(Size(2, 3))).result(60) == "12 none 1"
        assert await (await area.enqueue(Size(2, 3), 5, note="x")).result(60) == "30 x 1"
        assert await (await area.enqueue(note="y", size=Size(1, 1))).result(60) == "2 y 1"


async def test_payload_that_does_not_fit_is_refused_at_the_caller(app: Holdfast) -> None:
    """A wrong call fails where it is made, with the member's name, and nothing is sent."""

    @app.job
    async def area(size: Size, factor: int) -> int:
        raise AssertionError("must not run")

    with pytest.raises(InvalidPayload, match="factor"):
        await app.enqueue("area", Size(1), "five")
    with pytest.raises(InvalidPayload, match="factor"):
        await app.enqueue("area", Size(1))
    with pytest.raises(InvalidPayload, match="colour"):
        await app.enqueue("area", Size(1), 2, colour="red")
    with pytest.raises(UnknownJob, match="it has area"):
        await app.enqueue("aera", 1)


async def test_result_of_each_type_comes_back_as_annotated(app: Holdfast) -> None:
    """Dates, decimals, UUIDs, enums, bytes and nested records survive the journey both ways."""

    @app.job
    async def same(value: Mixed) -> Mixed:
        assert value == MIXED
        return value

    @app.job
    async def untyped(value: Any):  # type: ignore[no-untyped-def]  # that is the point
        return value

    @app.job
    async def wrong() -> int:
        return "no number"  # type: ignore[return-value]  # that is the point

    async with working(app):
        assert await (await same.enqueue(MIXED)).result(60) == MIXED
        values: list[Any] = [0, "", False, [], {}, "null", [None], 1.5]
        for value in values:
            assert await (await untyped.enqueue(value)).result(60) == value
        with pytest.raises(InvalidPayload, match="result"):
            await (await wrong.enqueue()).result(60)


async def test_result_of_nothing_is_none(app: Holdfast) -> None:
    """A handler that returns nothing gives None, whatever its annotation promises."""

    @app.job
    async def nothing() -> None: ...

    @app.job
    async def maybe(n: int) -> Size | None:
        return Size(n) if n else None

    async with working(app):
        assert await (await nothing.enqueue()).result(60) is None
        assert await (await maybe.enqueue(0)).result(60) is None
        assert await (await maybe.enqueue(4)).result(60) == Size(4)


async def test_result_that_cannot_be_json_is_a_dead_letter(app: Holdfast, seen: Seen) -> None:
    """A result that JSON cannot carry is not tried again: the letter says so."""

    @app.job
    async def weird() -> object:
        seen.append(1)
        return object()

    async with working(app):
        with pytest.raises(RunFailed, match="not possible as JSON"):
            await (await weird.enqueue()).result(60)
        letter = await dead_letter(app)
        assert letter.headers["Hf-Reason"] == "invalid"
        assert len(seen) == 1


async def test_result_over_the_message_limit_goes_through_the_object_store(app: Holdfast) -> None:
    """A result larger than any message comes back whole; its record only names the object."""

    @app.job
    async def large(size: int) -> str:
        return "é" * size

    async with working(app):
        run = await large.enqueue(1_500_000)
        assert await run.result(60) == "é" * 1_500_000
        record = await record_of(app, run.id)
        assert record is not None
        (attempt,) = record.attempts
        assert record.result_object == f"result/{run.id}/{attempt.epoch}"
        assert bytes(record.result) == b"null"


async def test_sync_handler_runs_in_a_thread_with_a_blocking_context(
    app: Holdfast, seen: Seen
) -> None:
    """A plain function runs beside the loop; its context has the same methods, which block."""
    main = threading.get_ident()

    @app.job
    def compute(ctx: SyncContext, n: int) -> int:
        assert threading.get_ident() != main
        assert isinstance(ctx, SyncContext)
        ctx.progress(0.5, "half")
        assert ctx.still_owner()
        ctx.publish("computed", {"n": n})
        return n * ctx.attempt

    @app.job(on="computed")
    async def noted(data: dict[str, int]) -> None:
        seen.append(data)

    async with working(app):
        assert await (await compute.enqueue(21)).result(60) == 21
        assert await seen.wait() == [{"n": 21}]


async def test_sync_handlers_do_not_block_each_other(app: Holdfast) -> None:
    """Two blocking handlers run at the same time, and the loop goes on beside them."""
    both = threading.Barrier(3)

    @app.job
    def meet() -> None:
        both.wait(timeout=5)

    async with working(app):
        runs = [await meet.enqueue(), await meet.enqueue()]
        await asyncio.to_thread(both.wait, 5)
        for run in runs:
            assert await run.result(60) is None


async def test_sync_handler_over_its_time_is_given_up_and_its_context_is_closed(
    app: Holdfast, seen: Seen
) -> None:
    """A thread cannot be interrupted: its run fails on time, and what it says later is refused."""
    go = threading.Event()

    @app.job(timeout=0.1, retry=Backoff.never())
    def stuck(ctx: SyncContext) -> None:
        go.wait(10)
        for act in (lambda: ctx.progress(0.5), lambda: ctx.publish("late"), ctx.still_owner):
            try:
                seen.append(act())
            except Exception as error:  # noqa: BLE001 - reported to the test
                seen.append(type(error).__name__)

    async with working(app) as worker:
        run = await stuck.enqueue()
        with pytest.raises(RunFailed, match="longer than 100ms"):
            await run.result(60)
        assert metric(worker, "holdfast_stuck_threads") == 1
        before = await record_of(app, run.id)
        go.set()
        assert await seen.wait(3) == ["ClaimLost", "ClaimLost", False]
        assert await record_of(app, run.id) == before
        await until(lambda: metric(worker, "holdfast_stuck_threads") == 0, 5, "a free thread")


async def test_job_called_directly_is_the_plain_function(app: Holdfast) -> None:
    """Without a server a job is what it was before it was decorated, name and docstring too."""

    @app.job(name="adder")
    def add(a: int, b: int = 1) -> int:
        """Adds."""
        return a + b

    @app.job
    async def double(a: int) -> int:
        return 2 * a

    assert add(1) == 2
    assert add(a=1, b=3) == 4
    assert await double(4) == 8
    named: Any = add
    assert (named.__name__, add.__doc__, add.name) == ("add", "Adds.", "adder")


async def test_result_waits_no_longer_than_told(app: Holdfast) -> None:
    """`result(timeout)` gives up on waiting, not on the run."""
    go = asyncio.Event()

    @app.job
    async def slow() -> str:
        await go.wait()
        return "done"

    async with working(app):
        run = await slow.enqueue()
        with pytest.raises(ResultTimeout) as caught:
            await run.result(0.1)
        assert caught.value.run == run.id
        go.set()
        assert await run.result(60) == "done"
        assert (await run.status()).state == "done"


async def test_context_tells_the_handler_who_it_is(app: Holdfast) -> None:
    """Run id, job, group, node, attempt, epoch, headers and deadline are those of the run."""

    @app.job(group="photos", timeout="1m")
    async def who(ctx: Context) -> dict[str, Any]:
        assert ctx.deadline is not None
        left = (ctx.deadline - datetime.now(UTC)).total_seconds()
        return {
            "run": ctx.run,
            "job": ctx.job,
            "group": ctx.group,
            "node": ctx.node,
            "attempt": ctx.attempt,
            "epoch": ctx.epoch,
            "trace": ctx.headers["Trace"],
            "left": 55 < left <= 60,
        }

    async with working(app, group="photos") as worker:
        run = await who.options(headers={"Trace": "abc"}).enqueue()
        record = await until(lambda: record_of(app, run.id), 5)
        found = await run.result(60)
        epoch = found.pop("epoch")
        assert found == {
            "run": run.id,
            "job": "who",
            "group": "photos",
            "node": worker.node,
            "attempt": 1,
            "trace": "abc",
            "left": True,
        }
        record = await record_of(app, run.id)
        assert record is not None
        assert [a.epoch for a in record.attempts] == [epoch]


async def test_handle_outlives_the_worker_beside_it(app: Holdfast) -> None:
    """An app keeps its own connection when a worker on the same loop comes and goes."""

    @app.job
    async def add(a: int, b: int) -> int:
        return a + b

    async with app:
        queued = await add.enqueue(1, 2)
        async with working(app):
            assert await queued.result(60) == 3
            second = await add.enqueue(3, 4)
            assert await second.result(60) == 7
        assert await second.result(1) == 7
        assert (await queued.status()).state == "done"


async def test_handlers_enqueue_with_their_run_as_the_cause(app: Holdfast) -> None:
    """What a handler enqueues names the handler's run as its cause; what others do names none."""

    @app.job
    async def child() -> None: ...

    @app.job
    async def parent() -> str:
        return (await child.enqueue()).id

    async with working(app):
        run = await parent.enqueue()
        below = await run.result(60)
        record = await until(lambda: record_of(app, below), 5, "the child's record")
        assert record.cause == run.id
        top = await record_of(app, run.id)
        assert top is not None
        assert top.cause == ""
