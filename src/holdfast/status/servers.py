"""NATS as this namespace uses it: its streams with their leaders, replicas and storage, and the
consumers that are furthest behind.

Read from JetStream's own API with the login of this process, so it needs no monitor port and no
system account. A stream that the login may not see, or that does not exist yet, is left out.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from holdfast.client import Client
from holdfast.errors import BrokerError
from holdfast.names import kv_stream, parse_consumer

BEHIND: Final = 8
"""Consumers shown: those with the most undelivered messages."""


class StreamInfo(msgspec.Struct, frozen=True):
    """One stream."""

    name: str
    messages: int
    bytes: int
    limit: int
    """How many bytes it may take; 0 without a limit."""
    leader: str
    """The server that leads it; empty without a cluster."""
    replicas: int
    offline: tuple[str, ...]
    """Servers of its copies that do not answer, or lag behind."""


class ConsumerInfo(msgspec.Struct, frozen=True):
    """A consumer that has messages waiting."""

    stream: str
    name: str
    group: str
    job: str
    waiting: int
    in_flight: int
    redelivered: int


class Servers(msgspec.Struct, frozen=True):
    """What a namespace has on its servers."""

    version: str
    cluster: str
    streams: list[StreamInfo]
    behind: list[ConsumerInfo]
    storage: int
    """Bytes that the whole account uses."""
    storage_limit: int


async def servers(client: Client) -> Servers:
    """The streams and consumers as the servers describe them now."""
    broker, names = client.broker, client.broker.names
    buckets = (names.runs, names.schedules, names.slots, names.nodes)
    wanted = [names.jobs, names.events, names.dead, names.ledger, names.history]
    wanted += [names.history_index, names.run_logs, *(kv_stream(bucket) for bucket in buckets)]
    found = await asyncio.gather(*(_stream(client, name) for name in wanted))
    account = await broker.api("INFO")
    behind = [one for stream in (names.jobs, names.events) for one in await _behind(client, stream)]
    return Servers(
        broker.server_version,
        broker.cluster_name,
        [one for one in found if one is not None],
        sorted(behind, key=lambda one: -one.waiting)[:BEHIND],
        int(account.get("storage", 0)),
        max(0, int(account.get("limits", {}).get("max_storage", 0))),
    )


async def _stream(client: Client, name: str) -> StreamInfo | None:
    try:
        info = await client.broker.api(f"STREAM.INFO.{name}")
    except BrokerError:
        return None
    config, state, cluster = info["config"], info["state"], info.get("cluster") or {}
    replicas: list[dict[str, Any]] = cluster.get("replicas") or []
    bad = tuple(one["name"] for one in replicas if one.get("offline") or not one.get("current"))
    return StreamInfo(
        name,
        int(state["messages"]),
        int(state["bytes"]),
        max(0, int(config.get("max_bytes", 0))),
        str(cluster.get("leader", "")),
        int(config.get("num_replicas", 1)),
        bad,
    )


async def _behind(client: Client, stream: str) -> list[ConsumerInfo]:
    found = []
    for info in await client.topology.consumers(stream):
        waiting = int(info.get("num_pending", 0))
        if waiting:
            where = parse_consumer(info.get("name", "")) or ("", "")
            pending, again = (int(info.get(n, 0)) for n in ("num_ack_pending", "num_redelivered"))
            name = str(info.get("name", ""))
            found.append(ConsumerInfo(stream, name, *where, waiting, pending, again))
    return found
