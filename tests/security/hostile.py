"""Records in which every text tries to control the terminal of the reader."""

from __future__ import annotations

import json
import time

import msgspec

from holdfast.client import Client
from holdfast.model import fleet, node, run
from holdfast.model.fleet import FleetRequest, FleetRun, Return
from holdfast.model.node import NodeRecord
from holdfast.model.run import Attempt, Progress, RunRecord
from holdfast.model.schedule import Schedule, encode
from holdfast.names import kv_subject
from holdfast.settings.records import Report
from holdfast.status.audit import Audit

ACTS = (
    "\x1b[38;5;203m",  # a colour that we do not use
    "\x1b]52;c;aGk=",  # sets the clipboard
    "\x1b[2K",  # clears the line
    "\x9b1A",  # up one line, without an escape
    "\x07",
    "\x08",
    "\u202e",
    "\u2066",
    "\u200b",
    "\u2028",
    "\x7f",
    "\x85",
)
SEEN = "[red]markup[/red]"
"""Rich markup, which must be printed unchanged."""
TEXT = "HOSTILE" + "".join(ACTS) + "\rweb9  ok  all is well" + SEEN
ID = "r\x1b[38;5;203mx"
"""An id that our checks would reject, as a client may write it."""


async def plant(client: Client) -> None:
    """Fill a namespace."""
    names, now = client.broker.names, time.time()
    for bucket in ("facts", "agents", "fleet", "returns", "applied", "settings"):
        await client.topology.ensure_buckets(bucket)

    async def put(bucket: str, key: str, body: bytes) -> None:
        await client.broker.store(kv_subject(bucket, key), body)

    attempt = Attempt(1, "w1", 1, now - 9, now - 8, "failed", error=TEXT)
    for key, name in (("r1", "add"), (ID, "add"), ("r9", TEXT)):
        record = RunRecord("dead", name, name, error=TEXT, attempts=(attempt,), node=name)
        await put(names.runs, key, run.encode(record))
    done = RunRecord("done", "default", "add", result=msgspec.Raw(msgspec.json.encode(TEXT)))
    await put(names.runs, "r2", run.encode(done))
    progress = Progress(0.5, TEXT, now)
    running = RunRecord("running", "default", "add", progress=progress, node="w1", started=now)
    await put(names.runs, "r3", run.encode(running))
    headers = {
        "Hf-Run": "d1",
        "Hf-Reason": "failed",
        "Hf-Error": json.dumps(TEXT),
        "Hf-Traceback": json.dumps(f"{TEXT}\n{TEXT}"),
        "Hf-Attempts": json.dumps([msgspec.to_builtins(attempt)]),
    }
    for body in (TEXT.encode(), json.dumps(TEXT, ensure_ascii=False).encode(), b"\xff\x1b[2K"):
        await client.broker.store(names.dead_letter("default", "add"), body, headers)
    for role, bucket in (("worker", names.nodes), ("agent", names.agents)):
        for key, name in (("a1", "a1"), ("a9", TEXT)):
            said = NodeRecord(name, role, "g", "RUNNING", since=now, host=TEXT, version=TEXT)
            await put(bucket, key, node.encode(said))
    await put(names.facts, "a1", msgspec.json.encode({"os": TEXT, TEXT: [TEXT], "host": TEXT}))
    for key, name in (("s1", "add"), ("s9", TEXT)):
        body = msgspec.Raw(msgspec.json.encode(TEXT))
        made = Schedule(key, name, every=3600, payload=body, headers={"A": "x\u202e"})
        await put(names.schedules, f"schedule.{key}", encode(made))
    request = FleetRequest("f1", TEXT, TEXT, (TEXT,), {TEXT: TEXT}, user=TEXT)
    asked = FleetRun(request, "partial", ("a1", "a2"), reason=TEXT, returned=2)
    await put(names.fleet, "run.f1", fleet.encode(asked))
    for agent, value in (("a1", {"stdout": f"{TEXT}\n{TEXT}"}), ("a2", TEXT)):
        given = Return("f1", agent, "ok", value, TEXT, note=TEXT)
        await put(names.returns, f"f1.{agent}", msgspec.json.encode(given))
    for agent, at in (("a1", now), ("a2", 1e308)):
        failed = Report(1, 1, at=at, failed_number=2, reason=TEXT, error=TEXT)
        await put(names.applied, agent, msgspec.json.encode(failed))
    await Audit(client, TEXT).write("enqueue", runs=["r1"], detail=TEXT)
