"""A server that lost the others is no place to stay: who is connected to it goes elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlparse

import pytest

from chaos import Fault, NodeTarget, RoutedCluster
from holdfast.broker import Broker
from holdfast.broker.streams import Topology
from holdfast.client import Client
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.errors import BrokerError
from holdfast.model.liveness import PROFILES
from holdfast.ownership.membership import Membership
from tests.support import until

ISOLATE = Fault(1, 0.0, "isolate", "", "nats", 60.0)


@asynccontextmanager
async def cluster_and_broker(namespace: str) -> AsyncIterator[tuple[RoutedCluster, Broker]]:
    """Three servers, and a connection to one of them that knows the others."""
    cluster = RoutedCluster(fast=True)
    await cluster.open()
    try:
        config = ConnectionConfig(nats_url=cluster.url, namespace=namespace, replicas=3)
        async with Broker(config) as broker:
            yield cluster, broker
    finally:
        await cluster.shut()


def _server(cluster: RoutedCluster, broker: Broker) -> int:
    """The number of the server that it is connected to."""
    url = broker._nc.connected_url
    ports = [node.port for node in cluster.nodes]
    return ports.index(urlparse(url.geturl()).port or 0) if url else -1


@pytest.mark.timeout(180)
async def test_node_leaves_an_isolated_server(namespace: str) -> None:
    """Its heartbeat fails for its timeout: it goes to another server and is heard of again."""
    async with cluster_and_broker(namespace) as (cluster, broker):
        await Topology(broker, RecordConfig()).ensure()
        member = Membership(broker, "worker", liveness=PROFILES["local"])
        await member.start()
        beating = asyncio.create_task(member.heartbeat.run())
        isolated = _server(cluster, broker)
        target = NodeTarget(cluster, isolated)
        await target.strike(ISOLATE)
        await until(lambda: not member.heartbeat.trusted, 30, "its trust to lapse")
        await until(lambda: member.heartbeat.trusted, 90, "its next heartbeat")
        assert _server(cluster, broker) != isolated
        await target.heal(ISOLATE)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


@pytest.mark.timeout(180)
async def test_client_leaves_an_isolated_server(namespace: str) -> None:
    """Enqueueing gets no answer for a while, and then goes on through another server."""
    async with cluster_and_broker(namespace) as (cluster, broker):
        client = Client(broker, RecordConfig())
        await client.topology.ensure()
        isolated = _server(cluster, broker)
        target = NodeTarget(cluster, isolated)
        await target.strike(ISOLATE)

        async def stored() -> bool:
            try:
                await client.store_event("thing", b"{}", {})
            except BrokerError:
                return False
            return _server(cluster, broker) != isolated

        await until(stored, 120, "a store through another server")
        await target.heal(ISOLATE)
