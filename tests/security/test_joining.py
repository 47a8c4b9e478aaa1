"""Hosts that join with a token: what a good one gets, and what a thief gets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nacl.public import PrivateKey

from holdfast.agent import Agent, joining, renewing
from holdfast.broker import Broker, Bucket
from holdfast.cli import agents
from holdfast.cli.reloading import Reloading
from holdfast.client import Client
from holdfast.client.fleet import Fleet, new_run
from holdfast.config import AgentConfig, DispatcherConfig, RecordConfig
from holdfast.dispatcher import Dispatcher, joins
from holdfast.errors import InvalidInput, NotFound
from holdfast.identity import renewing as requests
from holdfast.identity.credentials import AgentCredentials, Credentials, new_nkey_seed, public_nkey
from holdfast.identity.joining import Joiner, JoinToken, make_token
from holdfast.identity.seed import AccountSeed
from holdfast.identity.users import JoinedLogin, UserFolder
from holdfast.model import node as nodes
from holdfast.model.fleet import FleetRequest, FleetRun
from holdfast.model.join import ASK, REPLY, SIGNED, JoinRecord, JoinReply, fingerprint
from holdfast.model.node import NodeRecord
from holdfast.names import join_key
from holdfast.server import Server
from holdfast.status.joins import Joins, LoginKeeper
from holdfast.status.operators import Operator
from tests.integration.auth_support import Site, guarded
from tests.support import running, until

TRIES = 1_000


@dataclass
class Centre:
    """A dispatcher with the seed, an operator, and a login that only has a token."""

    site: Site
    operator: Broker
    thief: Broker
    joins: Joins
    keeper: LoginKeeper

    def token(self, pattern: str = "web*", **options: Any) -> JoinToken:
        given: dict[str, Any] = {"expires": self.operator.server_now() + 600, "uses": 1}
        given |= {"accept": False, "generations": [1], "seed": self.site.folder.seed()}
        given |= {"login": self.site.folder.join_login(), "namespace": "hf"}
        return make_token(pattern=pattern, **(given | options))

    async def ask(self, body: bytes) -> JoinReply:
        while True:
            answer = await self.thief.request(self.site.names.join, body, timeout=10)
            reply = REPLY.decode(answer.body)
            if not reply.again or reply.now:
                return reply

    async def issue(self, agent: str) -> JoinRecord:
        issued, wrong = await self.joins.issue([agent], self.site.folder)
        for error in wrong.values():
            raise error
        return issued[0]

    def joiner(self, token: JoinToken, agent: str) -> Joiner:
        return Joiner(token, agent, "hf", new_nkey_seed(), bytes(PrivateKey.generate()))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server that admits the users of a folder, the login of tokens among them."""
    with guarded(tmp_path_factory.mktemp("site")) as made:
        made.folder.join_login()
        made.server.reload()
        made.server.reload()
        yield made


@contextlib.asynccontextmanager
async def centre(site: Site) -> AsyncIterator[Centre]:
    config = DispatcherConfig(seed_file=str(site.folder.path / "account.seed"))
    dispatcher = Dispatcher(site.connection("dispatcher"), config)
    async with running(dispatcher, dispatcher.started.is_set), site.broker("operator") as operator:
        thief = Broker(site.connection("join"), name="thief")
        await thief.open(check=False)
        try:
            client = Client(operator, RecordConfig())
            keeper = LoginKeeper(client, site.folder)
            yield Centre(site, operator, thief, Joins(client), keeper)
        finally:
            await thief.close()


async def test_host_joins_with_its_own_keys(site: Site, tmp_path: Path) -> None:
    """It waits for an operator, gets sealed keys, logs in as itself; later it needs no token."""
    async with centre(site) as c:
        token = c.token().text()
        folder = tmp_path / "web1"
        connection = dataclasses.replace(site.connection("join"), credentials_file="")
        asking = asyncio.create_task(joining.join(token, "web1", folder, connection))
        await until(lambda: _waits(c, "web1"), what="web1 pending")
        with pytest.raises(InvalidInput, match="not approved"):
            await c.issue("web1")
        await c.joins.approve("web1", "tester")
        record = await c.issue("web1")
        site.server.reload()
        file = await asking
        found = AgentCredentials.load(file)
        assert found.public_nkey == record.nkey
        assert found.keys == site.folder.seed().agent_keys("web1")
        for private in (found.nkey_seed.encode(), *found.keys.sealing.values()):
            assert private not in record.signed + record.answer
            assert base64.b64encode(private) not in record.signed + record.answer
        assert sorted(p.name for p in folder.iterdir()) == [joining.FILE]
        assert await joining.join("no token", "web1", folder, connection) == file


async def _asking(c: Centre, token: JoinToken, agent: str, folder: Path) -> asyncio.Task[Path]:
    """A host that joins, and whose request is known."""
    connection = dataclasses.replace(c.site.connection("join"), credentials_file="")
    asking = asyncio.create_task(joining.join(token.text(), agent, folder, connection))
    await until(lambda: asking.done() or _waits(c, agent), what=f"{agent} known")
    if asking.done():
        asking.result()
    return asking


async def test_host_with_a_wrong_clock_asks_with_the_centres_time(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh machine asks before its clock is set; that is no reason to turn it away."""

    class Late(Broker):
        def server_now(self) -> float:
            return super().server_now() - 86_400

    monkeypatch.setattr(joining, "Broker", Late)
    async with centre(site) as c:
        token = c.token("clock*")
        asking = await _asking(c, token, "clock1", tmp_path)
        await c.joins.reject("clock1", "tester")
        with pytest.raises(InvalidInput, match="rejected"):
            await asking


async def test_dispatcher_without_the_seed_leaves_hosts_to_the_others(site: Site) -> None:
    """It would take half of the requests, and could not verify one."""
    async with centre(site) as c:
        other = Dispatcher(site.connection("dispatcher"), DispatcherConfig())
        async with running(other, other.started.is_set):
            token = c.token("seed*", uses=0)
            now = c.operator.server_now
            for n in range(20):
                assert (await c.ask(c.joiner(token, f"seed{n}").ask(now()))).state == "pending"


async def test_host_that_is_killed_before_the_reload_waits_for_it(
    site: Site, tmp_path: Path
) -> None:
    """Its credentials are complete, and the servers do not know them yet."""
    async with centre(site) as c:
        token = c.token("kill*", accept=True)
        asking = await _asking(c, token, "kill1", tmp_path)
        await c.issue("kill1")
        await until((tmp_path / joining.FILE).exists, what="the credentials")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        connection = dataclasses.replace(site.connection("join"), credentials_file="")
        again = asyncio.create_task(joining.join(token.text(), "kill1", tmp_path, connection))
        await until(lambda: again.done() or (tmp_path / "joining.json").exists())
        assert not again.done()
        site.server.reload()
        found = AgentCredentials.load(await again)
        admitted = dataclasses.replace(connection, credentials_file=str(tmp_path / joining.FILE))
        assert await joining.not_admitted(admitted) == ""
        assert found.agent == "kill1"
        assert sorted(p.name for p in tmp_path.iterdir()) == [joining.FILE]


async def test_operator_accepts_the_host_whose_fingerprint_it_is(site: Site) -> None:
    """With a stolen token, whoever asks first is in the list; its log tells them apart."""
    async with centre(site) as c:
        genuine, thief = c.joiner(c.token("finger*"), "finger1"), c.joiner(c.token("finger*"), "x")
        await c.ask(genuine.ask(c.operator.server_now()))
        with pytest.raises(InvalidInput, match="has the fingerprint"):
            await c.joins.approve("finger1", "tester", fingerprint=fingerprint(thief.nkey))
        assert (await c.joins.show("finger1")).state == "pending"
        await c.joins.approve("finger1", "tester", fingerprint=fingerprint(genuine.nkey))
        assert (await c.joins.show("finger1")).state == "approved"


async def test_one_command_at_the_centre_lets_the_servers_know(site: Site, tmp_path: Path) -> None:
    """Without 'holdfast server --auth': by a signal, and for other servers by a command."""
    assert isinstance(site.server, Server)
    pid_file, copied = tmp_path / "pid", tmp_path / "copied.conf"
    pid_file.write_text(str(site.server.pid))
    async with centre(site) as c:
        words = f"cp {site.folder.config} {copied}"
        servers = Reloading(site.folder.config, pid_file, words, at_once=True)
        operator = Operator(Client(c.operator, RecordConfig()))
        following = asyncio.create_task(agents._follow(operator, site.folder, servers))
        asking = await _asking(c, c.token("alone*", accept=True), "alone1", tmp_path / "alone1")
        file = await asking
        await until(lambda: copied.read_bytes() == site.folder.config.read_bytes(), what="copied")
        assert AgentCredentials.load(file).public_nkey in copied.read_text()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_reload_that_fails_is_tried_again(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The change is not forgotten, and the mistake is said once."""
    async with centre(site) as c:
        servers = Reloading(site.folder.config, None, f"cp {tmp_path}/a {tmp_path}/b", at_once=True)
        operator = Operator(Client(c.operator, RecordConfig()))
        following = asyncio.create_task(agents._follow(operator, site.folder, servers))
        said = ""

        def failed() -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return "ended with code 1" in said

        await until(failed, what="the mistake")
        (tmp_path / "a").touch()
        await until((tmp_path / "b").exists, what="tried again")
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        assert said.count("ended with code 1") == 1


async def test_token_that_nobody_knows_is_not_revoked(site: Site) -> None:
    """A mistyped id would leave the real token good."""
    async with centre(site) as c:
        token = c.token("typo*", uses=0)
        with pytest.raises(NotFound, match="holdfast auth tokens"):
            await c.joins.revoke(token.allows.id, "tester")
        await c.joins.revoke(token.allows.id, "tester", force=True)
        assert (
            "revoked" in (await c.ask(c.joiner(token, "typo1").ask(c.operator.server_now()))).error
        )


def test_list_of_users_does_not_grow_with_every_renewal(tmp_path: Path) -> None:
    """Logins that ended a week ago are dropped; one that ended just now stays to be seen."""
    folder = UserFolder(tmp_path / "auth")
    folder.init("hf")
    first, second = (public_nkey(new_nkey_seed()) for _ in range(2))
    folder.add_joined(
        JoinedLogin("web1", first, ends=100.0, lasts=50.0),
        JoinedLogin("web2", second, ends=1_000_000.0, lasts=50.0),
    )
    known = len(folder.users())
    assert [u.agent for u in folder.end_joined(101.0)] == ["web1"]
    assert len(folder.users()) == known
    assert [u.agent for u in folder.end_joined(1_000_001.0)] == ["web2"]
    assert [u.agent for u in folder.users() if u.agent] == ["web2"]


async def _waits(c: Centre, agent: str) -> bool:
    return agent in {record.agent for record in await c.joins.list()}


async def test_known_id_needs_an_operators_word(site: Site) -> None:
    """Even with a token that accepts by itself, and one that fits; the first stays what it is."""
    async with centre(site) as c:
        token = c.token("db*", accept=True, uses=0)
        first, second = c.joiner(token, "db1"), c.joiner(token, "db1")
        now = c.operator.server_now
        assert (await c.ask(first.ask(now()))).state == "approved"
        assert "another host has asked" in (await c.ask(second.ask(now()))).error
        await c.issue("db1")
        assert (await c.ask(second.ask(now()))).state == "pending"
        with pytest.raises(InvalidInput, match="--replace"):
            await c.joins.approve("db1", "tester")
        await c.joins.approve("db1", "tester", replace=True)
        await c.issue("db1")
        logins = [u for u in site.folder.users() if u.agent == "db1" and not u.revoked]
        assert [u.nkey for u in logins] == [(await c.joins.show("db1")).nkey]
        assert (await c.ask(second.ask(now()))).answer


async def test_logins_of_many_hosts_are_one_change(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration names every agent: one change for each host would cost N²."""
    async with centre(site) as c:
        token = c.token("bulk*", accept=True, uses=0)
        now = c.operator.server_now
        for n in range(20):
            assert (await c.ask(c.joiner(token, f"bulk{n}").ask(now()))).state == "approved"
        forged = msgspec.structs.replace(await c.joins.show("bulk7"), token="another")
        at, _ = await c.joins._bucket.last(join_key("bulk7"))
        await c.joins._bucket.put(join_key("bulk7"), msgspec.json.encode(forged), expected=at)
        changes = _counted_changes(monkeypatch)
        issued, wrong = await c.keeper.issue()
        assert len(issued) == 19
        assert set(wrong) == {"bulk7"}
        assert len(changes) == 1
        listed = {u.agent for u in site.folder.users() if u.agent.startswith("bulk")}
        assert listed == {f"bulk{n}" for n in range(20)} - {"bulk7"}
        await c.joins.reject("bulk7", "tester")


def _counted_changes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many users each further change of a folder leaves."""
    changes: list[int] = []
    write = UserFolder._write

    def counted(self: UserFolder, found: Any) -> None:
        changes.append(len(found.users))
        write(self, found)

    monkeypatch.setattr(UserFolder, "_write", counted)
    return changes


async def test_rejected_and_revoked_get_nothing(site: Site) -> None:
    """Not even a login that was approved before its token was revoked."""
    async with centre(site) as c:
        token = c.token("app*", uses=0)
        now = c.operator.server_now
        for agent in ("app1", "app2"):
            assert (await c.ask(c.joiner(token, agent).ask(now()))).state == "pending"
        await c.joins.reject("app1", "tester")
        with pytest.raises(InvalidInput, match="rejected"):
            await c.joins.approve("app1", "tester")
        await c.joins.approve("app2", "tester")
        await c.joins.revoke(token.allows.id, "tester")  # a host has asked with it
        with pytest.raises(InvalidInput, match="revoked"):
            await c.issue("app2")
        assert "revoked" in (await c.ask(c.joiner(token, "app3").ask(now()))).error


async def test_rejected_host_may_ask_again_with_another_token(site: Site) -> None:
    """The same host with the same keys; the token that was turned away stays turned away."""
    async with centre(site) as c:
        first, second = c.token("late*"), c.token("late*", accept=True)
        keys = new_nkey_seed(), bytes(PrivateKey.generate())
        asking = [Joiner(token, "late1", "hf", *keys) for token in (first, second)]
        now = c.operator.server_now
        assert (await c.ask(asking[0].ask(now()))).state == "pending"
        await c.joins.reject("late1", "tester")
        assert (await c.ask(asking[0].ask(now()))).state == "rejected"
        assert (await c.ask(asking[1].ask(now()))).state == "approved"
        assert (await c.issue("late1")).state == "issued"


async def test_operator_replaces_a_login_that_was_issued_by_hand(site: Site) -> None:
    """No agent has used it, so no dispatcher knows the id; the folder does, and asks for a word."""
    async with centre(site) as c:
        site.folder.add_agents(["hand1"])
        token = c.token("hand*", accept=True)
        assert (await c.ask(c.joiner(token, "hand1").ask(c.operator.server_now()))).state
        with pytest.raises(InvalidInput, match="--replace"):
            await c.issue("hand1")
        await c.joins.approve("hand1", "tester", replace=True)
        issued = await c.issue("hand1")
        logins = [u for u in site.folder.users() if u.agent == "hand1" and not u.revoked]
        assert [u.nkey for u in logins] == [issued.nkey]


async def test_logins_are_issued_again_after_an_outage(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """`agents accept --follow` outlives the servers; a mistake that stays is said once."""
    async with centre(site) as c:
        site.folder.add_agents(["back0"])
        token = c.token("back*", accept=True, uses=0)
        now = c.operator.server_now
        for agent in ("back0", "back1"):
            assert (await c.ask(c.joiner(token, agent).ask(now()))).state == "approved"
        following = asyncio.create_task(
            agents._follow(Operator(Client(c.operator, RecordConfig())), site.folder)
        )
        await until(lambda: _issued(c, "back1"), what="the first login")
        assert isinstance(site.server, Server)
        await asyncio.to_thread(site.server.restart)
        await until(lambda: c.operator.connected and c.thief.connected, what="connected again")
        await c.ask(c.joiner(token, "back2").ask(now()))
        await until(lambda: _issued(c, "back2"), what="a login after the outage")
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        assert capsys.readouterr().err.count("back0:") == 1
        await c.joins.reject("back0", "tester")


async def _issued(c: Centre, agent: str) -> bool:
    records = await c.joins.list(everything=True)
    return any(r.agent == agent and r.state == "issued" for r in records)


async def test_record_that_no_host_signed_gets_no_login(site: Site) -> None:
    """Whoever can write the bucket can still not make a login."""
    async with centre(site) as c:
        token = c.token("mq*")
        await c.ask(c.joiner(token, "mq1").ask(c.operator.server_now()))
        record = await c.joins.show("mq1")
        mine = public_nkey(new_nkey_seed())
        for change in (
            {"nkey": mine},
            {"agent": "mq2"},
            {"signed": record.signed[:-9] + b'AAAAAAA="'},
        ):
            forged = msgspec.structs.replace(record, state="approved", **change)
            bucket = c.joins._bucket
            key = join_key(forged.agent)
            at, _ = await bucket.last(key)
            await bucket.put(key, msgspec.json.encode(forged), expected=at)
            with pytest.raises(Exception, match=r"signed|forged|cannot be read"):
                await c.issue(forged.agent)
            assert not [u for u in site.folder.users() if u.agent in ("mq1", "mq2")]


async def test_bad_tokens_are_never_accepted(
    site: Site, report: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forged, expired, replayed, re-used, out of pattern: of a thousand tries none is accepted."""
    monkeypatch.setattr(joins, "REQUESTS", (1e9, 1e9))
    monkeypatch.setattr(joins, "HOSTS", (1e9, 1e9))
    rng = random.Random(25)
    async with centre(site) as c:
        now = c.operator.server_now()
        used = c.token("used*")
        assert (await c.ask(c.joiner(used, "used0").ask(now))).state == "pending"
        fresh, many = c.token("old*"), c.token("many*", uses=0)
        expired = c.token("old*", expires=now - 1)
        foreign = c.token("old*", seed=AccountSeed(bytes(32)))
        elsewhere = c.token("old*", namespace="other")
        recorded = c.joiner(c.token("seen*"), "seen1").ask(now - 61)

        def attempt(n: int) -> bytes:
            kind = n % 8
            agent = f"old{n}"
            if kind == 0:
                return c.joiner(foreign, agent).ask(now)
            if kind == 1:
                return c.joiner(expired, agent).ask(now)
            if kind == 2:
                return c.joiner(used, f"used{n}").ask(now)
            if kind == 3:
                return recorded
            if kind == 4:
                return c.joiner(many, f"db{n}").ask(now)
            if kind == 5:
                return c.joiner(elsewhere, agent).ask(now)
            body = c.joiner(fresh, agent).ask(now)
            return _bent(body, rng) if kind == 6 else _grafted(c, body, agent)

        before = {r.agent for r in await c.joins.list(everything=True)}
        accepted = 0
        for start in range(0, TRIES, 50):
            bodies = [attempt(n) for n in range(start, start + 50)]
            replies = await asyncio.gather(*map(c.ask, bodies))
            accepted += sum(bool(r.state or r.answer) for r in replies)
        assert accepted == 0
        assert {r.agent for r in await c.joins.list(everything=True)} == before
        report(f"{TRIES} bad requests to join, {accepted} accepted")


def _bent(body: bytes, rng: random.Random) -> bytes:
    """One byte of what was signed is another."""
    signed = SIGNED.decode(body)
    at = rng.randrange(len(signed.ask))
    other = chr((ord(signed.ask[at]) + 1) % 128 or 65)
    return SIGNED.encode(
        msgspec.structs.replace(signed, ask=signed.ask[:at] + other + signed.ask[at + 1 :])
    )


def _grafted(c: Centre, body: bytes, agent: str) -> bytes:
    """A token's request, with the thief's own login in it."""
    signed = SIGNED.decode(body)
    ask = ASK.decode(signed.ask.encode())
    mine = msgspec.structs.replace(ask, nkey=public_nkey(new_nkey_seed()))
    return SIGNED.encode(msgspec.structs.replace(signed, ask=ASK.encode(mine).decode()))


async def test_login_of_a_token_reaches_nothing_else(site: Site) -> None:
    """It may ask; it may not listen in, nor publish anything else."""
    names = site.names
    login = Credentials.load(site.file("join"))
    async with centre(site), site.raw("join") as raw:
        assert await raw.may_publish(names.join)
        for subject in (
            "$JS.API.INFO",
            f"$KV.{names.joins}.host.x",
            names.dispatch("run"),
            names.agent("alpha", "exec"),
            f"{names.namespace}.job.default.x",
        ):
            assert not await raw.may_publish(subject), subject
        for subject in (names.join, ">", names.changed(names.joins, ">"), names.agent("*", "*")):
            assert not await raw.may_hear(subject), subject
        assert await raw.may_hear(f"{login.inbox}.x")


async def test_flood_of_requests_is_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """New hosts of one token come at a rate; beyond it, they are told to ask again."""
    monkeypatch.setattr(joins, "HOSTS", (1e-9, 2.0))
    async with centre(site) as c:
        token = c.token("cron*", uses=0)
        replies = []
        for n in range(4):
            body = c.joiner(token, f"cron{n}").ask(c.operator.server_now())
            answer = await c.thief.request(site.names.join, body, timeout=10)
            replies.append(REPLY.decode(answer.body))
        assert [bool(r.state) for r in replies] == [True, True, False, False]
        assert all(r.again for r in replies[2:])


async def _joined(c: Centre, agent: str, folder: Path, **options: Any) -> Path:
    """A host that has joined by a token that accepts by itself."""
    token = c.token(agent, accept=True, **options).text()
    connection = dataclasses.replace(c.site.connection("join"), credentials_file="")
    asking = asyncio.create_task(joining.join(token, agent, folder, connection))
    await until(lambda: _waits(c, agent), what=f"{agent} approved")
    await c.issue(agent)
    c.site.server.reload()
    return await asking


async def test_login_is_renewed_before_it_ends(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host makes the next one, nobody decides, the old one ends, and commands arrive."""
    monkeypatch.setattr(renewing, "TRY_SECONDS", 0.3)
    async with centre(site) as c:
        file = await _joined(c, "new1", tmp_path / "new1", lasts=12.0)
        first = AgentCredentials.load(file)
        assert 0 < first.ends - c.operator.server_now() <= 12
        config = AgentConfig(
            data_dir=str(tmp_path / "new1"), heartbeat_seconds=0.5, reconnect_seconds=0.2
        )
        connection = dataclasses.replace(site.connection("join"), credentials_file=str(file))
        agent = Agent(config, connection=connection, credentials=first)
        async with running(agent, lambda: agent._presence.confirmed > 0):
            await until(lambda: c.keeper.renew(), 30, "the next login asked for")
            logins = [u for u in site.folder.users() if u.agent == "new1" and not u.revoked]
            assert len(logins) == 2
            site.server.reload()
            await until(lambda: AgentCredentials.load(file).nkey_seed != first.nkey_seed, 30)
            now = AgentCredentials.load(file)
            assert now.ends > first.ends
            await until(lambda: c.operator.server_now() > first.ends, 30, "the end of the first")
            assert [u.nkey for u in site.folder.end_joined(c.operator.server_now())] == [
                first.public_nkey
            ]
            site.server.reload()
            await until(lambda: _answers(c, "new1"), 30, "an answer under the next login")
        assert sorted(p.name for p in (tmp_path / "new1").glob("cred*")) == [joining.FILE]


async def _answers(c: Centre, agent: str) -> bool:
    request = FleetRequest(new_run(), f"L@{agent}", "ping", timeout=2.0)
    record = None
    async for found in Fleet(c.operator).follow(request):
        if isinstance(found, FleetRun):
            record = found
    return record is not None and record.status == "complete"


async def test_forged_renewals_get_nothing(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stolen record, another agent's request, a login that was never this agent's or ended. Good
    ones of several agents are one change of the configuration."""
    async with centre(site) as c:
        file = await _joined(c, "new2", tmp_path / "new2", lasts=3600.0)
        other = await _joined(c, "new3", tmp_path / "new3", lasts=3600.0)
        mine, theirs = AgentCredentials.load(file), AgentCredentials.load(other)
        now, thief = c.operator.server_now(), new_nkey_seed()
        good = requests.ask("new2", "hf", mine.nkey_seed, new_nkey_seed(), now)
        asked = msgspec.json.decode(good)
        wrong = [
            requests.ask("new2", "hf", thief, new_nkey_seed(), now),
            requests.ask("new2", "hf", theirs.nkey_seed, thief, now),
            requests.ask("new2", "other", mine.nkey_seed, thief, now),
            requests.ask("new3", "hf", mine.nkey_seed, thief, now),
            requests.ask("new2", "hf", mine.nkey_seed, theirs.nkey_seed, now),
            requests.ask("new2", "hf", mine.nkey_seed, thief, now + 86_400),
            msgspec.json.encode(asked | {"nkey": public_nkey(thief)}).decode(),
            msgspec.json.encode(asked | {"by_next": "AAAA"}).decode(),
            "{}",
            "no json",
        ]
        records = Bucket(c.operator, site.names.agents)
        for text in wrong:
            record = NodeRecord("new2", "agent", state="RUNNING", renewal=text)
            await records.put("new2", nodes.encode(record), expected=None)
            assert await c.keeper.renew() == []
        changes = _counted_changes(monkeypatch)
        also = requests.ask("new3", "hf", theirs.nkey_seed, new_nkey_seed(), now)
        for agent, text in (("new2", good), ("new3", also)):
            record = NodeRecord(agent, "agent", state="RUNNING", renewal=text)
            await records.put(agent, nodes.encode(record), expected=None)
        assert await c.keeper.renew() == ["new2", "new3"]
        assert await c.keeper.renew() == []
        assert len(changes) == 1
        for agent in ("new2", "new3"):
            await records.delete(agent)
