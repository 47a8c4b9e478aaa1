"""Records and messages that cannot be read: every role starts, works on, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.broker import Bucket
from holdfast.broker.streams import (
    FLEET_BUCKETS,
    SETTINGS_BUCKETS,
    bucket_config,
    stream_configs,
)
from holdfast.config import RecordConfig
from holdfast.names import Names
from holdfast.server import Server
from holdfast.status.doctor import examine
from holdfast.status.unreadable import UnreadableRecords, decoders
from tests.faults import damage
from tests.faults.everybody import AGENT, COMMANDS, Everybody
from tests.integration.cli_support import holdfast

METRIC = "holdfast_unreadable_records_total"


@pytest.fixture
def everybody(nats: Server, namespace: str, tmp_path: Path) -> Everybody:
    return Everybody(nats.url, namespace, tmp_path)


def test_damage_is_written_to_every_bucket_and_stream(namespace: str) -> None:
    """A bucket or stream that is added later has to be damaged here too."""
    names = Names(namespace)
    configs = stream_configs(names, RecordConfig(), 1)
    nouns = (*FLEET_BUCKETS, *SETTINGS_BUCKETS, "sessions", "limits")
    configs += [bucket_config(names, noun, 1) for noun in nouns]
    written = [one.subject for one in damage.records(names, "text")]
    for config in configs:
        subject = config["subjects"][0].removesuffix(">")
        assert any(one.startswith(subject) for one in written), f"nothing damages {subject}"


@pytest.mark.parametrize("kind", damage.DAMAGE)
async def test_damage_is_found_and_removed_in_every_bucket(everybody: Everybody, kind: str) -> None:
    """Whatever the bytes are, the doctor lists the records of every bucket, and each can be
    removed unread. A state that only a newer version knows is no damage."""
    async with everybody.connected() as site:
        await damage.write(site.broker, kind)
        records = UnreadableRecords(site.client)
        found = await records.list()
        if kind == "newer":
            wrong = {one.bucket for one in found} & set(damage.open_records(site.broker.names))
            assert not wrong, "a state that only a newer version knows makes no record unreadable"
        told = [one for one in await examine(site.connection, site.client.records) if one.todo]
        assert any("cannot be read" in one.text for one in told if one.check == "records"), told
        missed = set(decoders(site.broker.names)) - {one.bucket for one in found}
        assert missed <= damage.readable(site.broker.names, kind), missed
        for one in found:
            await records.remove(one.bucket, one.key)
        assert list(await records.list()) == []


async def test_every_role_starts_among_damage_of_every_kind(everybody: Everybody) -> None:
    """What is there before they start stops nobody; each is told once, and can be removed."""
    async with everybody.connected() as site:
        for kind in damage.DAMAGE:
            await damage.write(site.broker, kind)
        await site.start()
        await site.works("started")
        await _is_told(site)
        await _can_be_removed(site)
        await site.works("removed")


async def test_every_role_works_on_while_damage_comes(everybody: Everybody) -> None:
    """What comes while they run stops nobody, in place of good records too."""
    async with everybody.connected() as site:
        await site.start()
        for kind in damage.DAMAGE:
            await damage.write(site.broker, kind)
            data = damage.body(kind, AGENT, "f1")
            for bucket in (site.broker.names.facts, site.broker.names.agents):
                await site.broker.store(f"$KV.{bucket}.{AGENT}", data)
            for node in await _nodes(site):
                await site.broker.store(f"$KV.{site.broker.names.nodes}.{node}", data)
        await site.works("damaged")
        assert (await site.metric("control", METRIC)).get(site.broker.names.nodes), "not counted"
        for command in COMMANDS:
            done = await holdfast(site.app, *command)
            assert done.code == 0, (command, done)


async def _nodes(site: Everybody) -> list[str]:
    bucket = Bucket(site.broker, site.broker.names.nodes)
    return [e.key async for e in bucket.entries() if not e.key.startswith("damaged")]


async def _is_told(site: Everybody) -> None:
    """By the metric, once in the log, and by the doctor with what to do."""
    names = site.broker.names
    counted = await site.metric("control", METRIC)
    for bucket in (names.schedules, names.facts, names.agents, names.nodes):
        assert counted.get(bucket, 0) >= len(damage.DAMAGE) - 4, counted
    text = site.log("control")
    line = f"{names.facts}/damaged-not-utf8 is skipped"
    assert text.count(line) == 1, text
    found = [one for one in await examine(site.connection, site.client.records) if one.todo]
    told = "\n".join(f"{one.text} {one.todo}" for one in found if one.check == "records")
    assert "holdfast unreadable" in told, found


async def _can_be_removed(site: Everybody) -> None:
    """Without being read: by the command of its kind, and whatever it is by `unreadable remove`."""
    for command in (
        ("schedules", "remove", "damaged-deep", "--yes"),
        ("agents", "forget", "damaged-not-utf8"),
    ):
        done = await holdfast(site.app, *command)
        assert done.code == 0, done
    records = UnreadableRecords(site.client)
    left = list(await records.list())
    assert len(left) > 100, left
    by_bucket = {one.bucket: one for one in left}
    for one in by_bucket.values():
        await records.remove(one.bucket, one.key)
    gone = {(one.bucket, one.key) for one in left} - {
        (one.bucket, one.key) for one in await records.list()
    }
    assert gone >= {(one.bucket, one.key) for one in by_bucket.values()}
