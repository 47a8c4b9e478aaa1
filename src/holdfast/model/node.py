"""A node's record: who it is, in which state, by which liveness settings, and what it holds.

The node writes it with every heartbeat; the key expires by itself when the node falls silent and
nobody is left to judge it. A coordinator that declares the node lost writes the same record with
another state, by compare-and-swap on the node's own last heartbeat: so a node that was still alive
wins, and one that was not finds out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.model.lifecycle import ALIVE, DEFAULT_REASONS, GONE, NodeState, check
from holdfast.model.liveness import Liveness


class HeldRun(msgspec.Struct, frozen=True, array_like=True):
    """Something in a node's index: where to look it up, and where to give it back."""

    run: str
    revision: int
    """Of its claim; 0 for a message that is held without one."""
    reply: str


class NodeRecord(msgspec.Struct, omit_defaults=True, frozen=True):
    """One Holdfast process. Unknown members of newer versions are ignored."""

    id: str
    role: str
    group: str = ""
    state: NodeState = "CREATED"
    reason: str = ""
    since: float = 0.0
    """When the state was entered, by the server's clock."""
    by: str = ""
    """Who moved it to this state: the node itself, or a coordinator."""
    host: str = ""
    pid: int = 0
    version: str = ""
    started: float = 0.0
    beat: int = 0
    """Counts heartbeats."""
    liveness: Liveness = Liveness()
    running: int = 0
    held: tuple[HeldRun, ...] = ()
    jobs: tuple[str, ...] = ()
    metrics: dict[str, float] = {}

    @property
    def alive(self) -> bool:
        return self.state in ALIVE

    @property
    def gone(self) -> bool:
        return self.state in GONE


class Transition(msgspec.Struct, omit_defaults=True, frozen=True):
    """One step in a node's history, as it is kept in the ledger."""

    node: str
    role: str
    group: str
    before: str
    after: NodeState
    reason: str
    by: str
    at: float
    host: str = ""
    pid: int = 0


def move(
    record: NodeRecord, state: NodeState, *, by: str, at: float, reason: str = ""
) -> NodeRecord:
    """The record in its next state; raises `InvalidTransition` when there is no such way."""
    check(record.state, state)
    if state == record.state:
        return record
    return msgspec.structs.replace(
        record, state=state, reason=reason or DEFAULT_REASONS[state], since=at, by=by
    )


def transition(before: NodeRecord, after: NodeRecord) -> Transition:
    """The step between two records of one node."""
    return Transition(
        after.id,
        after.role,
        after.group,
        before.state,
        after.state,
        after.reason,
        after.by,
        after.since,
        after.host,
        after.pid,
    )


def encode(record: NodeRecord | Transition) -> bytes:
    """A record as it is stored."""
    return msgspec.json.encode(record)


def decode(body: bytes) -> NodeRecord:
    """A stored record."""
    return msgspec.json.decode(body, type=NodeRecord)


def decode_transition(body: bytes) -> Transition:
    """A stored step of a history."""
    return msgspec.json.decode(body, type=Transition)


def summary(record: NodeRecord) -> dict[str, Any]:
    """A record for people and programs, without the index of what it holds."""
    found: dict[str, Any] = msgspec.to_builtins(record)
    found.pop("held", None)
    return found
