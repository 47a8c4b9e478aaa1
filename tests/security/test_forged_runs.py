"""A client that may only enqueue writes records of runs: the coordinator acts on no one else's."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.broker import Broker, Bucket
from holdfast.broker.streams import FLEET_BUCKETS, SETTINGS_BUCKETS, Topology
from holdfast.client import Client
from holdfast.config import RecordConfig
from holdfast.coordinator import Coordinator
from holdfast.model import node, run
from holdfast.model.node import NodeRecord
from holdfast.model.run import RunRecord
from holdfast.names import Names, kv_subject
from holdfast.status.finding import Finder, payload_of
from tests.integration.auth_support import Site, guarded
from tests.security.test_reach import stored
from tests.support import running, until

GONE = "ghost"
"""A worker that is lost."""
AIMS = (
    "$KV.hf_leases.leader.scheduler",
    "$KV.hf_leases.term.scheduler",
    "$KV.hf_nodes.beta",
    "$KV.hf_slots.progress.scheduler",
    "$KV.hf_facts.beta",
    "$KV.hf_fleet.run.f1",
    "$JS.API.STREAM.PURGE.KV_hf_leases",
    "$JS.ACK.KV_hf_leases.x.1.1.1.1.0",
    "$JS.ACK.HF_LEDGER.x.1.1.1.1.0",
    "hf.job.default.add",
    "hf.dead.default.add",
    "hf.log.node.beta",
    "hf.node.beta.drain",
)
"""Where a lost run's message is not given back."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with guarded(tmp_path_factory.mktemp("forged")) as site:
        yield site


async def put(client: Broker, key: str, **members: Any) -> None:
    given = {"state": "running", "group": "default", "job": "add", "node": GONE} | members
    await client.store(kv_subject(client.names.runs, key), run.encode(RunRecord(**given)))


async def ended(runs: Bucket, key: str) -> bool:
    entry = await runs.get(key)
    return entry is not None and run.decode(entry.value).state == "lost"


async def gone(_: str) -> bool:
    """Whether a node is alive: none is."""
    return False


async def test_coordinator_gives_back_only_messages(site: Site) -> None:
    """The reply subjects of a client's records are not the coordinator's to publish to."""
    names = site.names
    async with site.broker("operator") as operator:
        topology = Topology(operator, RecordConfig())
        await topology.ensure()
        for noun in FLEET_BUCKETS + SETTINGS_BUCKETS:
            await topology.ensure_buckets(noun)
        async with site.broker("client") as client:
            for number, aim in enumerate(AIMS):
                await put(client, f"evil{number}", reply=aim)
            await put(client, "last", once=True)
        before = await stored(operator)
        lost = NodeRecord(GONE, "worker", "default", "DISCONNECTED", by=GONE)
        await operator.store(kv_subject(names.nodes, GONE), node.encode(lost))
        runs = Bucket(operator, names.runs)
        # with the operator's reach, as `control` has most of it
        async with running(Coordinator(site.connection("operator"))):
            await until(functools.partial(ended, runs, "last"), 60, "the sweep's last record")
        after = await stored(operator)
        own = {names.dead, names.ledger, "KV_hf_runs", "KV_hf_nodes"}
        assert {s: k for s, k in after.items() if s not in own} == {
            s: k for s, k in before.items() if s not in own
        }
        assert list(after[names.dead]) == [names.dead_letter("default", "add")]
        assert not [s for s in after["KV_hf_nodes"] if s.endswith(".beta")]


async def test_record_that_cannot_be_buried_stops_no_coordinator(site: Site) -> None:
    """Names that make no subject, and a value's name as large as a message."""
    async with site.broker("operator") as operator:
        await Topology(operator, RecordConfig()).ensure()
        async with site.broker("client") as client:
            await put(client, "nameless", once=True, group="", job="", node="nobody")
            for size in (100_000, 1_048_300):
                await put(client, f"large{size}", once=True, body_object="x" * size, node="nobody")
            await put(client, "genuine", once=True, node="nobody")
        runs = Bucket(operator, site.names.runs)
        coordinator = Coordinator(site.connection("coordinator"))
        async with running(coordinator, lambda: coordinator.may_judge):
            await coordinator._recovery.orphans(gone)  # as it does by itself, some seconds later
            assert await ended(runs, "genuine")
            assert not coordinator._recovery.unfinished
            assert not any("dead.." in subject for subject in coordinator.broker.denied)


async def test_parked_message_with_an_odd_number_stops_no_coordinator(site: Site) -> None:
    """The last part of a parked message's subject is its sender's: digits that are no decimals."""
    names = site.names
    async with site.broker("operator") as operator:
        await Topology(operator, RecordConfig()).ensure()
        waits = RunRecord("failed", "default", "add", message=2, failures=1, due=1.0)
        async with site.broker("client") as client:
            await client.store(kv_subject(names.runs, "waits"), run.encode(waits))
            for number in ("²", "٣", "9" * 900, "-1", "x"):
                await client.store(names.later("default", "add", "waits", number), b"{}")
        coordinator = Coordinator(site.connection("coordinator"))
        async with running(coordinator, lambda: coordinator.may_judge):
            await coordinator._look_for_stranded()  # as it does by itself every half minute
            assert (await coordinator._stranded._parked()).get("waits", 0) == 0


async def test_payload_is_read_from_no_other_stream(site: Site) -> None:
    """A record's reply subject names a bucket of others: whoever shows the run does not read it."""
    async with site.broker("operator") as operator:
        topology = Topology(operator, RecordConfig())
        await topology.ensure()
        secret = await operator.store(kv_subject(site.names.leases, "x"), b"not for clients")
        async with site.broker("client") as client:
            reply = f"$JS.ACK.KV_hf_leases.c.1.{secret.seq}.1.1.0"
            await put(client, "curious", reply=reply, node="somebody")
        reader = Client(operator, RecordConfig())
        found = await Finder(reader).find("curious")
        assert await payload_of(reader, found) is None


@pytest.mark.parametrize("prefix", ["$JS.ACK.", "$JS.ACK.domain.hash."])
@pytest.mark.parametrize("stream", ["HF_JOBS", "HF_EVENTS"])
def test_acks_of_own_streams_are_known(prefix: str, stream: str) -> None:
    """Both forms of the server's reply subjects, of the streams that workers pull from."""
    assert Names("hf").takes_acks(f"{prefix}{stream}.default=add.1.2.3.4.0")
    assert not Names("other").takes_acks(f"{prefix}{stream}.default=add.1.2.3.4.0")
