"""What a type checker knows about the API: checked by mypy, never run.

A program that uses Holdfast with `mypy --strict` must need no casts, whatever its handlers are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_type

from holdfast import Bucket, Context, Holdfast, Run, Schedules, SyncApp, SyncContext
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
async def resize(id: int, ctx: Context) -> Thumbnail:
    await ctx.publish("image-resized", {"key": id})
    return Thumbnail(str(id))


@app.job(group="images", timeout="5m", on="image-resized")
def index(data: dict[str, int], ctx: SyncContext) -> int:
    ctx.progress(0.5)
    return data["key"]


async def a_run_has_the_result_of_its_handler() -> None:
    """For async and synchronous handlers, however the run was sent."""
    run = await resize.enqueue(42, key="42", delay=timedelta(seconds=5))
    assert_type(run, Run[Thumbnail])
    assert_type(await run.result(timeout=60), Thumbnail)
    assert_type(await resize.options(key="42").enqueue(42), Run[Thumbnail])
    assert_type(await resize.enqueue_many([1, 2]), list[Run[Thumbnail]])
    assert_type(await index.enqueue({"key": 1}), Run[int])
    assert_type(await index.options(delay="1m").enqueue({"key": 1}), Run[int])
    assert_type(await index.enqueue_many([{"key": 1}]), list[Run[int]])
    assert_type(await app.enqueue("resize", 42), Run[Any])


async def a_job_is_called_like_its_function() -> None:
    """With the function's own parameters and result."""
    assert_type(await resize(42, make_context()), Thumbnail)
    assert_type(index({"key": 1}, make_sync_context()), int)
    assert_type(make_context(), FakeContext)


async def a_bucket_has_the_type_that_it_was_given() -> None:
    """Or `Any`."""
    thumbnails = app.bucket("thumbnails", Thumbnail)
    assert_type(thumbnails, Bucket[Thumbnail])
    if entry := await thumbnails.get("cat"):
        assert_type(entry.value, Thumbnail)
    assert_type(await thumbnails.change("cat", lambda old: old or Thumbnail("x")), Thumbnail)
    assert_type(app.bucket("anything"), Bucket[Any])
    schedules = await Schedules.of(app)
    assert_type(await schedules.trigger("nightly"), str)


def plain_code_has_the_same_types() -> None:
    """Through `SyncApp` too."""
    with SyncApp(app) as shop:
        assert_type(shop.enqueue(resize, 42), SyncRun[Thumbnail])
        assert_type(shop.enqueue(resize, 42).result(), Thumbnail)
        assert_type(shop.enqueue(resize.options(key="42"), 42), SyncRun[Thumbnail])
        assert_type(shop.enqueue(index, {"key": 1}), SyncRun[int])
        assert_type(shop.enqueue("index", {"key": 1}), SyncRun[Any])


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
