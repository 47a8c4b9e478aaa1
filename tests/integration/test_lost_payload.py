"""`at_most_once`: the message is gone before the handler starts, its payload is not."""

from __future__ import annotations

import pytest

from holdfast import Holdfast
from holdfast.coordinator.recovery import Recovery
from holdfast.model import run as runs
from holdfast.model.node import NodeRecord
from holdfast.model.run import RunRecord
from holdfast.status.dead import DeadLetters
from holdfast.telemetry import Telemetry
from tests.integration.support import client_of, record_of, working


async def test_large_payload_is_executed(app: Holdfast) -> None:
    """A payload that no record can carry stops no worker."""

    @app.job(delivery="at_most_once")
    async def measure(text: str) -> int:
        return len(text)

    async with app, working(app):
        assert await (await measure.enqueue("x" * 1_000_000)).result(timeout=60) == 1_000_000
        assert await (await measure.enqueue("y")).result(timeout=60) == 1


@pytest.mark.parametrize("kept", ["in the record", "empty", "in the object store"])
async def test_payload_of_a_lost_run_is_in_its_dead_letter(app: Holdfast, kept: str) -> None:
    """Whatever the payload: a run whose worker died ends as lost, with its bytes."""
    body = b"" if kept == "empty" else b'"large"'
    async with app:
        client = await client_of(app)
        await client.topology.ensure()
        name = ""
        if kept == "in the object store":
            name = await client.objects.put("body/run-1", body)
        record = RunRecord(
            "running",
            "default",
            "measure",
            node="gone",
            reply="$JS.ACK.gone",
            restart="never",
            once=True,
            body=b"" if name else body,
            body_object=name,
        )
        await client.runs.put("run-1", runs.encode(record), expected=0)
        recovery = Recovery(client.broker, Telemetry())
        assert await recovery.sweep(NodeRecord("gone", "worker"), set(), 0.0) == 1
        found = await record_of(app, "run-1")
        dead = DeadLetters(client)
        (letter,) = await dead.list()
        assert (letter.run, letter.reason) == ("run-1", "lost")
        assert await dead.body(letter.id) == body
    assert found is not None
    assert (found.state, found.body, found.body_object) == ("lost", b"", "")
