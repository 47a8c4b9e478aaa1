"""A node's lifecycle: which state may follow which, and why a node is where it is.

    CREATED ──► RUNNING ──► TERMINATING ──► TERMINATED_GRACEFULLY ─┐
       │           │           ▲    │  └───► TERMINATED_FORCED ────┤
       │           │           │    └──────────────────────────────┤
       │           │           │                                   ▼
       └───────────┴──► DISCONNECTED ─────────────────────────► NOT_RUNNING ──► INACTIVE

    CREATED, RUNNING, TERMINATING ──► ERROR ──► TERMINATING, NOT_RUNNING

Guaranteed: no history leads from DISCONNECTED back to RUNNING. A node that was declared lost can
only end, because its runs may be running elsewhere already. A worker enters ERROR when its keeper
is about to kill it, even while it shuts down; the next state is written after its death. A state
may always follow itself: that is a heartbeat. Every move carries a reason that a person can read.

The keeper writes states too and cannot import this module: `tests/unit/test_keeper_damage.py`
checks that it keeps to the table.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from holdfast.errors import HoldfastError

NodeState = Literal[
    "CREATED",
    "RUNNING",
    "ERROR",
    "DISCONNECTED",
    "TERMINATING",
    "TERMINATED_GRACEFULLY",
    "TERMINATED_FORCED",
    "NOT_RUNNING",
    "INACTIVE",
]

STATES: Final = frozenset(get_args(NodeState))

TRANSITIONS: Final[dict[str, frozenset[str]]] = {
    "CREATED": frozenset({"RUNNING", "ERROR", "DISCONNECTED"}),
    "RUNNING": frozenset({"ERROR", "DISCONNECTED", "TERMINATING"}),
    "ERROR": frozenset({"TERMINATING", "NOT_RUNNING"}),
    "DISCONNECTED": frozenset({"TERMINATING", "NOT_RUNNING"}),
    "TERMINATING": frozenset(
        {"TERMINATED_GRACEFULLY", "TERMINATED_FORCED", "ERROR", "NOT_RUNNING"}
    ),
    "TERMINATED_GRACEFULLY": frozenset({"NOT_RUNNING"}),
    "TERMINATED_FORCED": frozenset({"NOT_RUNNING"}),
    "NOT_RUNNING": frozenset({"INACTIVE"}),
    "INACTIVE": frozenset(),
}

ALIVE: Final = frozenset({"CREATED", "RUNNING", "ERROR", "TERMINATING"})
"""States in which a node holds what it claimed."""

GONE: Final = frozenset({"TERMINATED_GRACEFULLY", "TERMINATED_FORCED", "NOT_RUNNING", "INACTIVE"})
"""States in which a node has ended: what it held is free."""


class InvalidTransition(HoldfastError):
    """The lifecycle does not allow this transition; the node must shut itself down."""

    def __init__(self, before: str, after: str) -> None:
        super().__init__(f"a node cannot go from {before} to {after}")
        self.before = before
        self.after = after


def may_follow(before: str, after: str) -> bool:
    """Whether a node in one state may be moved to another.

    A state that only a newer version knows counts as RUNNING: such a node can be declared lost.
    """
    return before == after or after in TRANSITIONS.get(before, TRANSITIONS["RUNNING"])


def check(before: str, after: str) -> None:
    """Raise `InvalidTransition` unless the lifecycle allows this transition."""
    if not may_follow(before, after):
        raise InvalidTransition(before, after)


DEFAULT_REASONS: Final[dict[str, str]] = {
    "CREATED": "the process has started and is connecting",
    "RUNNING": "it is at work",
    "ERROR": "it was blocked for too long",
    "DISCONNECTED": "it was silent for too long",
    "TERMINATING": "it was asked to stop and finishes what it runs",
    "TERMINATED_GRACEFULLY": "everything it ran was finished",
    "TERMINATED_FORCED": "its grace period was over before everything was finished",
    "NOT_RUNNING": "its process has ended",
    "INACTIVE": "gone; only its history remains",
}
