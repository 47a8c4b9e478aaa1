"""Settings between a publisher and agents: whole snapshots, and nothing else."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.broker.wire import Stored
from holdfast.errors import OutcomeUnknown, SettingsError
from holdfast.identity.seed import AccountSeed
from holdfast.names import (
    SETTINGS_REVISION,
    kv_stream,
    settings_file_key,
    settings_manifest_key,
)
from holdfast.server import Server
from holdfast.settings.records import claimed
from tests.integration.settings_support import (
    CANARY,
    FILES,
    World,
    following,
    reaches,
    world,
)
from tests.support import until

WEB1 = {
    "name": "web1",
    "db": {"port": 1, "host": "db1", "password": CANARY},
    "apt": {"mirror": "m1"},
}


async def sequences(w: World) -> list[int]:
    """How much was ever written to the buckets of publishers."""
    names = w.broker.names
    found = []
    for bucket in (names.settings, names.secrets):
        info = await w.broker.api(f"STREAM.INFO.{kv_stream(bucket)}")
        before = max(info["config"].get("first_seq", 0) - 1, 0)  # a bucket counts from a time on
        found.append(info["state"]["last_seq"] - before)
    return found


async def test_push_reaches_the_agents_it_is_meant_for(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Each renders its own files with its own facts; secrets only where the id says so."""
    async with world(nats, namespace, tmp_path) as w:
        web1, db1, win = w.agent("web1"), w.agent("db1"), w.agent("win", {"os": "windows"})
        async with following(web1, db1, win):
            plan = await w.push("web1", "db1", "win")
            assert plan.revision is not None
            assert list(plan.seal) == ["web1"]
            for agent in (web1, db1, win):
                await reaches(agent, 1)
            assert dict(web1.settings) == WEB1
            assert dict(db1.settings) == {"apt": {"mirror": "m1"}}
            assert dict(win.settings) == {}
            assert web1.shown("db.password") == "(secret)"
            w.write(db=f"db: {{host: db2, password: !encrypted {CANARY}}}\n")
            await w.push()
            await reaches(web1, 2)
            assert web1.settings["db"] == {"port": 1, "host": "db2", "password": CANARY}
        reports = await w.publisher.store.reports()
        assert {a: r.number for a, r in reports.items()} == {"web1": 2, "db1": 2, "win": 2}


async def test_agent_asks_rarely_until_the_first_push(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """There is nothing to find, and ten thousand agents would ask; yet it hears of the push."""
    async with world(nats, namespace, tmp_path) as w:
        agent = w.agent("web1")
        assert [await agent.refresh() for _ in range(9)] == [2, 4, 8, 16, 32, 64, 128, 256, 300]
        async with following(agent):
            await w.push("web1")
            await until(lambda: agent.report.number == 1, what="the first settings")


async def test_agent_that_heard_of_a_push_asks_again_soon(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """However long it had nothing to find: a read that fails now is repeated after two seconds."""
    async with world(nats, namespace, tmp_path) as w:
        await w.push()
        agent = w.agent("web1")
        data = await agent._store.revision()
        await w.broker.api(f"STREAM.DELETE.{agent._store.settings.stream}")
        assert [await agent.refresh() for _ in range(9)][-1] == 300
        agent._on_revision(b"", b"", data or b"", None)
        assert await agent.refresh() == 2


async def test_push_writes_only_what_has_changed(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Nothing for nothing; for one file: that file, the manifest, the revision and no secret."""
    async with world(nats, namespace, tmp_path) as w:
        await w.push("web1")
        first = await sequences(w)
        # four files, manifest, revision, the account's copy of a secret; one agent's secrets
        assert first == [7, 1]
        assert (await w.push("web1")).empty
        assert await sequences(w) == first
        w.write(apt="apt: {mirror: m2}\n")
        plan = await w.push("web1")
        assert plan.changes == [("changed", "apt.yaml")]
        assert await sequences(w) == [11, 1]  # file, manifest, both revisions
        w.write(db=FILES["db"].replace(CANARY, "another-secret"))
        plan = await w.push("web1")
        assert plan.changes[0] == ("changed", "secret db:db.password")
        settings, secrets = await sequences(w)
        assert secrets == 3  # the new box beside the old one, then the old one dropped
        assert settings == 11 + 4  # manifest, both revisions, the account's copy of the secret


async def test_dry_run_writes_nothing(nats: Server, namespace: str, tmp_path: Path) -> None:
    """It tells the same changes, and the same number."""
    async with world(nats, namespace, tmp_path) as w:
        await w.push("web1")
        before = await sequences(w)
        w.write(db=FILES["db"].replace("db1", "db2"), apt="")
        w.write(top="base: {'web*': [common, db]}\n")
        _, plan = await w.publisher.plan(w.folder)
        assert plan.revision is not None
        assert (plan.revision.number, plan.changes) == (
            2,
            [("removed", "apt.yaml"), ("changed", "db.yaml"), ("changed", "top.yaml")],
        )
        assert await sequences(w) == before


async def test_empty_tree_over_a_populated_one_is_refused_unless_asked_for(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """The difference between a mistake and an intention is said out loud."""
    async with world(nats, namespace, tmp_path) as w:
        agent = w.agent("web1")
        await w.push("web1")
        await agent.refresh()
        empty = tmp_path / "empty"
        empty.mkdir()
        with pytest.raises(SettingsError, match="--allow-empty"):
            await w.publisher.push(empty)
        await agent.refresh()
        assert agent.report.number == 1
        await w.publisher.push(empty, empty=True)
        await agent.refresh()
        assert (agent.report.number, dict(agent.settings)) == (2, {})
        sealed = (await w.publisher.store.sealed("web1")).boxes
        assert sealed == {}


# ---------------------------------------------------------------- refusals


async def tampered_file(w: World) -> str:
    manifest = await w.publisher.store.manifest((await current(w)).manifest)
    await w.put("settings", settings_file_key(manifest.files["db"].sha256), b"db: {host: evil}")
    return "hash"


async def missing_file(w: World) -> str:
    manifest = await w.publisher.store.manifest((await current(w)).manifest)
    await w.publisher.store.settings.delete(settings_file_key(manifest.files["db"].sha256))
    return "torn"


async def tampered_manifest(w: World) -> str:
    hash = (await current(w)).manifest
    await w.put("settings", settings_manifest_key(hash), b'{"files":{}}')
    return "hash"


async def tampered_revision(w: World) -> str:
    data = await w.publisher.store.revision()
    assert data
    await w.put("settings", SETTINGS_REVISION, data.replace(b'\\"number\\":2', b'\\"number\\":3'))
    return "signature"


async def revision_of_another_account(w: World) -> str:
    stranger = World(w.broker, w.root, AccountSeed(bytes(32)))
    await stranger.push("web1", force=True)
    return "signature"


async def noise_for_a_revision(w: World) -> str:
    await w.put("settings", SETTINGS_REVISION, b"noise")
    return "unreadable"


async def old_secrets_put_back(w: World) -> str:
    await w.put("secrets", "web1", (w.root / "old-secrets").read_bytes())
    return "secret"


async def secrets_of_another_agent(w: World) -> str:
    entry = await w.publisher.store.secrets.get("web2")
    assert entry
    await w.put("secrets", "web1", entry.value)
    return "secret"


async def secrets_removed(w: World) -> str:
    await w.publisher.store.secrets.delete("web1")
    return "unresolved"


async def endless_template(w: World) -> str:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    w.write(common=loop)
    await w.push("web1")
    return "template"


ATTACKS: list[Callable[[World], Awaitable[str]]] = [
    tampered_file,
    missing_file,
    tampered_manifest,
    tampered_revision,
    revision_of_another_account,
    noise_for_a_revision,
    old_secrets_put_back,
    secrets_of_another_agent,
    secrets_removed,
    endless_template,
]


async def current(w: World):  # type: ignore[no-untyped-def]
    data = await w.publisher.store.revision()
    assert data
    return claimed(data)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
async def test_what_was_tampered_with_is_refused_counted_and_told(
    attack: Callable[[World], Awaitable[str]], nats: Server, namespace: str, tmp_path: Path
) -> None:
    """The settings in force stay, also over a restart; the next good revision is taken."""
    async with world(nats, namespace, tmp_path) as w:
        agent = w.agent("web1")
        await w.push("web1", "web2")
        old = await w.publisher.store.secrets.get("web1")
        assert old
        (tmp_path / "old-secrets").write_bytes(old.value)
        await agent.refresh()
        w.write(db=f"db: {{host: db2, password: !encrypted {CANARY}-2}}\n")
        await w.push("web1", "web2")
        reason = await attack(w)
        await agent.refresh()
        counted = agent.telemetry.settings_refused.labels(reason)._value.get()
        assert (agent.refused, counted) == (1, 1), agent.report
        assert dict(agent.settings) == WEB1
        report = (await w.publisher.store.reports())["web1"]
        assert (report.number, report.reason, report.refused) == (1, reason, 1)
        assert report.error
        assert CANARY not in report.error
        restarted = w.agent("web1")
        assert dict(restarted.settings) == WEB1
        w.write(common=FILES["common"])
        await w.push("web1", "web2", force=True)
        await restarted.refresh()
        assert restarted.settings["db"]["password"] == f"{CANARY}-2"
        assert (await w.publisher.store.reports())["web1"].error == ""


async def test_old_revision_put_back_is_refused(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """It was signed once; it is still older than what is in force."""
    async with world(nats, namespace, tmp_path) as w:
        agent = w.agent("db1")
        await w.push()
        old = await w.publisher.store.revision()
        assert old
        w.write(apt="apt: {mirror: m2}\n")
        await w.push()
        await agent.refresh()
        await w.put("settings", SETTINGS_REVISION, old)
        await agent.refresh()
        assert agent.settings["apt"] == {"mirror": "m2"}
        assert agent.report.reason == "rollback"
        restarted = w.agent("db1")
        await restarted.refresh()
        assert restarted.report.reason == "rollback"


async def test_credentials_of_another_agent_open_nothing(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Who claims another's id has its settings refused, and never has any: it fails closed."""
    async with world(nats, namespace, tmp_path) as w:
        thief = w.agent("web1", as_agent="web2")
        stranger = w.agent("web1", seed=AccountSeed(bytes(32)))
        await w.push("web1", "web2")
        for agent, reason in ((thief, "secret"), (stranger, "signature")):
            await agent.refresh()
            assert agent.report.reason == reason
            with pytest.raises(SettingsError, match="has no settings yet"):
                _ = agent.settings
        assert not (tmp_path / "state" / "web1" / "settings.json").exists()


# ---------------------------------------------------------------- life


async def test_snapshot_is_private_and_needs_no_server(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """0600, whole, and enough to go on with after a restart; made private again when it was not."""
    async with world(nats, namespace, tmp_path) as w:
        agent = w.agent("web1")
        await w.push("web1")
        await agent.refresh()
    path = tmp_path / "state" / "web1" / "settings.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["settings.json"]
    path.chmod(0o644)
    alone = w.agent("web1")
    assert dict(alone.settings) == WEB1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(path.read_bytes()[:-9])
    damaged = w.agent("web1")
    with pytest.raises(SettingsError, match="has no settings yet"):
        _ = damaged.settings


async def test_facts_that_change_change_the_settings(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """With the same revision; a fact that changes nothing is not worth a report."""
    async with world(nats, namespace, tmp_path) as w:
        facts = {"name": "n1", "os": "debian"}
        agent = w.agent("web1", facts)
        agent._facts = lambda: facts
        await w.push("web1")
        async with following(agent):
            await reaches(agent, 1)
            facts["os"] = "other"
            agent.facts_changed()
            await until(lambda: "apt" not in agent.settings and agent._told)
            told = (await w.publisher.store.applied.last("web1"))[0]
            facts["load"] = "2"
            agent.facts_changed()
            await until(lambda: (agent._rendered_from or [None])[-1] == facts)
            assert (await w.publisher.store.applied.last("web1"))[0] == told


async def test_report_that_was_lost_is_sent_again(
    nats: Server, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The centre waits for it: not after five minutes, with the next look, but soon."""
    async with world(nats, namespace, tmp_path) as w:
        agent = w.agent("web1")
        store, applied = agent._broker.store, w.publisher.store.applied.name
        lost: list[str] = []

        async def losing(subject: str, *rest: Any) -> Stored:
            if applied in subject and not lost:
                lost.append(subject)
                raise OutcomeUnknown("lost")
            return await store(subject, *rest)

        monkeypatch.setattr(agent._broker, "store", losing)
        async with following(agent):
            await w.push("web1")
            await until(lambda: w.publisher.store.applied.get("web1"), 20, "its report")
        assert lost


async def test_agent_that_joins_later_is_sealed_for_by_the_next_push(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """It says what it lacks, and takes it as soon as it is there, in the same revision."""
    async with world(nats, namespace, tmp_path) as w:
        await w.push("web1")
        late = w.agent("web9")
        async with following(late):
            await until(lambda: late.report.reason == "unresolved")
            assert "settings push" in late.report.error
            plan = await w.push()  # it has reported, so it is known
            assert (plan.revision, list(plan.seal)) == (None, ["web9"])
            await reaches(late, 1)
            assert late.settings["db.password"] == CANARY


async def test_secret_goes_from_an_agent_that_is_entitled_no_more(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """What was sealed for it is dropped with the push that says so."""
    async with world(nats, namespace, tmp_path) as w:
        await w.push("web1", "web2")
        w.write(top="base: {'web1': [common, db], 'web2': [common]}\n")
        await w.push()
        assert "db:db.password" in (await w.publisher.store.sealed("web1")).boxes
        assert (await w.publisher.store.sealed("web2")).boxes == {}


async def test_pushes_at_the_same_moment_do_not_mix(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Each wins or is told; what is published in the end is one of them, whole."""
    async with world(nats, namespace, tmp_path) as w:
        await w.push("web1")
        folders = []
        for n in range(6):
            other = World(w.broker, tmp_path / f"p{n}")
            other.write(**FILES)
            other.write(db=f"db: {{host: h{n}, password: !encrypted secret-number-{n}}}\n")
            folders.append(other.folder)
        ended = await asyncio.gather(
            *(w.publisher.push(f, agents=["web1"]) for f in folders), return_exceptions=True
        )
        told = [e for e in ended if isinstance(e, BaseException)]
        assert all(isinstance(e, SettingsError) and e.reason == "conflict" for e in told), told
        assert len(told) < len(ended)
        agent = w.agent("web1")
        await agent.refresh()
        number = agent.settings["db.host"].removeprefix("h")
        assert agent.settings["db.password"] == f"secret-number-{number}"


async def test_tree_of_many_files_is_one_snapshot(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """More than a batch holds: files go ahead, the switch is still one write."""
    async with world(nats, namespace, tmp_path) as w:
        w.write(**{f"many__f{n}": f"k{n}: {n}\n" for n in range(600)})
        w.write(top="base: {'*': [many/f0, many/f599]}\n", db="", apt="", common="")
        await w.push("web1")
        agent = w.agent("web1")
        await agent.refresh()
        assert dict(agent.settings) == {"k0": 0, "k599": 599}
        assert (await w.push("web1")).empty


async def test_rotation_leaves_no_moment_without_a_read(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """While keys are rotated, agents with the old keys, and then with the new, read every time."""
    async with world(nats, namespace, tmp_path) as w:
        fleet = [w.agent(f"web{n}") for n in range(3)]
        await w.push(*(agent.agent for agent in fleet))
        before = {agent.agent: (await w.publisher.store.sealed(agent.agent)) for agent in fleet}
        reads, over = [], False

        async def read_on() -> None:
            while not over:
                for agent in fleet:
                    agent._rendered_from = None
                    await agent.refresh()
                    reads.append(agent.settings["db.password"])

        reader = asyncio.create_task(read_on())
        with pytest.raises(SettingsError, match="no rotation is in progress"):
            await w.publisher.rotate(finish=True)
        await w.publisher.rotate()
        with pytest.raises(SettingsError, match="both in use"):
            await w.publisher.rotate()
        await until(lambda: all(a.report.generations == [1, 2] for a in fleet))
        w.write(db=FILES["db"].replace("db1", "db2"))
        await w.push()  # also between begin and finish
        await w.publisher.rotate(finish=True)
        await until(lambda: all(a.report.generations == [2] for a in fleet))
        over = True
        await reader
        assert set(reads) == {CANARY}
        assert [agent.refused for agent in fleet] == [0, 0, 0]
        for agent in fleet:
            [(_, boxes)] = (
                (await w.publisher.store.sealed(agent.agent)).boxes["db:db.password"].items()
            )
            assert list(boxes) == [2]
            assert before[agent.agent].boxes["db:db.password"] != boxes
            restarted = w.agent(agent.agent)  # its credentials are still those of generation 1
            restarted._snapshot = None
            await restarted.refresh()
            assert restarted.settings["db.password"] == CANARY


async def test_rotation_waits_for_agents_that_are_away(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """It is not finished without one unless asked to; then the agent says what it lacks."""
    async with world(nats, namespace, tmp_path) as w:
        away = w.agent("web1")
        await w.push("web1")
        await away.refresh()
        await w.publisher.rotate()
        with pytest.raises(SettingsError, match="web1"):
            await w.publisher.rotate(finish=True)
        await w.publisher.rotate(finish=True, force=True)
        await away.refresh()
        assert away.report.reason == "signature"
        assert "--generation" in away.report.error
        assert dict(away.settings) == WEB1


async def test_nothing_that_is_stored_has_a_secret_in_it(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Every value of every bucket, byte by byte, through changes, failures and a rotation."""
    async with world(nats, namespace, tmp_path) as w:
        agent = w.agent("web1")
        await w.push("web1")
        await agent.refresh()
        await tampered_manifest(w)
        await agent.refresh()
        await w.push("web1")
        await w.publisher.rotate()
        await agent.refresh()
        store = w.publisher.store
        stored = [
            entry.value
            for bucket in (store.settings, store.secrets, store.applied)
            async for entry in bucket.entries()
        ]
        assert len(stored) == 11
        assert not [value for value in stored if CANARY.encode() in value]
        assert json.dumps(agent.shown()).count(CANARY) == 0
