"""Flows whose effects are lines of a file outside the system: step, key, epoch."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

from holdfast import Flow, Holdfast, current_step

app = Holdfast("flows")


def record(what: str) -> None:
    """Append one line at once; lines of this length are not torn."""
    with Path(os.environ["EFFECTS"]).open("a", buffering=1) as file:
        file.write(what + "\n")


async def effect(name: str) -> str:
    """A step with an effect, sometimes a slow one."""
    step = current_step()
    record(f"{name} {step.key} {step.epoch}")
    await asyncio.sleep(random.uniform(0, 0.05))
    return name


async def compensate(name: str) -> None:
    """An effect that is taken back."""
    step = current_step()
    record(f"undo-{name} {step.key} {step.epoch}")


@app.job
async def child(n: int) -> int:
    """A child with some work."""
    await asyncio.sleep(random.uniform(0, 0.05))
    return n


@app.flow
async def inner(ctx: Flow, n: int) -> int:
    """A child that is a flow."""
    await ctx.step(effect, "inner")
    return n


@app.flow
async def story(ctx: Flow, n: int) -> int:
    """Steps, children, a sleep, an event, and a failure for every fifth."""
    ctx.undo(compensate, "first")
    await ctx.step(effect, "first")
    total = sum(await ctx.gather(child.request(i) for i in range(4)))
    total += await ctx.call(inner.request(n))
    await ctx.sleep(1.2)
    await ctx.event("go", key=str(n % 3), timeout="2s")
    await ctx.step(effect, "last")
    if n % 5 == 0:
        raise ValueError("every fifth fails")
    return total
