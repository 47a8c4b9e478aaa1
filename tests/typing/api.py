"""What a type checker knows about the API: checked by mypy and pyright, never run.

A program that uses Holdfast with `mypy --strict` or pyright's `strict` must need no casts, whatever
its handlers are. The mistakes that must be caught are in `mistakes.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_type

from sqlalchemy.orm import Session

from holdfast import (
    Bucket,
    Context,
    Flow,
    Holdfast,
    Once,
    Resource,
    Run,
    Schedules,
    SyncApp,
    SyncContext,
)
from holdfast.client import JobRequest
from holdfast.integrations import outbox
from holdfast.sync import SyncRun
from holdfast.testing import (
    FakeContext,
    Memory,
    RunningWorker,
    eager,
    make_context,
    make_sync_context,
    memory,
)

app = Holdfast("shop")


@dataclass
class Thumbnail:
    key: str


@app.job
async def resize(ctx: Context, id: int, width: int = 100) -> Thumbnail:
    await ctx.publish("image-resized", {"key": id})
    return Thumbnail(str(id))


@app.job(group="images", timeout="5m", on="image-resized")
def index(ctx: SyncContext, data: dict[str, Any]) -> int:
    ctx.progress(0.5)
    return len(data)


@app.job
async def note(data: dict[str, Any], text: str = "") -> str:
    return text


@app.cron("@hourly", tz="Europe/Paris", overlap="skip", timeout="5m")
def clean() -> list[str]:
    return []


class Pool:
    async def execute(self, statement: str) -> int:
        return 0


@app.resource
async def pool() -> AsyncIterator[Pool]:
    yield Pool()


@app.job(key="id")
async def count(ctx: Context, id: int, db: Pool = pool.injected) -> int:
    return await db.execute("SELECT")


@app.every("5m", payload={"anything": 1})
async def probe(anything: Any) -> None: ...


@app.flow(timeout="3d")
async def restock(ctx: Flow, item: int) -> bool:
    thumbnail = await ctx.call(resize.request(item))
    assert_type(thumbnail, Thumbnail)
    return True


@app.job
def untyped(data: Any, more: int = 0) -> Any:
    return data


async def a_run_has_the_result_of_its_handler() -> None:
    """For async and synchronous handlers, however the run was sent."""
    run = await resize.options(key="42", delay=timedelta(seconds=5)).enqueue(42)
    assert_type(run, Run[Thumbnail])
    assert_type(await run.result(timeout=60), Thumbnail)
    assert_type(await resize.enqueue(42), Run[Thumbnail])
    assert_type(await resize.enqueue(id=42, width=5), Run[Thumbnail])
    assert_type(await index.enqueue({"key": 1}), Run[int])
    assert_type(await index.options(delay="1m").enqueue({"key": 1}), Run[int])
    assert_type(await note.enqueue({"key": 1}, text="x"), Run[str])
    assert_type(await clean.enqueue(), Run[list[str]])
    assert_type(await clean.options(key="x").enqueue(), Run[list[str]])
    assert_type(await probe.enqueue(1), Run[None])
    assert_type(await probe.enqueue(anything="x"), Run[None])
    assert_type(await restock.enqueue(7), Run[bool])
    assert_type(await restock.options(key="7").enqueue(item=7), Run[bool])
    assert_type(await app.enqueue("resize", 42), Run[Any])


async def a_handler_without_types_is_not_checked() -> None:
    """Its first parameter may be the context."""
    assert_type(await untyped.enqueue(1, 2), Run[Any])
    assert_type(await untyped.options(key="x").enqueue(data=1), Run[Any])
    assert_type(await probe.options(key="x").enqueue(1), Run[None])
    assert_type(await probe.enqueue_many([1, "x"]), list[Run[None]])
    probe.schedule("s", cron="@daily", payload=1)
    with SyncApp(app) as shop:
        shop.enqueue(untyped, 1)
        assert_type(shop.enqueue(probe, 1), SyncRun[None])


async def a_run_is_found_by_its_id() -> None:
    """With the type of its result, if its job is named."""
    assert_type(app.run("resize/42"), Run[Any])
    assert_type(resize.run("resize/42"), Run[Thumbnail])
    assert_type(await clean.run("clean/1").result(), list[str])
    assert_type(await app.runs(job="resize", state="dead"), list[Run[Any]])
    assert_type((await resize.enqueue(42)).state, str)


async def what_is_handed_in_is_not_passed() -> None:
    """A resource has a default; it has the type of what its function yields."""
    assert_type(pool, Resource[Pool])
    assert_type(await pool(), Pool)
    assert_type(await count.enqueue(42), Run[int])
    assert_type(await count.options(key="1", on_duplicate="replace").enqueue(id=42), Run[int])
    with pool.override(Pool()) as fake:
        assert_type(fake, Pool)
    async with app.once("document-42", ttl="24h") as first:
        assert_type(first, Once)


async def many_runs_have_it_too() -> None:
    """From payloads, from requests, and from requests of several jobs."""
    assert_type(resize.request(42), JobRequest[Thumbnail])
    assert_type(await resize.enqueue_many([1, 2]), list[Run[Thumbnail]])
    assert_type(await resize.enqueue_many([resize.request(1, width=2)]), list[Run[Thumbnail]])
    assert_type(await index.enqueue_many([{"key": 1}]), list[Run[int]])
    assert_type(await note.enqueue_many([{"key": 1}]), list[Run[str]])
    assert_type(await clean.enqueue_many([clean.request()]), list[Run[list[str]]])
    assert_type(await app.enqueue_many([resize.request(1)]), list[Run[Thumbnail]])


async def a_job_is_called_like_its_function() -> None:
    """With the function's own parameters and result."""
    assert_type(await resize(make_context(), 42), Thumbnail)
    assert_type(index(make_sync_context(), {"key": 1}), int)
    assert_type(clean(), list[str])
    assert_type(make_context(), FakeContext)


async def a_schedule_takes_the_payload_of_its_job() -> None:
    """As a value, a dict of arguments, or a request."""
    schedules = await Schedules.of(app)
    await schedules.add(resize.schedule("nightly", cron="0 3 * * *", payload=42, tz="UTC"))
    resize.schedule("weekly", every="7d", payload=resize.request(42, width=5))
    note.schedule("noted", at="2030-01-01T00:00:00Z", payload={"data": {}, "text": "x"})
    clean.schedule("cleaned", cron="@daily", jitter="1m")
    assert_type(await schedules.trigger("nightly"), str)


async def a_bucket_has_the_type_that_it_was_given() -> None:
    """Or `Any`."""
    thumbnails = app.bucket("thumbnails", Thumbnail)
    assert_type(thumbnails, Bucket[Thumbnail])
    if entry := await thumbnails.get("cat"):
        assert_type(entry.value, Thumbnail)
    assert_type(await thumbnails.change("cat", lambda old: old or Thumbnail("x")), Thumbnail)
    assert_type(app.bucket("anything"), Bucket[Any])


def plain_code_has_the_same_types() -> None:
    """Through `SyncApp` too."""
    with SyncApp(app) as shop:
        assert_type(shop.enqueue(resize, 42), SyncRun[Thumbnail])
        assert_type(shop.enqueue(resize, 42).result(), Thumbnail)
        assert_type(shop.enqueue(resize.options(key="42"), 42, width=5), SyncRun[Thumbnail])
        assert_type(shop.enqueue(clean), SyncRun[list[str]])
        assert_type(shop.enqueue(note, {"key": 1}, text="x"), SyncRun[str])
        assert_type(shop.enqueue(restock, 7), SyncRun[bool])
        assert_type(shop.enqueue(index.options(), {"key": 1}), SyncRun[int])
        assert_type(shop.enqueue("index", {"key": 1}), SyncRun[Any])
        assert_type(shop.enqueue_many([resize.request(1)]), list[SyncRun[Thumbnail]])
        assert_type(shop.run("resize/42"), SyncRun[Any])
        assert_type(shop.run("resize/42", resize), SyncRun[Thumbnail])


def the_outbox_has_them(session: Session) -> None:
    """Its arguments are those of the handler."""
    assert_type(outbox.enqueue(session, resize, 42), str)
    assert_type(outbox.enqueue(session, resize.options(key="42"), 42, width=5), str)
    assert_type(outbox.ordered("42").enqueue(session, clean), str)


async def tests_have_types(holdfast_worker: Callable[..., RunningWorker]) -> None:
    """And in users' own tests."""
    async with memory(app) as mem:
        assert_type(mem, Memory)
        assert_type(await mem.drain(), int)
    with eager(app) as mem:
        assert_type(mem, Memory)
    async with holdfast_worker(app) as started:
        assert_type(started, Holdfast)
    with holdfast_worker(app) as shop:
        assert_type(shop, SyncApp)
