"""The journal of a flow and its replay, without I/O; and random programs against a model."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import Backoff, Flow, Holdfast
from holdfast.errors import FlowMismatch, FlowTooLong, Unreadable
from holdfast.model.journal import (
    ENTRIES,
    GENERATIONS,
    MOST_OPERATIONS,
    FlowJournal,
    FlowReplay,
    JournalEntry,
    Parent,
    children_of,
    gather_number,
    parent_of,
)
from holdfast.testing import memory, replay_flow

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["step", "sleep", "value", "publish"]), st.sampled_from("abc")),
    max_size=12,
)


def journal(operations: list[tuple[str, str]]) -> FlowJournal:
    """A journal with these operations, through its bytes."""
    entries = [JournalEntry("start", epoch=3)]
    entries += [JournalEntry(kind, n, name) for n, (kind, name) in enumerate(operations)]
    found = FlowJournal("r1")
    for sequence, entry in enumerate(entries, 1):
        found.read(sequence, ENTRIES.encode((entry,)))
    return found


@given(OPERATIONS)
def test_replay_of_the_same_operations_finds_all_of_them(
    operations: list[tuple[str, str]],
) -> None:
    """What is stored is found in order, and then comes the frontier."""
    replay = FlowReplay(journal(operations))
    for n, (kind, name) in enumerate(operations):
        assert replay.replaying
        assert replay.next(kind, name)[1] == JournalEntry(kind, n, name)
    replay.finish()
    assert replay.next("step", "new") == (len(operations), None)


@given(OPERATIONS.filter(bool), st.data())
def test_replay_of_another_operation_is_a_mismatch_that_names_both(
    operations: list[tuple[str, str]], data: Any
) -> None:
    """The first difference stops the flow."""
    at = data.draw(st.integers(0, len(operations) - 1))
    replay = FlowReplay(journal(operations))
    for kind, name in operations[:at]:
        replay.next(kind, name)
    with pytest.raises(FlowMismatch, match=f"operation {at + 1}: ") as raised:
        replay.next("event", "other k")
    assert "event 'other k'" in str(raised.value)
    assert raised.value.operation == at + 1


def test_function_that_ends_early_is_a_mismatch() -> None:
    """A stored operation that is not asked for is not forgotten."""
    replay = FlowReplay(journal([("step", "a"), ("step", "b")]))
    replay.next("step", "a")
    with pytest.raises(FlowMismatch, match="step 'b', and the code ends"):
        replay.finish()


def test_number_of_operations_is_bounded() -> None:
    """One more is an error that says what to do."""
    replay = FlowReplay(FlowJournal("r1"))
    replay.position = MOST_OPERATIONS
    with pytest.raises(FlowTooLong, match="child flow"):
        replay.next("step", "a")


@given(st.binary(max_size=60))
def test_any_bytes_are_a_journal_or_unreadable(body: bytes) -> None:
    """Damage is reported, never anything else."""
    found = FlowJournal("r1")
    try:
        found.read(1, body)
    except Unreadable:
        return
    found.story()


def test_entries_of_a_newer_version_are_unreadable_and_new_members_are_ignored() -> None:
    """An unknown kind cannot be replayed; an unknown member can."""
    with pytest.raises(Unreadable, match="newer version"):
        FlowJournal("r1").read(1, b'[{"kind":"teleport"}]')
    found = FlowJournal("r1")
    found.read(1, b'[{"kind":"step","name":"a","colour":"red"}]')
    assert found.operations[0].name == "a"


def test_stored_bytes_of_entries_stay_the_same() -> None:
    """What this version writes, the next one reads."""
    entry = JournalEntry("step", 2, "charge", 5.0, 4.0, value=msgspec.Raw(b"7"), attempt=1)
    golden = b'[{"kind":"step","n":2,"name":"charge","at":5.0,"since":4.0,"value":7,"attempt":1}]'
    assert ENTRIES.encode((entry,)) == golden
    assert bytes(ENTRIES.decode(golden)[0].value) == b"7"


@given(st.text(max_size=80))
def test_parent_in_a_header_is_one_or_absent(text: str) -> None:
    """Anybody can write a header."""
    found = parent_of(text)
    assert found is None or parent_of(str(found)) == found


def test_parent_survives_its_header_and_children_have_fixed_ids() -> None:
    """A replay sends no second child."""
    parent = Parent("order/o1", "default", "order", 3, 1, 2)
    assert parent_of(str(parent)) == parent
    gather = JournalEntry("gather", 3, "pack", total=2, jobs=("default pack",))

    def ids(generation: int) -> list[str]:
        flow = FlowJournal("order/o1")
        flow.add(JournalEntry("start", generation=generation))
        return [run for run, _, _ in children_of(flow, gather)]

    assert len({*ids(0), *ids(7), *ids(8)}) == 6
    assert ids(7) == ids(7)
    assert ids(0)[1].endswith("-3-1"), "as version 0.1.0 made them"
    longest = Parent("r", "g", "j", gather_number(MOST_OPERATIONS - 1, GENERATIONS - 1), 0, 1)
    assert parent_of(str(longest)) == longest


# ---- random programs

PROGRAM = st.lists(
    st.sampled_from(["step", "flaky", "sleep", "child", "gather", "value", "undo", "early"]),
    min_size=1,
    max_size=7,
)
CRASHES = st.lists(st.sampled_from(["before", "called", "after", "start", "end"]), max_size=2)


@settings(max_examples=60, deadline=None)
@given(PROGRAM, CRASHES, st.booleans())
def test_random_program_with_crashes_ends_as_its_model_says(
    program: list[str], crashes: list[str], fails: bool
) -> None:
    """The result, the effects in order, and each compensation once, whatever dies meanwhile."""
    asyncio.run(_check(program, crashes, fails))


async def _check(program: list[str], crashes: list[str], fails: bool) -> None:
    app = Holdfast("random")
    effects: dict[str, int] = {}
    tries: dict[str, int] = {}

    def effect(name: str) -> str:
        effects[name] = effects.get(name, 0) + 1
        return name

    def flaky(name: str) -> str:
        tries[name] = tries.get(name, 0) + 1
        if tries[name] == 1:
            raise OSError("once")
        return effect(name)

    @app.job
    async def child(n: int) -> int:
        return n

    @app.flow
    async def flow(ctx: Flow) -> list[Any]:
        found: list[Any] = []
        for n, kind in enumerate(program):
            if kind == "step":
                found.append(await ctx.step(effect, f"s{n}", name="effect"))
            elif kind == "flaky":
                retry = Backoff.linear("1m", attempts=5)
                found.append(await ctx.step(flaky, f"f{n}", name="flaky", retry=retry))
            elif kind == "sleep":
                await ctx.sleep("1h")
            elif kind == "child":
                found.append(await ctx.call(child.request(n)))
            elif kind == "gather":
                found.append(sum(await ctx.gather(child.request(i) for i in range(n + 1))))
            elif kind == "value":
                found.append(ctx.random() < 2)
            elif kind == "undo":
                ctx.undo(effect, f"u{n}")
            else:
                event = await ctx.event("e", key="k", timeout="1h")
                found.append(event is not None)
        if fails:
            raise ValueError("as planned")
        return found

    async with memory(app) as mem:
        for crash in crashes:
            if crash in ("start", "end"):
                mem.crash_next(flow, at=crash)  # type: ignore[arg-type]
            else:
                mem.crash_step("effect", at=crash)  # type: ignore[arg-type]
        run = await flow.enqueue()
        await app.publish("e", 1, key="k")
        await mem.advance("30h")
        status = await run.status()
        assert status.state == ("dead" if fails else "done"), status
        if not fails:
            assert len(await run.result()) == sum(k not in ("sleep", "undo") for k in program)
    expected = {f"s{n}" for n, k in enumerate(program) if k == "step"}
    expected |= {f"f{n}" for n, k in enumerate(program) if k == "flaky"}
    expected |= {f"u{n}" for n, k in enumerate(program) if k == "undo" and fails}
    assert set(effects) == expected
    assert all(count == 1 or crashes for count in effects.values())


async def test_stored_journal_is_replayed_against_new_code() -> None:
    """A test of tomorrow's code with yesterday's flows."""
    app = Holdfast("replayed")
    names = ["a"]

    @app.flow
    async def sleeper(ctx: Flow) -> None:
        for name in names:
            await ctx.step(len, name, name=name)
        await ctx.sleep("30d")
        await ctx.step(len, "end", name="end")

    async with memory(app) as mem:
        run = await sleeper.enqueue()
        await mem.drain()
        stored = mem.journal(run.id)
    assert (await replay_flow(sleeper, stored)).startswith("until ")
    names[:] = ["b"]
    with pytest.raises(FlowMismatch, match="step 'a', and the code asks for step 'b'"):
        await replay_flow(sleeper, stored)
