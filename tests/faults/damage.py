"""Kinds of damage, and every place on the wire where it can be written."""

from __future__ import annotations

import contextlib
import hashlib

from holdfast.broker import Broker
from holdfast.broker.batch import Write
from holdfast.client import once
from holdfast.errors import BrokerError
from holdfast.names import SETTINGS_REVISION, Names, gate_key, kv_subject, rule_key

NEWER = (
    b'{"state":"resting","status":"resting","outcome":"resting","id":"%(name)s","name":"%(name)s",'
    b'"role":"worker","group":"default","job":"loose","run":"%(run)s","agent":"agent1","due":1.0,'
    b'"holder":"h","token":"t","owner":"d","node":"%(name)s","before":"A","after":"RESTING",'
    b'"reason":"r","by":"b","at":1.0,"what":"rested","verb":"rest","who":"w","host":"h","every":60,'
    b'"catch_up":"moon","overlap":"moon","restart":"moon","hash":"h","created":1.0,'
    b'"request":{"run":"%(run)s","target":"*","function":"ping"},"added_later":{"a":[1,2,3]}}'
)
"""A record that a newer version could read, for each kind."""

DAMAGE: dict[str, bytes] = {
    "text": b"hello",
    "not-utf8": b'{"state":"\xff\xfe","holder":"\xff"}',
    "deep": b"[" * 100_000,
    "deep-objects": b'{"value":' * 50_000,
    "deep-but-closed": b'{"a":' + b"[" * 600 + b"]" * 600 + b"}",
    "wrong-types": b'{"state":7,"id":[],"name":{},"holder":1,"request":[],"due":"x","run":3}',
    "huge-numbers": b'{"state":"running","group":"g","job":"j","started":1e308,"at":1e308,'
    b'"since":1e308,"due":1e308,"id":"x","role":"worker","name":"x","watermark":1e308,'
    b'"holder":"h","token":"t","owner":"d","updated":1e308,"number":' + b"9" * 400 + b"}",
    "large": b'"' + b"x" * 900_000 + b'"',
    "surrogate": b'{"state":"\\ud800","name":"\\ud800","error":"\\udfff"}',
    "truncated": b'{"state":"running","group":"def',
    "newer": NEWER,
}


def body(kind: str, name: str, run: str) -> bytes:
    """The bytes of a kind, for a record of that name."""
    if kind != "newer":
        return DAMAGE[kind]
    return NEWER % {b"name": name.encode(), b"run": run.encode()}


def records(names: Names, kind: str, mark: str = "") -> list[Write]:
    """Damage of one kind for every bucket and stream, next to existing records and over them."""
    name = f"damaged-{kind}{mark}"
    run = "f" + hashlib.sha256(name.encode()).hexdigest()[:12]
    stamp = f"20260101T00{int(run[1:7], 16) % 60:02d}{int(run[7:12], 16) % 60:02d}Z"
    data = body(kind, name, run)
    keys = {
        names.runs: [name, f"work/{name}"],
        names.nodes: [name],
        names.schedules: [
            f"schedule.{name}",
            f"app.{name}",
            f"refused.{name}",
            f"pause.default.{name}",
        ],
        names.slots: [f"slot.tick.{stamp}", f"slot.tick.{name}", "progress.scheduler"],
        names.leases: [name, "scheduler", f"term.{name}"],
        names.limits: [rule_key(name), gate_key(name, run)],
        names.fleet: [f"run.{run}", f"active.{run}"],
        names.returns: [f"{run}.agent1"],
        names.facts: [name],
        names.agents: [name],
        names.joins: [f"host.{name}", f"token.{name}"],
        names.settings: [f"manifest.{run}", f"file.{run}", f"history.{int(run[1:6], 16)}"],
        names.secrets: [name],
        names.applied: [name],
        names.bucket("sessions"): [hashlib.sha256(name.encode()).hexdigest()],
        names.data(once.BUCKET): [name],
    }
    if not mark:
        keys[names.settings].append(SETTINGS_REVISION)
    found = [Write(kv_subject(bucket, key), data, {}) for bucket in keys for key in keys[bucket]]
    odd = {"Hf-Attempt": "²", "Hf-Failures": "9" * 5_000, "Hf-Created": "1e999", "Hf-Run": "\x1b"}
    story = {"Hf-Attempts": "[" * 2_000, "Hf-Error": '"\\ud800', "Hf-Dead-At": "yesterday", **odd}
    found += [
        Write(names.log("node", name), data, {}),
        Write(names.log("fleet", run), data, {}),
        Write(names.log("operator", "cancel"), data, {}),
        Write(names.run_log(run), data, {}),
        Write(names.flow(run), data, odd),
        Write(names.flow_children(run, 1), data, odd),
        Write(names.flow_stop(run), data, odd),
        Write(names.signal("damaged", name), data, odd),
        Write(names.signal_wait("damaged", name, run), data, odd),
        Write(names.dead_letter("default", "loose"), data, story),
        Write(names.job("default", "loose"), data, odd),
        Write(names.event("damaged"), data, odd),
        Write(names.ended("default", "loose", "done"), data, odd),
        Write(names.ended("default", "loose", "dead"), data, {"Hf-Run": f"{run} r2"}),
        *(Write(names.indexed(part), data, {}) for part in (*range(64), "head", "minute", "hour")),
    ]
    return found


def readable(names: Names, kind: str) -> set[str]:
    """Buckets in which a kind is no damage: any value is valid, or the member is never read."""
    everything = {names.bucket("sessions"), names.limits, names.data(once.BUCKET)}
    if kind == "newer":
        return {*open_records(names), names.facts, names.applied, names.ledger, names.returns} | (
            everything
        )
    if kind in ("wrong-types", "huge-numbers", "deep-but-closed", "surrogate", "large"):
        return {names.facts, names.ledger, names.applied, names.secrets, *everything}
    return set()


def open_records(names: Names) -> list[str]:
    """Buckets whose records have a state; an unknown state is still readable."""
    return [names.runs, names.nodes, names.fleet, names.agents, names.leases, names.secrets]


def messages(broker: Broker, kind: str, mark: str = "") -> list[tuple[str, bytes, dict[str, str]]]:
    """Damage of one kind for every subject with a plain subscription, without a stream."""
    names, name = broker.names, f"damaged-{kind}{mark}"
    data = body(kind, name, "f1")
    odd = {"Hf-Run": "f1", "Hf-Epoch": "²", "Hf-Expires": "9" * 5_000, "Nats-Sequence": "x"}
    subjects = [names.dispatch(verb) for verb in ("run", "cancel", "resolve", "rest")]
    subjects += [names.agent("agent1", verb) for verb in ("exec", "cancel", "rest")]
    subjects += [names.node("agent1", "settings"), names.handover, names.ack("f1", "agent1")]
    subjects += [names.cancel("damaged")]
    for bucket in (names.runs, names.nodes, names.schedules, names.slots, names.leases):
        subjects.append(names.changed(bucket, name))
    for bucket in (names.facts, names.agents, names.fleet, names.returns):
        subjects.append(names.changed(bucket, name))
    subjects += [names.changed(names.slots, "progress.scheduler")]
    subjects += [names.changed(names.leases, "scheduler")]
    return [(subject, data, headers) for subject in subjects for headers in ({}, odd)]


async def write(broker: Broker, kind: str, mark: str = "") -> int:
    """Store and send damage everywhere; returns how much the server accepted."""
    taken = 0
    for one in records(broker.names, kind, mark):
        with contextlib.suppress(BrokerError):  # an existing return stays
            await broker.store(*one)
            taken += 1
    for subject, data, headers in messages(broker, kind, mark):
        await broker.publish(subject, data, headers or None)
        taken += 1
    await broker.flush()
    return taken
