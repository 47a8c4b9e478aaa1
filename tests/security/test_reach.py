"""What a login can reach beyond its own keys: by headers, and by making the server speak for it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.broker import Broker
from holdfast.broker.kv import direct_batch
from holdfast.broker.streams import (
    AGENTS_WRITE,
    BUCKETS,
    FLEET_BUCKETS,
    SETTINGS_BUCKETS,
    Topology,
    bucket_config,
)
from holdfast.config import RecordConfig
from holdfast.coordinator import Coordinator
from holdfast.errors import BrokerError, Conflict, NotFound
from holdfast.identity import grants
from holdfast.identity.grants import program_bucket
from holdfast.names import Names, kv_stream, kv_subject
from holdfast.server import Server
from holdfast.status.checks import fix
from tests.integration.auth_support import Site, guarded
from tests.support import running, until

EVERY = [f"HF_{noun}" for noun in ("JOBS", "EVENTS", "DEAD", "LEDGER")]
EVERY += [f"KV_hf_{noun}" for noun in BUCKETS + FLEET_BUCKETS + SETTINGS_BUCKETS]
FOUNDED = [
    s.removeprefix("$JS.API.STREAM.CREATE.")
    for s in grants.worker(Names("hf")).publish
    if ".STREAM.CREATE." in s
]
"""Streams that a worker may make."""
CORE = [role for role in grants.ROLES if role not in grants.ISSUED_LATER]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with guarded(tmp_path_factory.mktemp("reach")) as site:
        yield site


@contextlib.asynccontextmanager
async def filled(site: Site) -> AsyncIterator[Broker]:
    """An operator's connection; there is something in every bucket."""
    async with site.operating() as client:
        for noun in FLEET_BUCKETS + SETTINGS_BUCKETS:
            with contextlib.suppress(Conflict):  # a return that is there stays
                await client.broker.store(kv_subject(site.names.bucket(noun), "beta"), b"{}")
        yield client.broker


async def stored(broker: Broker) -> dict[str, dict[str, int]]:
    """Every subject of every stream with its last sequence."""
    return {
        stream: {
            m.headers["Nats-Subject"]: int(m.headers["Nats-Sequence"])
            async for m in direct_batch(broker, stream, ">")
        }
        for stream in EVERY
    }


HEADERS: dict[str, dict[str, str]] = {
    "rollup all": {"Nats-Rollup": "all"},
    "rollup sub": {"Nats-Rollup": "sub"},
    "schedule": {
        "Nats-Schedule": "@at 2020-01-01T00:00:00Z",
        "Nats-Schedule-Target": "$KV.hf_facts.beta",
    },
    "batch": {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"},
    "open batch": {"Nats-Batch-Id": "c", "Nats-Batch-Sequence": "1"},
    "counter": {"Nats-Incr": "+1"},
    "source": {"Nats-Stream-Source": "x"},
    "trace": {"Nats-Trace-Dest": "$KV.hf_facts.beta"},
    "trace only": {"Nats-Trace-Dest": "hf.node.beta.drain", "Nats-Trace-Only": "true"},
    "marker": {"Nats-Marker-Reason": "Purge"},
    "ttl": {"Nats-TTL": "never"},
    "request info": {"Nats-Request-Info": '{"acc":"HF"}'},
}


@pytest.mark.parametrize("header", HEADERS)
async def test_header_of_an_agent_touches_no_other_key(site: Site, header: str) -> None:
    """Whatever header an agent sends with its own keys, the keys of others stay as they are."""
    async with filled(site) as operator:
        before = await stored(operator)
        names = site.names
        async with site.raw("agent-alpha") as alpha:
            subjects = [
                kv_subject(names.bucket(n), "alpha") for n in ("facts", "agents", "applied")
            ]
            for subject in (*subjects, names.returned("r1", "alpha")):
                await alpha.client.publish(
                    subject, b"{}", headers=HEADERS[header], reply=f"{alpha.login.inbox}.x"
                )
            await alpha.client.flush()
            await alpha.client.request("$JS.API.INFO", timeout=5)
        after = await stored(operator)
        for subjects_of in (before, after):
            for kept in subjects_of.values():
                for subject in [s for s in kept if s.endswith(".alpha")]:
                    del kept[subject]
        assert after == before


@pytest.mark.parametrize("role", CORE)
async def test_reply_subject_changes_no_stream(site: Site, role: str) -> None:
    """A record of one's own, fetched with any subject as the reply, ends in one's own account."""
    async with filled(site) as operator:
        names = site.names
        await operator.store(kv_subject(names.nodes, "empty"), b"")
        await operator.store(kv_subject(names.nodes, "full"), b"{}")
        before = await stored(operator)
        aims = [f"$JS.API.STREAM.{verb}.{names.dead}" for verb in ("DELETE", "PURGE")]
        aims += [f"$JS.API.STREAM.DELETE.{kv_stream(names.runs)}", names.dead_letter("g", "j")]
        aims += [kv_subject(names.bucket(n), "x") for n in ("leases", "fleet", "settings", "facts")]
        aims += [names.job("g", "j"), names.event("e"), names.log("operator", "drain")]
        async with site.raw(role) as thief:
            for aim in aims:
                for key in ("empty", "full"):
                    key = kv_subject(names.nodes, key)
                    get = f"$JS.API.DIRECT.GET.{kv_stream(names.nodes)}.{key}"
                    await thief.client.publish(get, b"", reply=aim)
                await thief.client.publish("$JS.API.INFO", b"", reply=aim)
            await thief.client.flush()
            assert thief.errors == []
            await thief.client.request("$JS.API.INFO", timeout=5)
        assert await stored(operator) == before


async def test_consumer_of_a_worker_delivers_to_nobody(site: Site) -> None:
    """A worker may make consumers; one that pushes reaches neither streams nor processes."""
    async with filled(site) as operator:
        names = site.names
        before = await stored(operator)
        async with site.broker("worker") as worker:
            for number, aim in enumerate(
                (kv_subject(names.leases, "x"), names.node("beta", "drain"))
            ):
                config: dict[str, Any] = {"name": f"thief{number}", "deliver_subject": aim}
                config |= {"filter_subject": names.event("e"), "ack_policy": "none"}
                request = f"CONSUMER.CREATE.{names.events}.thief{number}.{names.event('e')}"
                await worker.api(request, {"stream_name": names.events, "config": config})
                await worker.store(names.event("e"), b"")
                info = await worker.api(f"CONSUMER.INFO.{names.events}.thief{number}")
                assert info["delivered"]["consumer_seq"] == 0
                await worker.api(f"CONSUMER.DELETE.{names.events}.thief{number}")
        after = await stored(operator)
        assert {s: k for s, k in after.items() if s != names.events} == {
            s: k for s, k in before.items() if s != names.events
        }


async def test_buckets_of_an_older_version_are_hardened(site: Site) -> None:
    """A dispatcher switches the headers off, doctor does the rest; nothing is lost."""
    async with filled(site) as operator:
        names, topology = site.names, Topology(operator, RecordConfig())
        loose = {"allow_rollup_hdrs": True, "allow_atomic": True}
        for noun in AGENTS_WRITE:
            await topology.update_stream(kv_stream(names.bucket(noun)), loose)
        before = await stored(operator)
        async with site.broker("dispatcher") as dispatcher:
            for noun in FLEET_BUCKETS:
                await Topology(dispatcher, RecordConfig()).ensure_buckets(noun)
        assert {d.stream for d in await topology.differences()} == {kv_stream(names.applied)}
        assert await fix(topology) == [kv_stream(names.applied)]
        assert await topology.differences() == []
        assert await stored(operator) == before


async def test_workers_make_no_stream_of_their_own_design(site: Site) -> None:
    """Whoever makes a stream has the server repeat its content anywhere: none is left to make."""
    names = site.names
    coordinator = Coordinator(site.connection("coordinator"))
    async with running(coordinator), site.broker("worker") as worker:
        for stream in FOUNDED:
            await until(functools.partial(exists, worker, stream), 20, stream)
        republish = {"src": "$O.hf_objects.C.x", "dest": kv_subject(names.leases, "x")}
        for stream in FOUNDED:
            config = {"name": stream, "subjects": ["$O.hf_objects.C.x"], "republish": republish}
            with pytest.raises(BrokerError):
                await worker.api(f"STREAM.CREATE.{stream}", config)


async def exists(broker: Broker, stream: str) -> bool:
    try:
        await broker.api(f"STREAM.INFO.{stream}")
    except NotFound:
        return False
    return True


def test_client_makes_no_bucket() -> None:
    """A client uses a program's bucket that exists; workers and operators make it."""
    create = "$JS.API.STREAM.CREATE.KV_hf_data_carts"
    for role in CORE:
        assert (create in program_bucket(Names("hf"), "carts", role).publish) == (role != "client")


def test_agents_share_no_bucket_with_rollup_or_batches(site: Site) -> None:
    """New buckets of agents are made without the headers that act beyond a key."""
    for noun in AGENTS_WRITE:
        config = bucket_config(site.names, noun, 1)
        assert (config["allow_rollup_hdrs"], config["allow_atomic"]) == (False, False)


async def test_backup_needs_the_login_made_for_it(site: Site, tmp_path: Path) -> None:
    """The operator's login is refused with what to do; a login of the role takes the backup."""
    server = site.server
    assert isinstance(server, Server)
    async with filled(site):

        def backup(user: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "holdfast", "backup", str(tmp_path / user)]
            env = os.environ | site.environment(user)
            return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

        refused = await asyncio.to_thread(backup, "operator")
        assert refused.returncode != 0
        assert "holdfast auth user backup" in refused.stderr
        site.folder.add_user("backup")
        server.reload()
        saved = await asyncio.to_thread(backup, "backup")
        assert saved.returncode == 0, saved.stderr
        site.folder.revoke("backup")
        server.reload()
