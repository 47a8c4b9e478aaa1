"""A node's record: who it is, in which state, by which values it is judged, and what it holds.

The node writes it with every heartbeat; the key expires when the node falls silent and nobody is
left to judge it. A coordinator that declares the node lost writes the same record with another
state, by compare-and-swap on the node's last heartbeat: a node that was still alive wins, and one
that was not finds out.

A worker's keeper, which sends its heartbeats, may also report that the process is gone:
DISCONNECTED, or NOT_RUNNING where the node was stopping, with `by` as the node's own id and the
index of what it held. A coordinator that sees this puts its own id there by compare-and-swap; the
one that wins gives back what the node held.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from holdfast.model.codec import Address, Codec, Count, Instant, Name, RunId
from holdfast.model.lifecycle import ALIVE, DEFAULT_REASONS, GONE, STATES, NodeState, check
from holdfast.model.liveness import Liveness


class HeldRun(msgspec.Struct, frozen=True, array_like=True):
    """One message in a node's index: where its claim is, and how to give it back."""

    run: RunId
    revision: Count
    """The revision of its claim; 0 for a message that is held without one."""
    reply: Address


MOST_RUNS: Final = 100
"""Fan-out runs that a heartbeat names: bounds the record, which each heartbeat writes."""
LONGEST_SILENCE_SECONDS: Final = 3_600.0
"""An agent whose record is this old is offline, whatever timeout the record states."""


class NodeRecord(msgspec.Struct, omit_defaults=True, frozen=True):
    """One Holdfast process. Unknown members of newer versions are ignored."""

    id: Name
    role: Name
    group: Name = ""
    state: str = "CREATED"
    """One of `NodeState`; a newer version may know more."""
    reason: str = ""
    since: Instant = 0.0
    """When the state was entered, by the server's clock."""
    by: str = ""
    """Who moved it to this state: the node itself, or a coordinator."""
    host: str = ""
    pid: Count = 0
    version: str = ""
    started: Instant = 0.0
    beat: Count = 0
    """The number of heartbeats so far."""
    liveness: Liveness = Liveness()
    running: Count = 0
    held: tuple[HeldRun, ...] = ()
    jobs: tuple[str, ...] = ()
    metrics: dict[str, float] = {}
    server: str = ""
    """The server of the node's own connection; the worker's, not its keeper's."""
    client: Count = 0
    """The number of that connection at its server. A coordinator asks the server whether it is
    open."""
    inbox: Address = ""
    """The subject where a worker receives what it pulls; once it is lost, a coordinator listens
    there."""
    trouble: str = ""
    """What is wrong with a live node, in words, e.g. that its event loop is blocked."""
    culprits: tuple[str, ...] = ()
    """If the node was killed because it was blocked: the runs that may have blocked it."""
    runs: tuple[str, ...] = ()
    """The fan-out runs that a dispatcher owns, up to `MOST_RUNS`."""
    renewal: str = ""
    """An agent's request for its next login, signed (`identity.renewing`)."""

    def online(self, age: float) -> bool:
        """Whether an agent counts as online, `age` seconds after the server stored its record.

        The server's timestamp decides: an agent may write anything, even a record without a TTL.
        """
        return self.alive and age < min(self.liveness.timeout_seconds, LONGEST_SILENCE_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether it holds what it claimed; an unknown state counts as alive."""
        return self.state in ALIVE or self.state not in STATES

    @property
    def gone(self) -> bool:
        return self.state in GONE


class Transition(msgspec.Struct, omit_defaults=True, frozen=True):
    """One step in a node's history, as it is kept in the ledger."""

    node: str
    role: str
    group: str
    before: str
    after: str
    reason: str
    by: str
    at: Instant
    host: str = ""
    pid: Count = 0


def move(
    record: NodeRecord, state: NodeState, *, by: str, at: float, reason: str = ""
) -> NodeRecord:
    """The record in its next state; raises `InvalidTransition`."""
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


CODEC: Final = Codec[NodeRecord](NodeRecord, "a node's record")
TRANSITION: Final = Codec[Transition](Transition, "a step in a node's history")
decode = CODEC.decode
decode_transition = TRANSITION.decode


def decode_at(key: str, body: bytes) -> NodeRecord:
    """The record under a key; the key decides whose it is, because permissions guard keys."""
    found = decode(body)
    if found.id != key:
        raise CODEC.unreadable("it says that it is another node")
    return found


def encode(record: NodeRecord | Transition) -> bytes:
    """A record as it is stored."""
    return msgspec.json.encode(record)


def summary(record: NodeRecord) -> dict[str, Any]:
    """A record for people and programs, without the index of what it holds."""
    found: dict[str, Any] = msgspec.to_builtins(record)
    found.pop("held", None)
    return found
