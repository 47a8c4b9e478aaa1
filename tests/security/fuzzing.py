"""Mutated bytes for every record and message: valid ones with a few changes, by a seed.

`GOLDEN` is what a released version stores; `corpus` adds hand-made damage and inputs that once
broke something, kept in `tests/security/corpus`. A seed gives one sequence, so a failure can be
reproduced: `HOLDFAST_SEED=… pytest tests/security/test_fuzz_records.py`.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from pathlib import Path

from holdfast.broker import Broker
from holdfast.names import kv_subject
from tests.faults.damage import DAMAGE
from tests.unit.test_codec import KINDS

CORPUS = Path(__file__).parent / "corpus" / "records.txt"
GOLDEN: dict[str, bytes] = {kind.name: kind.good for kind in KINDS}
PIECES = (
    b"",
    b"\xff",
    b"\x00",
    b"\r\n",
    b"\x1b]52;c;aGk=\x07",
    b"[" * 200,
    b"{" * 3,
    b'"',
    b"\\ud800",
    b"\\u0000",
    b"\xe2\x80\xae",
    b"1e308",
    b"-1",
    b"9" * 500,
    b"null",
    b"true",
    b'"resting"',
    b",",
    b":",
)


def corpus() -> list[bytes]:
    """Hand-made damage and earlier findings: one base64 text per line."""
    lines = CORPUS.read_text().split() if CORPUS.exists() else []
    small = [data for data in DAMAGE.values() if len(data) < 200_000]
    return [*small, *(base64.b64decode(line) for line in lines)]


def mutated(dice: random.Random, data: bytes) -> bytes:
    """Valid bytes with a few of them changed, cut, repeated or swapped."""
    body = bytearray(data)
    for _ in range(dice.randint(1, 8)):
        at = dice.randrange(len(body) + 1)
        match dice.randrange(4):
            case 0:
                body[at : at + dice.randrange(5)] = dice.choice(PIECES)
            case 1:
                del body[at : at + dice.randrange(1, 20)]
            case 2:
                body[at:at] = body[dice.randrange(len(body) + 1) :][:40]
            case _:
                if body:
                    body[at % len(body)] = dice.randrange(256)
    return bytes(body)


HEADERS = (
    "Hf-Run",
    "Hf-Attempt",
    "Hf-Failures",
    "Hf-Created",
    "Hf-Attempts",
    "Hf-Error",
    "Hf-Epoch",
)
VALUES = (
    "",
    "²",
    "9" * 3_000,
    "1e999",
    "-1",
    "[[[[",
    '"\\ud800',
    "\x1b[2J",
    "a b",
    "*",
    "é",
    "$JS",
)


def inputs(
    broker: Broker, seed: int, count: int
) -> Iterator[tuple[str, bytes, dict[str, str] | None]]:
    """Subject, body and headers, repeatedly for every place on the wire."""
    dice = random.Random(seed)
    places, damage = list(_places(broker)), corpus()
    for _ in range(count):
        kind, subject = dice.choice(places)
        number = dice.randrange(40)  # reuse keys: the store must not grow forever
        good = GOLDEN.get(kind, b'{"a":1}')
        body = dice.choice(damage) if dice.random() < 0.1 else mutated(dice, good)
        headers = None
        if dice.random() < 0.2 and not subject.startswith("$KV"):
            headers = {name: dice.choice(VALUES) for name in dice.sample(HEADERS, 3)}
        yield subject.replace("#", f"fuzz{number}"), body, headers


def _places(broker: Broker) -> Iterator[tuple[str, str]]:
    names = broker.names
    for kind, bucket, key in (
        ("run", names.runs, "#"),
        ("node", names.nodes, "#"),
        ("schedule", names.schedules, "schedule.#"),
        ("registration", names.schedules, "app.#"),
        ("slot", names.slots, "slot.tick.20260101T000000Z"),
        ("slot", names.slots, "slot.#.x"),
        ("progress", names.slots, "progress.scheduler"),
        ("lease", names.leases, "scheduler"),
        ("fleet run", names.fleet, "run.#"),
        ("active", names.fleet, "active.#"),
        ("facts", names.facts, "#"),
        ("node", names.agents, "#"),
        ("facts", names.facts, "agent1"),
        ("node", names.agents, "agent1"),
        ("facts", names.applied, "#"),
        ("facts", names.secrets, "#"),
        ("session", names.bucket("sessions"), "#"),
    ):
        yield kind, kv_subject(bucket, key)
    yield "return", names.returned("#", "agent1")
    yield "transition", names.log("node", "#")
    yield "step", names.log("fleet", "#")
    yield "action", names.log("operator", "cancel")
    yield "request", names.job("default", "loose")
    yield "request", names.dead_letter("default", "loose")
    yield "request", names.dispatch("run")
    yield "cancel", names.dispatch("cancel")
    yield "text", names.dispatch("resolve")
    yield "order", names.agent("agent1", "exec")
    yield "order", names.agent("agent1", "cancel")
    yield "ack", names.ack("#", "agent1")
    yield "run", names.changed(names.runs, "#")
    yield "node", names.changed(names.nodes, "#")
    yield "schedule", names.changed(names.schedules, "#")
    yield "facts", names.changed(names.facts, "#")
    yield "lease", names.changed(names.leases, "scheduler")
    yield "progress", names.changed(names.slots, "progress.scheduler")
