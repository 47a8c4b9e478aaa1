"""Leases, terms and elections on a real server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast.broker import Broker, Bucket
from holdfast.broker.streams import Topology
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.errors import ConfigError, LeaseLost
from holdfast.ownership.election import LeaderElection
from holdfast.ownership.lease import Lease
from holdfast.server import Server
from tests.support import until


@contextlib.asynccontextmanager
async def brokers(nats: Server, namespace: str, count: int) -> AsyncIterator[list[Broker]]:
    """Several connections in one namespace."""
    config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    async with contextlib.AsyncExitStack() as stack:
        found = [await stack.enter_async_context(Broker(config)) for _ in range(count)]
        await Topology(found[0], RecordConfig()).ensure()
        yield found


def lease(broker: Broker, holder: str, ttl: float = 1.0) -> Lease:
    return Lease(Bucket(broker, broker.names.leases), "role", holder, broker.clock, ttl=ttl)


class Candidate:
    """An election that runs, with a node that answers pings."""

    def __init__(self, broker: Broker, name: str, **options: Any) -> None:
        self.broker = broker
        self.election = LeaderElection(
            broker, "role", name, **{"ttl_seconds": 2.0, "renew_seconds": 0.5, **options}
        )
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> Candidate:
        names = self.broker.names

        async def answer(message: object) -> None:
            await self.broker.publish(message.reply, b"pong")  # type: ignore[attr-defined]

        await self.broker.subscribe(names.node(self.election.node, "ping"), answer)
        self.task = asyncio.create_task(self.election.run())
        return self

    async def stop(self) -> None:
        assert self.task
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_lease_is_won_once_renewed_and_released(nats: Server, namespace: str) -> None:
    """One candidate wins; renewals keep it; a release frees it at once."""
    async with brokers(nats, namespace, 1) as [broker]:
        mine, other = lease(broker, "mine"), lease(broker, "other")
        assert await mine.acquire(0)
        assert not await other.acquire(0)
        first = mine.revision
        await mine.renew()
        assert mine.revision > first
        assert (await other.look())[1].holder == "mine"
        await mine.release()
        revision, holder = await other.look()
        assert holder is None
        assert await other.acquire(revision)
        with pytest.raises(LeaseLost):
            await mine.renew()


async def test_lease_expires_with_a_marker_and_is_taken_at_its_revision(
    nats: Server, namespace: str
) -> None:
    """An expired lease is not absent: the next holder expects the marker's revision."""
    async with brokers(nats, namespace, 1) as [broker]:
        mine, other = lease(broker, "mine"), lease(broker, "other")
        assert await mine.acquire(0)
        assert mine.trusted

        async def gone() -> bool:
            return (await other.look())[1] is None

        await until(gone, 5, "the expiry")
        assert not mine.trusted
        revision, _ = await other.look()
        assert revision > mine.revision
        assert not await other.acquire(0)
        assert await other.acquire(revision)
        with pytest.raises(LeaseLost):
            await mine.renew()


async def test_renewal_keeps_the_ttl(nats: Server, namespace: str) -> None:
    """A renewed lease expires as well: the TTL goes with every renewal."""
    async with brokers(nats, namespace, 1) as [broker]:
        mine = lease(broker, "mine")
        assert await mine.acquire(0)
        await mine.renew()

        async def gone() -> bool:
            return (await mine.look())[1] is None

        await until(gone, 5, "the expiry of a renewed lease")


async def test_election_has_one_leader_and_hands_over(nats: Server, namespace: str) -> None:
    """Of three one leads; when it leaves another takes over at once, with a higher epoch."""
    async with brokers(nats, namespace, 3) as found:
        some = [await Candidate(b, f"node-{n}").start() for n, b in enumerate(found)]
        first = await until(lambda: next((c for c in some if c.election.leader), None), 10)
        await until(lambda: all(c.election.established for c in some), what="three that know it")
        assert sum(c.election.leader for c in some) == 1
        epoch = first.election.epoch
        await first.stop()
        others = [c for c in some if c is not first]
        second = await until(lambda: next((c for c in others if c.election.leader), None), 5)
        assert second.election.epoch > epoch
        for candidate in others:
            await candidate.stop()


async def test_election_replaces_a_leader_whose_process_is_gone(
    nats: Server, namespace: str
) -> None:
    """Nobody listens on the leader's node subject: taken over long before the TTL."""
    async with brokers(nats, namespace, 2) as [one, two]:
        first = await Candidate(one, "first", ttl_seconds=60.0, renew_seconds=5.0).start()
        await until(lambda: first.election.leader, 5)
        second = await Candidate(two, "second", ttl_seconds=60.0, renew_seconds=5.0).start()
        await until(lambda: second.election.established, 5)
        assert first.task
        await one.close()
        await until(lambda: second.election.leader, 30, "the takeover")  # the TTL is 60 s
        await first.stop()
        await second.stop()


async def test_leader_that_cannot_renew_stops_before_its_lease_expires(
    nats: Server, namespace: str
) -> None:
    """Renewals that fail for want of a network end the lead too, not only refused ones."""
    async with brokers(nats, namespace, 2) as [one, two]:
        first = await Candidate(one, "first").start()
        await until(lambda: first.election.leader, 5)
        watch = lease(two, "watch", ttl=2.0)
        await one._nc.close()

        async def gone() -> bool:
            assert not (first.election.leader and (await watch.look())[1] is None)
            return (await watch.look())[1] is None

        await until(gone, 5, "the expiry")
        assert not first.election.leader
        await first.stop()


def test_election_refuses_times_that_cannot_work() -> None:
    """A TTL that one late renewal would use up is refused."""
    with pytest.raises(ConfigError, match="late renewal"):
        LeaderElection(Broker(ConnectionConfig()), "r", "n", ttl_seconds=3, renew_seconds=2)
