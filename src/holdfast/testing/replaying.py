"""Replays a stored journal in a test: does the code still fit the flows that are parked?

    async def test_sleeping_orders_fit_the_new_code():
        for path in Path("journals").glob("*.jsonl"):      # holdfast flows journal RUN > FILE
            await replay_flow(order, path.read_bytes())

Nothing happens outside: the first operation that is not stored ends the replay.
"""

from __future__ import annotations

from typing import Any

from holdfast.errors import FlowMismatch, InvalidInput
from holdfast.job import Job
from holdfast.model import run as runs
from holdfast.model.run import RunRecord
from holdfast.testing.memory_app import Memory, ProcessDied

RUN = "replayed"


async def replay_flow(flow: Job[Any], journal: bytes) -> str:
    """Call a flow's function against a stored journal; returns what it asks for next.

    Raises `FlowMismatch` if the code no longer fits, or fails before it gets that far.

        journal = Path("order.jsonl").read_bytes()  # holdfast flows journal RUN > order.jsonl
        assert await replay_flow(order, journal) == "step ship"
    """
    memory = Memory(flow.app)
    memory.journals.restore(RUN, [line for line in journal.split(b"\n") if line.strip()])
    found = await memory.journals.load(RUN)
    if found.start is None:
        raise InvalidInput("this is not the journal of a flow that has begun and not ended")
    memory.clock.advance(max(0.0, found.created - memory.clock.utc()))
    spec, created = flow.spec, found.created
    record = RunRecord(
        "parked",
        spec.group,
        spec.name,
        created=created,
        flow=True,
        generation=found.generation,
    )
    frontier: list[str] = []

    def stop(moment: str, step: str) -> None:
        frontier.append(f"step {step}")
        raise ProcessDied

    async with memory:
        await memory.store.put(RUN, runs.encode(record), expected=0)
        memory.on_step = stop
        await memory.journals.wake(spec.group, spec.name, RUN, "replay")
        await memory.step()
        ended = await memory.record(RUN)
    if ended is not None and ended.state != "done" and ended.error:
        raise FlowMismatch(ended.error)
    now = await memory.journals.load(RUN)
    if (
        now.unwind is not None and found.unwind is None
    ):  # the next operation would be a compensation
        raise FlowMismatch(f"the code fails before the end of the journal: {now.unwind.error}")
    if frontier:
        return frontier[0]
    return "" if ended is None else ended.waits or ended.state
