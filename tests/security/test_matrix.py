"""Every role × every subject that it may publish × every `Nats-*` header and every reply subject.

The attacker has the generated login and the wire, nothing else. What it stores on its own subjects
is its right; anything else that changes in any stream, its configuration included, is an effect.
The second half aims at running processes: dispatcher, agents, worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import Context, Holdfast, Worker
from holdfast.broker import Broker
from holdfast.broker.kv import direct_batch
from holdfast.broker.streams import BUCKETS, FLEET_BUCKETS, SETTINGS_BUCKETS, Topology
from holdfast.client.fleet import new_run
from holdfast.config import RecordConfig, WorkerConfig
from holdfast.errors import Conflict
from holdfast.identity import grants
from holdfast.identity.grants import Grants, covers
from holdfast.model import fleet as model
from holdfast.model.fleet import FleetRequest
from holdfast.names import Names, kv_stream, kv_subject
from tests.integration.auth_support import Raw, Site, guarded
from tests.integration.test_fleet_identity import fleetlet
from tests.support import running

Report = Callable[[str], None]
NAMES = Names("hf")
NOUNS = BUCKETS + FLEET_BUCKETS + SETTINGS_BUCKETS
STREAMS = [NAMES.jobs, NAMES.events, NAMES.dead, NAMES.ledger, NAMES.history, NAMES.history_index]
STREAMS += [NAMES.flows]
STREAMS += [kv_stream(NAMES.bucket(noun)) for noun in NOUNS]
CORE = [role for role in grants.ROLES if role not in grants.ISSUED_LATER]
ROLES = [*CORE, "agent-alpha"]

PAST = "@at 2020-01-01T00:00:00Z"
HEADERS: list[dict[str, str]] = [
    {"Nats-Rollup": "all"},
    {"Nats-Rollup": "sub"},
    {"Nats-Msg-Id": "seed"},
    {"Nats-Expected-Stream": "HF_DEAD"},
    {"Nats-Expected-Last-Sequence": "1"},
    {"Nats-Expected-Last-Subject-Sequence": "1"},
    {
        "Nats-Expected-Last-Subject-Sequence": "1",
        "Nats-Expected-Last-Subject-Sequence-Subject": "$KV.hf_leases.seed",
    },
    {"Nats-Expected-Last-Msg-Id": "seed"},
    {"Nats-TTL": "1s"},
    {"Nats-TTL": "never"},
    {"Nats-Marker-Reason": "Purge"},
    {"Nats-Marker-Reason": "MaxAge"},
    *(
        {"Nats-Schedule": PAST, "Nats-Schedule-Target": aim}
        for aim in ("$KV.hf_facts.seed", "hf.dead.seed.seed", "hf.event.seed")
    ),
    {
        "Nats-Schedule": PAST,
        "Nats-Schedule-Target": "$KV.hf_leases.seed",
        "Nats-Schedule-TTL": "1s",
    },
    {
        "Nats-Schedule": PAST,
        "Nats-Schedule-Target": "hf.job.seed.seed",
        "Nats-Schedule-Source": "hf.job.other.seed",
    },
    {
        "Nats-Schedule": PAST,
        "Nats-Schedule-Target": "$KV.hf_facts.seed",
        "Nats-Schedule-Rollup": "all",
    },
    {
        "Nats-Schedule": "@every 1s",
        "Nats-Schedule-Time-Zone": "UTC",
        "Nats-Schedule-Target": "hf.log.seed",
    },
    {"Nats-Scheduler": "seed", "Nats-Schedule-Next": "purge"},
    {"Nats-Batch-Id": "a", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"},
    {
        "Nats-Batch-Id": "a",
        "Nats-Batch-Sequence": "1",
        "Nats-Batch-Commit": "1",
        "Nats-Rollup": "all",
    },
    {"Nats-Incr": "+1"},
    {"Nats-Counter-Sources": "{}"},
    {"Nats-Stream-Source": "HF_DEAD 1 > > hf.dead.seed.seed"},
    {"Nats-Required-Api-Level": "999"},
    {"Nats-Request-Info": '{"acc":"HF","svc":"HF"}'},
    {"Nats-Trace-Dest": "hf.dead.seed.seed"},
    {"Nats-Trace-Dest": "$KV.hf_fleet.seed", "Nats-Trace-Only": "true"},
    {"Nats-Pin-Id": "seed"},
    {"Nats-Subject": "$KV.hf_facts.seed", "Nats-Sequence": "1", "Nats-Stream": "KV_hf_facts"},
    {"KV-Operation": "PURGE", "Nats-Rollup": "all"},
]
"""Every header by which the server acts, alone and in the company it wants."""

CONTROL = [
    NAMES.dispatch("run"),
    NAMES.dispatch("cancel"),
    NAMES.handover,
    NAMES.cancel("seed"),
    NAMES.node("beta", "drain"),
    NAMES.agent("beta", "exec"),
    NAMES.agent("beta", "cancel"),
    NAMES.ack("seed", "beta"),
]
AIMS = [
    *CONTROL,
    *(f"$JS.API.STREAM.{verb}.{s}" for verb in ("DELETE", "PURGE") for s in STREAMS),
    "$JS.API.CONSUMER.DELETE.HF_JOBS.seed",
    *(kv_subject(NAMES.bucket(noun), "seed") for noun in NOUNS),
    NAMES.returned("seed", "beta"),
    NAMES.job("seed", "seed"),
    NAMES.event("seed"),
    NAMES.dead_letter("seed", "seed"),
    NAMES.log("operator", "seed"),
]
"""Where the server could be made to speak: control, the server itself, every stream."""

OF_THE_PAGE = ("Nats-Num-Pending", "Nats-Last-Sequence", "Nats-UpTo-Sequence")
"""What a listing says of itself, not of a message."""

HARMLESS = json.dumps({"filter": "nothing", "seq": 999_999_999, "batch": 1}).encode()
"""A request that a role may make destroys nothing: its own rights are not what is tried."""


def granted(role: str) -> Grants:
    return grants.agent(NAMES, "alpha") if role == "agent-alpha" else grants.ROLES[role](NAMES)


def subjects(role: str) -> list[str]:
    """Every subject that a role may publish, as one that exists."""
    return [s.replace("*", "probe").replace(">", "probe") for s in granted(role).publish]


def body_for(subject: str) -> bytes:
    """For a request that reads: the seed of what it reads."""
    verb = subject.removeprefix("$JS.API.")
    if verb.startswith("DIRECT.GET.") and verb.count(".") == 2:
        stream = verb.rpartition(".")[2]
        if stream.startswith("KV_"):
            return json.dumps({"last_by_subj": kv_subject(stream[3:], "seed")}).encode()
    return HARMLESS if subject.startswith("$JS.") else b"{}"


async def prepare(operator: Broker) -> None:
    """Every stream, with a seed in each."""
    topology = Topology(operator, RecordConfig())
    await topology.ensure()
    request = model.encode(FleetRequest(new_run(), "*", "touch", args=("evil",), raw=True))
    for noun in FLEET_BUCKETS + SETTINGS_BUCKETS:
        await topology.ensure_buckets(noun)
    for noun in NOUNS:
        with contextlib.suppress(Conflict):
            await operator.store(kv_subject(NAMES.bucket(noun), "seed"), request)
    for subject in (NAMES.job("seed", "seed"), NAMES.event("seed"), NAMES.log("seed")):
        await operator.store(subject, request)
    await operator.store(NAMES.dead_letter("seed", "seed"), request)


async def state(operator: Broker) -> dict[tuple[str, str], str]:
    """What is stored under each subject, and how each stream is configured."""
    found: dict[tuple[str, str], str] = {}
    for stream in STREAMS:
        info = await operator.api(f"STREAM.INFO.{stream}")
        found[stream, ""] = json.dumps(info["config"], sort_keys=True)
        async for m in direct_batch(operator, stream, ">"):
            kept = sorted((k, v) for k, v in m.headers.items() if k not in OF_THE_PAGE)
            digest = hashlib.sha256(m.body + repr(kept).encode())
            found[stream, m.headers["Nats-Subject"]] = digest.hexdigest()
    return found


def beyond(role: str, before: dict[tuple[str, str], str], after: Any) -> list[tuple[str, str]]:
    """What changed although the role may not write there."""
    queue = (NAMES.job("", "").rstrip("."), f"{NAMES.namespace}.later", f"{NAMES.namespace}.canary")
    own = list(granted(role).publish)
    writes_queue = any(covers(s, NAMES.job("g", "j")) for s in own)
    return [
        (stream, subject)
        for stream, subject in before.keys() | after.keys()
        if before.get((stream, subject)) != after.get((stream, subject))
        and not any(covers(s, subject) for s in own)
        and not (writes_queue and subject.startswith(queue))
        and not (stream == kv_stream(NAMES.returns) and subject.endswith(".alpha"))
    ]


async def attack(thief: Raw, role: str, aims: list[str], headers: list[dict[str, str]]) -> int:
    """Everything against everything; returns how many messages that were."""
    count = 0
    inbox = f"{thief.login.inbox}.x"
    for subject in subjects(role):
        body = body_for(subject)
        for header in headers:
            await thief.client.publish(subject, body, headers=header, reply=inbox)
        for aim in aims:
            await thief.client.publish(subject, body, reply=aim)
        count += len(headers) + len(aims)
        if count % 1_000 < 100:
            await thief.client.flush()
    await thief.client.flush()
    await thief.client.request("$JS.API.INFO", timeout=10)
    return count


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with guarded(tmp_path_factory.mktemp("matrix")) as site:
        yield site


@pytest.fixture
def living(tmp_path: Path) -> Iterator[Site]:
    """A server of its own: what the others left there would be agents without a process."""
    with guarded(tmp_path / "living") as site:
        yield site


@pytest.mark.parametrize("role", ROLES)
async def test_nothing_beyond_its_own_keys_changes(site: Site, role: str, report: Report) -> None:
    """Every subject × every header × every reply: no stream changes outside the role's grants."""
    async with site.broker("operator") as operator:
        await prepare(operator)
        before = await state(operator)
        async with site.raw(role) as thief:
            count = await attack(thief, role, AIMS, HEADERS)
        after = await state(operator)
    assert beyond(role, before, after) == []
    report(f"{role}: {count:,} messages, 0 effects beyond its own keys")


async def test_no_role_reaches_a_running_process(
    living: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    """Whatever a role makes the server say, agents, dispatcher and worker carry on."""
    for name, value in living.environment("operator").items():
        monkeypatch.setenv(name, value)
    app = Holdfast("shop")
    begun = asyncio.Event()

    @app.job
    async def long(ctx: Context) -> None:
        begun.set()
        await asyncio.sleep(600)

    worker = Worker(app, WorkerConfig(), connection=living.connection("worker"))
    async with fleetlet(living, tmp_path) as fleet, running(worker, lambda: worker.pulling):
        run = await long.enqueue()
        await asyncio.wait_for(begun.wait(), 30)
        aims = [*CONTROL, NAMES.cancel(run.id), NAMES.node(worker.node, "drain")]
        aims += [NAMES.node(fleet.dispatcher.node, "drain"), NAMES.agent("alpha", "exec")]
        count = 0
        for role in ROLES:
            async with living.raw(role) as thief:
                count += await attack(thief, role, aims, [])
        _, returns = await fleet.run("touch", "genuine")
        assert {agent for agent, given in returns.items() if given.ok} == {"alpha", "beta"}
        assert {word for _, word in fleet.executed} == {"genuine"}
        assert (await run.status()).state == "running"
        stopped = [
            worker.stopping,
            fleet.dispatcher.stopping,
            *(a.stopping for a in fleet.agents.values()),
        ]
        assert not any(one.is_set() for one in stopped)
        await run.cancel()
    await app.close()
    report(f"{len(ROLES)} roles: {count:,} messages at {len(aims)} control subjects, 0 effects")
