"""Random flows against a model, with crashes between any two attempts and around any step.

A program is data: a list of operations, some of them with a program of their own. The flow `run`
executes it with its context; `Model` says what it returns and which effects it has.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter, defaultdict
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast import Backoff, Context, Flow, Holdfast, current_step
from holdfast.config import WorkerConfig
from holdfast.errors import StepFailed
from holdfast.testing import memory
from holdfast.testing.memory_app import StepMoment

HISTORIES = int(os.environ.get("HOLDFAST_HISTORIES", "60"))
"""`HOLDFAST_HISTORIES=100000` is the long demonstration."""
MOST_STEPS = 5_000
WAIT_SECONDS = 3_600.0
MOMENTS: tuple[StepMoment, ...] = ("before", "called", "after")

Program = list[list[Any]]

small = st.integers(0, 9)
leaf = st.one_of(
    st.tuples(st.just("step"), small),
    st.tuples(st.just("flaky"), small, st.integers(1, 3), st.sampled_from(["100ms", "90s"])),
    st.tuples(st.just("broken"), small),
    st.tuples(st.just("sleep"), st.integers(1, 100_000)),
    st.tuples(st.just("gather"), st.lists(st.tuples(small, st.booleans()), max_size=5)),
    st.tuples(st.just("event"), st.sampled_from(["early", "late", "never"])),
    st.tuples(st.just("undo"), small),
    st.tuples(st.just("chance"), small),
)
programs = st.recursive(
    st.lists(leaf, max_size=5),
    lambda inner: st.lists(st.one_of(leaf, st.tuples(st.just("flow"), inner)), max_size=5),
    max_leaves=12,
)
endings = st.sampled_from(["return", "raise"])


class Model:
    """What a program returns, and its effects by name, in order within each flow."""

    def __init__(self, program: Program, ending: str) -> None:
        self.effects: list[str] = []
        """Of the steps and compensations of the outermost flow, in order."""
        self.children: Counter[str] = Counter()
        """Effects of child runs and of the steps of child flows."""
        self.events: list[tuple[str, str]] = []
        self.values = self._run("p", program, self.effects, ending)

    def _run(self, where: str, program: Program, effects: list[str], ending: str) -> list[Any]:
        values: list[Any] = []
        undos: list[str] = []
        for n, (kind, *rest) in enumerate(program):
            name = f"{where}.{n}"
            if kind in ("step", "flaky"):
                effects.append(name)
                values.append(rest[0])
            elif kind == "broken":
                values.append("broken")
            elif kind == "gather":
                self.children.update(f"{name}.{i}" for i, (_, ok) in enumerate(rest[0]) if ok)
                values.append([value if ok else "dead" for value, ok in rest[0]])
            elif kind == "event":
                if rest[0] != "never":  # what came before a child flow was sent is not for it
                    self.events.append((name, rest[0] if where == "p" else "late"))
                values.append(None if rest[0] == "never" else name)
            elif kind == "undo":
                undos.append(f"{name}.undo")
            elif kind == "flow":
                inner: list[str] = []
                values.append(self._run(name, rest[0], inner, "return"))
                self.children.update(inner)
        if ending == "raise":
            effects += reversed(undos)
        return values


class World:
    """The app, and its effects: name, idempotency key, epoch."""

    def __init__(self) -> None:
        self.app = Holdfast("programs")
        self.effects: list[tuple[str, str, int]] = []
        app = self.app

        @app.job(retry=Backoff.list(["1s"]))
        async def child(ctx: Context, name: str, value: int, ok: bool) -> int:
            if not ok:
                raise ValueError("a child that fails")
            self.effects.append((name, ctx.run, ctx.epoch))
            return value

        @app.flow
        async def run(ctx: Flow, where: str, program: Program, ending: str) -> list[Any]:
            values: list[Any] = []
            chances: list[float] = []
            for n, (kind, *rest) in enumerate(program):
                name = f"{where}.{n}"
                if kind == "step":
                    values.append(await ctx.step(self.act, name, rest[0], name=kind))
                elif kind == "flaky":
                    value, failures, pause = rest
                    retry = Backoff.list([pause] * failures)
                    got = ctx.step(self.act, name, value, failures, name=kind, retry=retry)
                    values.append(await got)
                elif kind == "broken":
                    try:
                        await ctx.step(self.act, name, 0, 99, name=kind, retry=Backoff.never())
                    except StepFailed:
                        values.append("broken")
                elif kind == "sleep":
                    await ctx.sleep(rest[0])
                elif kind == "gather":
                    requests = [
                        child.request(f"{name}.{i}", value, ok)
                        for i, (value, ok) in enumerate(rest[0])
                    ]
                    ends = await ctx.gather(requests, settled=True)
                    values.append([end.result if end.ok else end.state for end in ends])
                elif kind == "event":
                    found = await ctx.event("go", key=name, timeout=WAIT_SECONDS)
                    values.append(found.data if found else None)
                elif kind == "undo":
                    ctx.undo(self.act, f"{name}.undo", 0)
                elif kind == "chance":
                    chances.append(ctx.random())
                elif kind == "flow":
                    values.append(await ctx.call(run.request(name, rest[0], "return")))
            assert chances == await ctx.step(lambda: chances, name="chances")
            if ending == "raise":
                raise ValueError("as its program says")
            return values

        self.run = run

    def act(self, name: str, value: int, failures: int = 0) -> int:
        """A step with an effect, after failures."""
        step = current_step()
        if step.attempt <= failures:
            raise ValueError(f"attempt {step.attempt} of {failures} that fail")
        self.effects.append((name, step.key, step.epoch))
        return value


async def play(program: Program, ending: str, seed: int, crashes: int) -> None:
    """Run a program to its end, and compare."""
    world, model, dice = World(), Model(program, ending), random.Random(seed)
    config = WorkerConfig(crash_limit=1_000)
    async with memory(world.app, worker=config) as mem:
        sent = await world.run.enqueue("p", program, ending)

        async def publish(when: str) -> None:
            for name, wanted in model.events:
                if wanted == when:
                    await world.app.publish("go", name, key=name)

        await publish("early")
        idle = False
        for _ in range(MOST_STEPS):
            if crashes and dice.random() < 0.3:
                crashes -= 1
                what = dice.choice(["run", "run", "child", "step", "flaky", "chances"])
                if what in ("run", "child"):
                    mem.crash_next(what, at=dice.choice(["start", "end"]))
                else:
                    mem.crash_step(what, at=dice.choice(MOMENTS))
            if await mem.step():
                idle = False
                continue
            if not idle:
                idle = True
                await publish("late")
            elif mem.next_due is not None:
                mem.clock.advance(max(0.0, mem.next_due.timestamp() - mem.clock.utc()))
            else:
                break
        status = await sent.status()
        if ending == "raise":
            assert status.state == "dead"
        else:
            assert await sent.result() == model.values
        for found in await world.app.runs():
            assert (await world.app.run(found.id).status()).ended, found
    _compare(world, model)


def _compare(world: World, model: Model) -> None:
    keys: dict[str, set[str]] = defaultdict(set)
    for name, key, _ in world.effects:
        keys[name].add(key)
    assert all(len(found) == 1 for found in keys.values()), "one effect under two keys"
    assert max(Counter(world.effects).values(), default=1) == 1, "an effect twice in one epoch"
    assert keys.keys() == {*model.effects, *model.children}
    first = list(dict.fromkeys(name for name, _, _ in world.effects))
    own = [name for name in first if name in set(model.effects)]
    assert own == model.effects


@settings(max_examples=HISTORIES, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=programs, ending=endings, seed=st.integers(0, 2**32), crashes=st.integers(0, 6))
def test_random_flows_do_what_the_model_says(
    program: Program, ending: str, seed: int, crashes: int
) -> None:
    """Whatever crashes when: the same result, each effect under one key, once for each epoch."""
    asyncio.run(play(program, ending, seed, crashes))
