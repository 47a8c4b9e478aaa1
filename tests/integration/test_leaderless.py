"""A cluster that cannot elect is told apart from one without JetStream."""

from __future__ import annotations

import pytest

from holdfast.broker import Broker, connecting
from holdfast.config import ConnectionConfig
from holdfast.errors import Unavailable
from holdfast.server import Cluster


async def test_minority_of_servers_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """With most servers down the message says so, and sends nobody to the configuration."""
    monkeypatch.setattr(connecting, "_ELECTION_SECONDS", 0.5)
    with Cluster(fast=True) as cluster:
        leader = cluster.nodes[0].monitor("/jsz")["meta_cluster"]["leader"]
        left = next(node for node in cluster.nodes if node.name != leader)
        for node in cluster.nodes:
            if node is not left:
                node.kill()
        with pytest.raises(Unavailable, match="most of them must run"):
            await Broker(ConnectionConfig(nats_url=left.url)).open()
