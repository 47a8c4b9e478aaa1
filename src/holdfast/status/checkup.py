"""A check's result as data, and what the checks look at."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from holdfast.broker import Broker
from holdfast.client import Client
from holdfast.config import LivenessConfig, RecordConfig
from holdfast.status.monitor import Jetstream

Level = Literal["ok", "warn", "fail"]

_NAMED = 4


class Finding(msgspec.Struct, frozen=True):
    """What one check found, and what to do about it."""

    check: str
    level: Level
    text: str
    todo: str = ""


@dataclass(slots=True)
class Site:
    """One server or cluster, and one namespace on it."""

    broker: Broker
    client: Client
    records: RecordConfig
    liveness: LivenessConfig | None = None
    """What nodes would get that are started with this configuration."""
    account: dict[str, Any] = field(default_factory=dict)
    """What JetStream says about our account."""
    asked: Sequence[str] = ()
    """The monitors that were asked, also those that did not answer."""
    monitors: Sequence[Jetstream] = ()

    missing: Sequence[str] = ()
    """Streams that do not exist yet."""

    @property
    def cluster_size(self) -> int:
        """How many nodes the cluster has; 1 for a server that stands alone."""
        seen = max((found.cluster_size for found in self.monitors), default=1)
        return max(seen, self.broker.known_servers if self.broker.cluster_name else 1)


Check = Callable[[Site], Awaitable[list[Finding]]]


def few(texts: Sequence[str]) -> str:
    """The first of many, and how many more there are."""
    shown = ", ".join(texts[:_NAMED])
    return shown if len(texts) <= _NAMED else f"{shown} and {len(texts) - _NAMED} more"
