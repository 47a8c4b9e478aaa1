"""Contexts for calling a handler as the plain function that it is."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from holdfast import Context, Holdfast, SyncContext
from holdfast.errors import InvalidInput, InvalidName, InvalidPayload, NoRecord
from holdfast.testing import make_context, make_sync_context

app = Holdfast("shop")


@app.job
async def resize(ctx: Context, id: int) -> str:
    await ctx.progress(0.5, "half")
    await ctx.publish("image-resized", {"key": id})
    return f"{ctx.run} {ctx.attempt} {ctx.epoch} {await ctx.still_owner()}"


@app.job
def resize_plainly(ctx: SyncContext, id: int) -> str:
    ctx.progress(0.5, "half")
    ctx.publish("image-resized", {"key": id})
    return f"{ctx.run} {ctx.attempt} {ctx.epoch} {ctx.still_owner()}"


async def test_context_notes_what_a_handler_does() -> None:
    """A job is called like the function that it is; nothing is sent anywhere."""
    ctx = make_context(run="run-1", attempt=2, epoch=17)
    assert await resize(ctx, 42) == "run-1 2 17 True"
    assert ctx.published == [("image-resized", {"key": 42})]
    assert ctx.progressed == [(0.5, "half")]


def test_sync_context_needs_neither_thread_nor_loop() -> None:
    """The same for a plain handler."""
    ctx = make_sync_context(run="run-1", attempt=2, epoch=17, owner=False)
    assert resize_plainly(ctx, 42) == "run-1 2 17 False"
    assert ctx.published == [("image-resized", {"key": 42})]
    assert ctx.progressed == [(0.5, "half")]


async def test_context_refuses_what_a_real_one_refuses() -> None:
    """A test does not pass with an event that could not be sent, nor with impossible progress."""
    ctx = make_context()
    with pytest.raises(InvalidName):
        await ctx.publish("no spaces", {})
    with pytest.raises(InvalidPayload):
        await ctx.publish("event", object())
    with pytest.raises(InvalidInput):
        await ctx.progress(2.0)
    assert (ctx.published, ctx.progressed) == ([], [])


def test_context_without_an_epoch_is_that_of_at_least_once() -> None:
    """A handler that relies on a claim finds out in its test."""
    with pytest.raises(NoRecord):
        _ = make_context(epoch=None).epoch


def test_context_carries_the_facts_it_was_given() -> None:
    """Headers, deadline and the rest are what the handler will see."""
    deadline = datetime(2026, 1, 1, tzinfo=UTC)
    ctx = make_context(job="resize", group="images", headers={"Tenant": "a"}, deadline=deadline)
    assert (ctx.job, ctx.group, ctx.headers, ctx.deadline) == (
        "resize",
        "images",
        {"Tenant": "a"},
        deadline,
    )
    ctx.logger.info("a line")
