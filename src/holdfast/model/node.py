"""A node's heartbeat: who it is, and what it last said of itself."""

from __future__ import annotations

import msgspec


class NodeRecord(msgspec.Struct, omit_defaults=True, frozen=True):
    """One Holdfast process. Its key expires unless the node renews it."""

    id: str
    role: str
    group: str = ""
    state: str = "RUNNING"
    host: str = ""
    pid: int = 0
    version: str = ""
    started: float = 0.0
    beat: int = 0
    """Counts heartbeats, so that a frozen node and a fresh one can be told apart."""
    interval_seconds: float = 0.0
    ttl_seconds: float = 0.0
    running: int = 0
    jobs: tuple[str, ...] = ()


def encode(record: NodeRecord) -> bytes:
    """A heartbeat as it is stored."""
    return msgspec.json.encode(record)


def decode(body: bytes) -> NodeRecord:
    """A stored heartbeat."""
    return msgspec.json.decode(body, type=NodeRecord)
