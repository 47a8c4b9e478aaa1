"""Flows under chaos: what they do, and what the checker asks of them.

Effects of steps are logged under the step's key and the flow's epoch, as a store outside the system
would keep them: the same mark under two keys, or twice under one epoch, is a violation. Kinds:

* flow     a step, children, a child that is a flow, a sleep, an event, and a step that may fail at
           first. The event is an operation of its own: sent in time, it must be received.
* undone   fails after a step and a child, and must undo both, the last first, and be given up
* called   waits for an event that never comes, is cancelled (or not) while it waits, and undoes

What the checker adds to the marks of these operations:

* stuck    a flow, or a child of one, that has not ended when everything is quiet
* orphan   a child whose flow is unknown

Pure but for `define`, like the checker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from chaos.effects import Effects
from chaos.history import Operation
from holdfast import Backoff, Context, Flow, Holdfast, current_step
from holdfast.model.journal import parent_of
from holdfast.model.run import RunRecord

GROUP: Final = "steady"
PARTS: Final = 3
GO: Final = "chaos-go"
NEVER: Final = "chaos-never"
EVENT_SECONDS: Final = 40.0
"""How long a flow waits for its event."""
IN_TIME_SECONDS: Final = 30.0
"""An event that was accepted this long after its flow was sent, or earlier, must be received."""
CALLED_SECONDS: Final = 25.0
KINDS: Final = ("flow", "undone", "called")
ENDS: Final[Mapping[str, tuple[str, ...]]] = {
    "flow": ("done",),
    "undone": ("dead",),
    "called": ("cancelled", "dead"),
}
"""How a flow may end; one that is cancelled too late is dead."""


class MeantToFail(Exception):
    """A failure that a step was asked for."""


def marks_of(kind: str, name: str) -> tuple[str, ...]:
    """The effects of a flow of this kind."""
    if kind == "flow":
        parts = [f"{name}/part{n}" for n in range(PARTS)]
        return (f"{name}/first", *parts, f"{name}/inner", f"{name}/last")
    if kind == "undone":
        return tuple(f"{name}/{what}" for what in ("first", "part0", "undo-part", "undo-first"))
    return f"{name}/first", f"{name}/undo-first"


def heard_mark(name: str) -> str:
    """The effect of a flow that has received its event."""
    return f"{name}/heard"


def _log(what: Any, mark: str) -> None:
    """Under the step's key; starts are told apart by attempt, which share an epoch."""
    step = current_step()
    run = step.key if what == "effect" else f"{step.key}#{step.attempt}"
    Effects.here().write(what, mark, run, step.epoch, step.attempt)


async def act(mark: str, seconds: float = 0.01, failures: int = 0) -> None:
    """A step with an effect, perhaps after failures."""
    _log("start", mark)
    await asyncio.sleep(seconds)
    if current_step().attempt <= failures:
        _log("fail", mark)
        raise MeantToFail(mark)
    _log("effect", mark)


def define(app: Holdfast, retry: Backoff) -> None:
    """Add the flows and their children to the app under test."""

    @app.job(group="quick", retry=retry)
    async def part(ctx: Context, mark: str, seconds: float) -> str:
        Effects.here().write("start", mark, ctx.run, ctx.epoch, ctx.attempt)
        await asyncio.sleep(seconds)
        Effects.here().write("effect", mark, ctx.run, ctx.epoch, ctx.attempt)
        return mark

    @app.flow(group=GROUP)
    async def inner(ctx: Flow, mark: str) -> str:
        await ctx.step(act, mark)
        return mark

    @app.flow(group=GROUP)
    async def flow(ctx: Flow, mark: str, seconds: float, failures: int) -> list[str]:
        await ctx.step(act, f"{mark}/first", seconds)
        parts = await ctx.gather(
            part.request(mark=f"{mark}/part{n}", seconds=seconds) for n in range(PARTS)
        )
        parts.append(await ctx.call(inner.request(mark=f"{mark}/inner")))
        await ctx.sleep(1.5)
        if await ctx.event(GO, key=mark, timeout=EVENT_SECONDS):
            await ctx.step(act, heard_mark(mark))
        await ctx.step(act, f"{mark}/last", seconds, failures, retry=retry)
        return parts

    @app.flow(group=GROUP)
    async def undone(ctx: Flow, mark: str, seconds: float) -> None:
        await ctx.step(act, f"{mark}/first", seconds)
        ctx.undo(act, f"{mark}/undo-first")
        await ctx.call(part.request(mark=f"{mark}/part0", seconds=seconds))
        ctx.undo(act, f"{mark}/undo-part")
        raise MeantToFail(mark)

    @app.flow(group=GROUP)
    async def called(ctx: Flow, mark: str) -> None:
        ctx.undo(act, f"{mark}/undo-first")
        await ctx.step(act, f"{mark}/first")
        await ctx.call(waiting.request(mark=mark))

    @app.flow(group=GROUP)
    async def waiting(ctx: Flow, mark: str) -> None:
        await ctx.event(NEVER, key=mark, timeout=CALLED_SECONDS)
        raise MeantToFail(mark)


def meant_to_fail(operations: Iterable[Operation], records: Mapping[str, RunRecord]) -> set[str]:
    """Runs that may be given up: flows that fail by intention, and their children."""
    flows = {run for o in operations if "dead" in ENDS.get(o.kind, ()) for run in o.runs}
    return flows | {run for run, record in records.items() if parent(record) in flows}


def parent(record: RunRecord) -> str:
    """The flow whose child a run is, or nothing."""
    found = parent_of(record.parent)
    return found.run if found else ""


def astray(
    operations: Iterable[Operation], records: Mapping[str, RunRecord], *, whole: bool = True
) -> Iterator[tuple[str, str, str]]:
    """Flows that have not ended as they should, and children without a flow: kind, name, story.

    A record that has expired has ended. Unless the records are `whole`, those of flows that had
    ended may have been deleted before those of their children.
    """
    for operation in operations:
        for run in operation.runs if operation.kind in KINDS else ():
            record = records.get(run)
            if record is None:
                continue
            if not record.terminal:
                yield "stuck", operation.name, f"{run} is still {record.state}"
            elif record.state not in ENDS[operation.kind]:
                yield "dead", operation.name, f"{run} is {record.state}: {record.error}"
    for run, record in records.items():
        flow = parent(record)
        if whole and flow and flow not in records:
            yield "orphan", run, f"its flow {flow} is unknown"
        elif flow and not record.terminal:
            yield "stuck", run, f"child of {flow}, still {record.state}"
