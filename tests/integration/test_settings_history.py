"""Settings that can be taken back: history, rollback, and pushes that a few agents try first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.broker.kv import ttl_text
from holdfast.errors import SettingsError
from holdfast.model import node as nodes
from holdfast.model.liveness import Liveness
from holdfast.model.node import NodeRecord
from holdfast.names import H_TTL, kv_subject, settings_file_key
from holdfast.server import Server
from holdfast.settings import canary
from holdfast.settings.canary import Trial
from holdfast.settings.plan import KEPT
from holdfast.settings.records import sha256
from holdfast.settings.sealing import Sealer
from holdfast.settings.tree import read_tree
from tests.integration.settings_support import (
    CANARY,
    FILES,
    SEED,
    World,
    following,
    reaches,
    world,
)
from tests.support import until


async def passes(_: Sequence[str]) -> str:
    return ""


async def online(w: World, *agents: str) -> None:
    """Records of agents as their heartbeats would write them."""
    names = w.broker.names
    for agent in agents:
        record = NodeRecord(agent, "agent", state="RUNNING", liveness=Liveness(enabled=False))
        await w.broker.store(
            kv_subject(names.agents, agent), nodes.encode(record), {H_TTL: ttl_text(60)}
        )


async def prepared(w: World) -> None:
    """The buckets that a dispatcher would have made."""
    from holdfast.broker.streams import FLEET_BUCKETS, Topology
    from holdfast.config import RecordConfig

    await Topology(w.broker, RecordConfig()).ensure_buckets(*FLEET_BUCKETS)


async def test_rollback_brings_files_and_secrets_of_a_kept_revision_back(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """As a new revision, for agents of then and of now; even a file that was removed."""
    async with world(nats, namespace, tmp_path) as w:
        web1, web2 = w.agent("web1"), w.agent("web2")
        async with following(web1, web2):
            await w.push("web1")
            await reaches(web1, 1)
            first = dict(web1.settings)
            w.write(db="", top="base: {'web*': [common]}\n")
            await w.push("web2")
            await reaches(web1, 2)
            await reaches(web2, 2)
            assert "password" not in web1.settings["db"]
            sealed = await w.publisher.store.sealed("web1")
            assert sealed.boxes == {}  # who is no longer entitled keeps no box
            plan = await w.publisher.go_back()
            assert plan.revision is not None
            assert (plan.revision.number, plan.revision.back_to) == (3, 1)
            await reaches(web1, 3)
            await reaches(web2, 3)
            assert dict(web1.settings) == first
            assert web2.settings["db.password"] == CANARY
            assert (await w.publisher.go_back(1)).empty
            assert (await w.publisher.go_back(2)).revision is not None


async def test_rollback_is_possible_to_ten_revisions_and_older_ones_go(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """What is no longer kept takes no space and is refused by name."""
    async with world(nats, namespace, tmp_path) as w:
        for n in range(KEPT + 3):
            w.write(apt=f"apt: {{mirror: m{n}}}\n")
            await w.push("web1")
        there = await w.publisher.store.published(Sealer(SEED))
        assert sorted(there.history) == list(range(4, KEPT + 4))
        gone = sha256(b"apt: {mirror: m1}\n")
        assert settings_file_key(gone) not in there.contents
        with pytest.raises(SettingsError, match="revision 2 is not kept; these are: 4, 5"):
            await w.publisher.go_back(2)
        await w.publisher.go_back(4)
        now = await w.publisher.store.published(None)
        assert now.texts(now.manifest)["apt"] == "apt: {mirror: m3}\n"


async def test_published_files_can_be_pushed_again_without_their_folder(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """What is read back has the same secrets, sealed to the account."""
    async with world(nats, namespace, tmp_path) as w:
        await w.push("web1")
        there = await w.publisher.store.published(None)
        back = tmp_path / "back"
        back.mkdir()
        for name in there.manifest.files:
            (back / f"{name}.yaml").write_text(there.source(there.manifest, name))
        assert CANARY not in (back / "db.yaml").read_text()
        tree = read_tree(back, Sealer(SEED))
        assert tree.secrets == {"db:db.password": CANARY}
        _, plan = await w.publisher.push(back, agents=["web1"])
        assert plan.empty


async def test_history_that_somebody_forged_is_not_gone_back_to(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Only revisions that the account signed count, under their own number."""
    async with world(nats, namespace, tmp_path) as w:
        await w.push("web1")
        w.write(apt="apt: {mirror: m2}\n")
        await w.push("web1")
        signed = await w.publisher.store.settings.get("revision")
        assert signed is not None
        await w.put("settings", "history.1", signed.value)
        await w.put("settings", "history.7", b"{}")
        with pytest.raises(SettingsError, match="nothing to go back to"):
            await w.publisher.go_back()
        w.write(apt="apt: {mirror: m3}\n")
        await w.push("web1")
        assert await w.publisher.store.settings.get("history.7") is None


async def test_canary_reaches_its_wave_and_then_everybody(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """The others stay where they are until it is promoted; meanwhile nobody else publishes."""
    async with world(nats, namespace, tmp_path) as w:
        await prepared(w)
        web1, web2 = w.agent("web1"), w.agent("web2")
        async with following(web1, web2):
            await w.push("web1", "web2")
            await reaches(web1, 1)
            await reaches(web2, 1)
            await online(w, "web1", "web2")
            w.write(db=FILES["db"].replace("db1", "db2").replace(CANARY, "another-secret"))
            seen = asyncio.Event()
            go_on = asyncio.Event()

            async def check(wave: Sequence[str]) -> str:
                seen.set()
                await go_on.wait()
                return ""

            trial = Trial(w.broker, w.publisher, ["web1"], 0.1, check)
            pushing = asyncio.create_task(trial.push(w.folder))
            await seen.wait()
            assert web1.settings["db"] == {"port": 1, "host": "db2", "password": "another-secret"}
            await reaches(web2, 2)
            assert web2.settings["db.host"] == "db1"
            assert web2.settings["db.password"] == CANARY
            with pytest.raises(SettingsError, match="being tried on 1 agents"):
                await w.push()
            go_on.set()
            _, _, verdict = await pushing
            assert verdict is not None
            assert verdict.failure == ""
            await reaches(web2, 3)
            assert web2.settings["db"] == {"port": 1, "host": "db2", "password": "another-secret"}


@pytest.mark.parametrize("how", ["broken", "check", "offline"])
async def test_canary_that_fails_is_taken_back(
    nats: Server, namespace: str, tmp_path: Path, how: str
) -> None:
    """A file that does not render, a failed check, an agent that is gone: all are back."""
    async with world(nats, namespace, tmp_path) as w:
        await prepared(w)
        web1, web2 = w.agent("web1"), w.agent("web2")

        async def check(_: Sequence[str]) -> str:
            return "it does not work" if how == "check" else ""

        async with following(web1, web2):
            await w.push("web1", "web2")
            await reaches(web1, 1)
            before = dict(web1.settings)
            await online(w, *(["web1"] if how != "offline" else []))
            broken = "apt: {mirror: {{ facts.missing }}}\n" if how == "broken" else "apt: {a: 1}\n"
            w.write(apt=broken)
            _, _, verdict = await Trial(w.broker, w.publisher, ["web1"], 0.2, check).push(w.folder)
            assert verdict is not None
            reasons = {"broken": "refused it", "check": "does not work", "offline": "went offline"}
            assert reasons[how] in verdict.failure
            assert verdict.not_back == []
            await reaches(web1, 3)
            await reaches(web2, 3)
            assert dict(web1.settings) == dict(web2.settings) | {"name": "web1"} == before


async def test_canary_that_nobody_decides_ends_by_itself(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Also on an agent that cannot reach a server any more, and over its restart."""
    async with world(nats, namespace, tmp_path) as w:
        web1, web2 = w.agent("web1"), w.agent("web2")
        await w.push("web1", "web2")
        await web1.refresh()
        await web2.refresh()
        before = dict(web1.settings)
        w.write(apt="apt: {mirror: m2}\n")
        soon = w.broker.server_now() + 1.0
        await w.push(wave=(["web1", "web2"], soon))
        await web1.refresh()
        await web2.refresh()
        assert web1.settings["apt.mirror"] == web2.settings["apt.mirror"] == "m2"
        await until(lambda: w.broker.server_now() > soon)
        await web1.refresh()
        assert dict(web1.settings) == before
        assert web2.settings["apt.mirror"] == "m2"
        await web2.end_trial()  # what a refresh does while NATS is away
        assert web2.settings["apt.mirror"] == "m1"
        assert w.agent("web2").settings["apt.mirror"] == "m1"
        assert (await w.push()).revision is not None  # nobody is in the way any more


async def test_canary_is_taken_back_when_its_publisher_is_stopped(
    nats: Server, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while it soaks decides against it."""
    monkeypatch.setattr(canary, "LOOK_SECONDS", 0.05)
    async with world(nats, namespace, tmp_path) as w:
        await prepared(w)
        web1 = w.agent("web1")
        async with following(web1):
            await w.push("web1")
            await reaches(web1, 1)
            await online(w, "web1")
            w.write(apt="apt: {mirror: m2}\n")
            trial = Trial(w.broker, w.publisher, ["web1"], 60.0, passes)
            pushing = asyncio.create_task(trial.push(w.folder))
            await reaches(web1, 2)
            pushing.cancel()
            await asyncio.gather(pushing, return_exceptions=True)
            await reaches(web1, 3)
            assert web1.settings["apt.mirror"] == "m1"


async def test_templates_read_the_settings_of_the_files_before(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """In the order of the top; a secret stays a whole value and stays masked."""
    async with world(nats, namespace, tmp_path) as w:
        w.write(
            top="base: {'web*': [common, db, app]}\n",
            app='url: "{{ settings.db.host }}:{{ settings.db.port }}"\n'
            'copy: "{{ settings.db.password }}"\n',
        )
        agent = w.agent("web1")
        await w.push("web1")
        await agent.refresh()
        assert agent.settings["url"] == "db1:1"
        assert agent.settings["copy"] == CANARY
        assert agent.shown("copy") == "(secret)"
