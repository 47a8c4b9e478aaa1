"""An attacker with one small login writes what nobody can read: no other role is stopped by it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shlex
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.broker import Broker, Bucket
from holdfast.client.fleet import Fleet, new_run
from holdfast.client.schedules import Schedules
from holdfast.config import DispatcherConfig
from holdfast.coordinator import Coordinator
from holdfast.dispatcher import Dispatcher
from holdfast.errors import HoldfastError, InvalidName
from holdfast.identity.credentials import AgentCredentials
from holdfast.identity.reports import ReportSigner
from holdfast.model.fleet import FleetRequest, FleetRun
from holdfast.model.slot import stamp
from holdfast.names import kv_subject
from holdfast.scheduler import Scheduler
from holdfast.settings.store import SettingsStore
from holdfast.status.fleet import Agents, FleetStatus
from holdfast.status.messages import subject_counts
from holdfast.status.nodes import Nodes
from holdfast.status.unreadable import Damaged, UnreadableRecords
from tests.integration.auth_support import Site, guarded
from tests.support import running, until

DAMAGE = {
    "not UTF-8": b'{"id":"\xff\xfe"}',
    "deep": b"[" * 100_000,
    "deep objects": b'{"value":' * 50_000,
    "wrong types": b'{"id":7,"name":[],"at":"x","state":{}}',
    "a time of 1e308": b'{"at":1e308,"since":1e308,"name":"x","job":"j","id":"alpha","role":"a"}',
    "half a pair": b'{"id":"\\ud800"}',
}
REST = 600


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with guarded(tmp_path_factory.mktemp("damage")) as site:
        yield site


async def harm(site: Site, data: bytes, mark: str) -> None:
    """As an agent, a client and a scheduler: the same bytes into the records that they write."""
    names = site.names
    async with site.broker("agent-alpha") as agent:
        for bucket in (names.facts, names.agents, names.applied):
            await agent.store(kv_subject(bucket, "alpha"), data)
    async with site.broker("client") as client:
        for bucket, key in (
            (names.schedules, f"schedule.x{mark}"),
            (names.schedules, f"app.x{mark}"),
            (names.runs, f"x{mark}"),
            (names.slots, f"slot.x.2026010{mark}T000000Z"),
        ):
            await client.store(kv_subject(bucket, key), data)
    async with site.broker("scheduler") as scheduler:
        await scheduler.store(kv_subject(names.slots, "progress.scheduler"), data)


@contextlib.asynccontextmanager
async def control(site: Site) -> AsyncIterator[None]:
    """Dispatcher, scheduler and coordinator, each with its own login."""
    seed = str(site.folder.path / "account.seed")
    dispatcher = Dispatcher(site.connection("dispatcher"), DispatcherConfig(seed_file=seed))
    scheduler = Scheduler(connection=site.connection("scheduler"))
    coordinator = Coordinator(site.connection("coordinator"))
    async with (
        running(dispatcher, dispatcher.started.is_set),
        running(scheduler, lambda: not scheduler.problems()),
        running(coordinator, lambda: coordinator.may_judge),
    ):
        yield


async def test_small_logins_stop_no_role(site: Site) -> None:
    """Every role starts among damaged records and stays; every listing answers."""
    async with site.operating() as client:
        for number, data in enumerate(DAMAGE.values(), 1):
            await harm(site, data, str(number))
        async with control(site):
            assert [a.id for a in await Agents(client).list()] == ["alpha"]
            await Agents(client).show("alpha")
            assert await Schedules(client).list() == []
            await Nodes(client).list()
            await FleetStatus(client).list()
            for report in (await SettingsStore(client.broker).reports()).values():
                assert report.at == 0.0
            for number, data in enumerate(DAMAGE.values(), 1):
                await harm(site, data, str(number))
            assert await Fleet(client.broker).resolve("nobody*") == ()
        for number in range(1, len(DAMAGE) + 1):
            await Schedules(client).remove(f"x{number}")
        await Agents(client).forget("alpha")
        assert await Agents(client).list() == []


RETURNS = {
    "deep": b"[" * 100_000,
    "deep value": b'{"run":"%s","agent":"alpha","outcome":"ok","value":'
    + b"[" * REST
    + b"]" * REST
    + b"}",
    "not UTF-8": b'{"run":"%s","agent":"alpha","outcome":"\xff"}',
    "endless": b'{"run":"%s","agent":"alpha","outcome":"ok","seconds":1e308}',
    "of another": b'{"run":"%s","agent":"beta","outcome":"ok"}',
}


@pytest.mark.parametrize("kind", RETURNS)
async def test_return_that_cannot_be_read_is_a_failed_one(
    site: Site, kind: str, tmp_path: Path
) -> None:
    """The run ends, and says which agent failed and why; nobody waits for a better return."""
    async with site.operating() as client:
        seed = str(site.folder.path / "account.seed")
        dispatcher = Dispatcher(site.connection("dispatcher"), DispatcherConfig(seed_file=seed))
        async with (
            running(dispatcher, dispatcher.started.is_set),
            site.broker("agent-alpha") as thief,
        ):
            request = FleetRequest(new_run(), "L@alpha", "ping", timeout=600.0)
            fleet = Fleet(client.broker)
            heard = asyncio.Event()

            def on_command(*_: object) -> None:
                heard.set()

            await thief.listen(site.names.agent("alpha", "exec"), on_command)
            await thief.flush()
            await fleet.start(request)
            await asyncio.wait_for(heard.wait(), 30)
            await answer(site, thief, request.run, RETURNS[kind])

            async def over() -> FleetRun | None:
                found = await fleet.read(request.run)
                return found if found.over else None

            record = await until(over, 60, "the run to end")
            assert (record.status, record.returned, record.succeeded) == ("failed", 1, 0)
            returned = await fleet.returns(request.run)
            assert returned["alpha"].outcome == "failed"
            assert "cannot be read" in returned["alpha"].error


async def answer(site: Site, thief: Broker, run: str, form: bytes) -> None:
    """An ack that is good, and a return that is not; both signed with the agent's own key."""
    signer = ReportSigner(AgentCredentials.load(site.file("agent-alpha")))
    ack = b'{"status":"accepted","epoch":1}'
    await thief.publish(
        site.names.ack(run, "alpha"), ack, signer.sign(kind="ack", run=run, payload=ack)
    )
    data = form.replace(b"%s", run.encode())
    headers = signer.sign(kind="return", run=run, payload=data)
    await thief.store(site.names.returned(run, "alpha"), data, headers)


STRAYS = ("*", ">", "a.*", "$(reboot)", "`reboot`;x", "-rf")


async def test_wildcard_as_a_key_removes_nothing_else(site: Site) -> None:
    """A client stores records under `>` and `*`, which the server takes for every key."""
    names = site.names
    async with site.operating() as operator, site.broker("client") as client:
        for key in STRAYS:
            await client.store(kv_subject(names.runs, key), b"\xff")
            if "." not in key:
                await client.store(kv_subject(names.schedules, f"schedule.{key}"), b"\xff")
        await client.store(kv_subject(names.runs, "bystander"), b"\xff")
        records = UnreadableRecords(operator)
        for key in STRAYS:
            assert key in await unreadable(records, names.runs)
            await records.remove(names.runs, key)
            if "." not in key:
                await records.remove(names.schedules, f"schedule.{key}")
            assert key not in await unreadable(records, names.runs)
            assert "bystander" in await unreadable(records, names.runs)
            with pytest.raises(HoldfastError):
                await records.remove(names.runs, key)
        with pytest.raises(InvalidName):
            await Bucket(operator.broker, names.runs).delete(">")
        assert "bystander" in await unreadable(records, names.runs)


async def unreadable(records: UnreadableRecords, bucket: str) -> dict[str, str]:
    """Keys with the command that removes each; the operator's login suffices to list them."""
    return {d.key: d.remedy for d in await records.list() if d.bucket == bucket}


def test_command_that_is_proposed_is_one_command() -> None:
    """What doctor says to run is copied into a shell: a key must not act there."""
    for key in STRAYS:
        words = shlex.split(Damaged("hf_runs", key, "r", 1, 0.0).remedy)
        words = [word for word in words if word != "--"] if key.startswith("-") else words
        assert words == ["holdfast", "unreadable", "remove", "hf_runs", key]
        if key != "-rf":
            assert f"'{key}'" in Damaged("hf_runs", key, "r", 1, 0.0).remedy


async def test_schedule_without_a_job_is_passed_over(site: Site) -> None:
    """A client stores a schedule and a slot that make no subject: the others fire, once each."""
    names = site.names
    async with site.operating() as client, site.broker("client") as thief:
        now = int(client.broker.server_now())
        rule = {"every": 1, "since": now - 3, "changed": now - 3}
        for name, job in (("nameless", ""), ("genuine", "add")):
            record = {"name": name, "job": job, "group": job and "default", **rule}
            key = kv_subject(names.schedules, f"schedule.{name}")
            await thief.store(key, msgspec.json.encode(record))
        planned = msgspec.json.encode({"state": "planned", "due": now - 2})
        slot = kv_subject(names.slots, f"slot.genuine.{stamp(now - 2)}")
        await thief.store(slot, planned)
        scheduler = Scheduler(connection=site.connection("scheduler"))
        async with running(scheduler):
            fired = functools.partial(count, client.broker, names.job("default", "add"))
            await until(fired, 30, "a schedule beside it")
            assert scheduler.broker.denied == {}
        await Schedules(client).remove("nameless")
        await Schedules(client).remove("genuine")


async def count(broker: Broker, subject: str) -> int:
    return (await subject_counts(broker, broker.names.jobs, subject)).get(subject, 0)
