"""The monitor on a real server: from a stored check to a result, an incident and a notice."""

from __future__ import annotations

import ast
import asyncio
import email
import email.policy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uptime
from uptime import record
from uptime.app import app, checks, incidents, notify, probe, reconcile, results, states
from uptime.cache import Cache
from uptime.config import ConfigError, load
from uptime.notices import mail, subject
from uptime.probes import Outcome
from uptime.record import Incident, Notice, Rules, State
from uptime.service import Refusal, Service

import holdfast
from holdfast import Holdfast, Schedules, notices
from holdfast.server import Server
from holdfast.testing import RunningWorker
from tests.support import until
from tests.uptime.sites import Receiver, Website


@asynccontextmanager
async def monitoring(store: Server, namespace: str) -> AsyncIterator[Service]:
    """A worker of the monitor on this loop, and its service."""
    async with RunningWorker(app, store.url, namespace):
        yield Service(load())


def definition(site: Website, **members: Any) -> dict[str, Any]:
    given = {"id": "shop", "name": "Shop", "target": site.url, "interval": 3600, "timeout": 2}
    return given | members


async def looked(id: str = "shop") -> str | None:
    return await (await probe.enqueue(id)).result(timeout=20)


# ---- the whole way


async def test_monitor_tells_an_outage_and_its_end_once(store: Server, namespace: str) -> None:
    """Down after two failures, told once; up again, told once; the incident is kept."""
    async with Website() as site, Receiver() as receiver, monitoring(store, namespace) as service:
        await service.set_channel({"id": "hook", "kind": "webhook", "target": receiver.url})
        await service.add(definition(site))
        assert await looked() == "ok"
        await site.become("broken")
        for _ in range(3):
            await asyncio.sleep(1.01)  # two results of one second are one
            assert await looked() == "failed"
        await site.become("up")
        await asyncio.sleep(1.01)
        assert await looked() == "ok"
        await until(lambda: len(receiver.told) >= 2, 20, "two notices")
        [incident] = await service.incidents("shop")
        assert (incident.status, incident.reason) == ("down", "HTTP 503, not 200-299")
        assert incident.ended > incident.started
        assert receiver.counts == {f"{incident.id}.opened": 1, f"{incident.id}.closed": 1}
        texts = [told.body["text"] for told in receiver.told]
        assert texts[0] == "Shop is down"
        assert texts[1].startswith("Shop has recovered (down for ")
        state = await service.state("shop")
        assert (state.status, state.outbox, len(state.points)) == ("up", (), 5)
        assert len(await service.results("shop", 100)) == 5


async def test_monitor_tells_what_a_crash_left_in_the_outbox(store: Server, namespace: str) -> None:
    """A worker died after it had decided and before it had told: the next one tells, once."""
    async with Website() as site, Receiver() as receiver, monitoring(store, namespace) as service:
        await service.set_channel({"id": "hook", "kind": "webhook", "target": receiver.url})
        await service.add(definition(site))
        rules = Rules("shop", "Shop", 1, 1)
        state = record.apply(State(), 1_700_000_000, Outcome("failed", 5, "gone"), rules)
        await states.put("shop", state)
        for notice in state.outbox:  # and somebody had begun to tell, too
            key = f"{notice.id}.hook"
            run = await notify.options(key=key).enqueue("hook", notice)
            await run.result(timeout=20)
        assert await looked() == "ok"
        await until(lambda: len(receiver.told) >= 2, 20, "both notices")
        assert [t.body["told"] for t in receiver.told] == ["opened", "closed"]
        assert (await service.state("shop")).outbox == ()


async def test_monitor_repeats_a_notice_until_it_is_taken(store: Server, namespace: str) -> None:
    """A webhook that is away is tried again, under the same id."""
    async with Receiver() as receiver, monitoring(store, namespace) as service:
        await service.set_channel({"id": "hook", "kind": "webhook", "target": receiver.url})
        await receiver.become("away")
        notice = Notice(Incident("shop.1-down", "shop", "Shop", "down", 1), "opened")
        run = await notify.enqueue("hook", notice)
        await until(lambda: _failed(run), 20, "a first attempt that failed")
        await receiver.become("up")
        assert await run.result(timeout=30) == notice.id
        assert [(t.id, t.attempt > 1) for t in receiver.told] == [(notice.id, True)]


async def _failed(run: Any) -> bool:
    return (await run.status()).state == "failed"


async def test_monitor_does_not_look_at_what_is_paused_or_gone(
    store: Server, namespace: str
) -> None:
    """A run that was on its way when its check was paused or removed leaves nothing behind."""
    async with Website() as site, monitoring(store, namespace) as service:
        await service.add(definition(site))
        await service.pause("shop", True)
        assert await looked() is None
        with pytest.raises(Refusal, match="paused"):
            await service.look_now("shop")
        await service.remove("shop")
        assert await looked() is None
        assert site.asked == 0
        assert [e async for e in states.entries()] == []
        assert [e async for e in results.entries()] == []


async def test_monitor_pausing_ends_an_incident_quietly(store: Server, namespace: str) -> None:
    """Who pauses a check that is down hears nothing of it; the incident is closed."""
    async with Website() as site, Receiver() as receiver, monitoring(store, namespace) as service:
        await service.set_channel({"id": "hook", "kind": "webhook", "target": receiver.url})
        await service.add(definition(site, failures=1))
        await site.become("broken")
        await looked()
        await until(lambda: receiver.told, 20, "the alert")
        await service.pause("shop", True)
        [incident] = await service.incidents()
        assert incident.ended
        await service.pause("shop", False)
        await site.become("up")
        await asyncio.sleep(1.01)
        assert await looked() == "ok"
        assert [t.body["told"] for t in receiver.told] == ["opened"]


# ---- schedules


INCIDENT = Incident("shop.1-down", "shop", "Shop", "down", 1)
FOREIGN = {"channel": "hook", "notice": Notice(INCIDENT, "opened")}


async def by_name() -> dict[str, Any]:
    return {s.name: s for s in await (await Schedules.of(app)).list()}


async def test_service_keeps_the_schedule_as_the_check(store: Server) -> None:
    """Added, changed, paused, resumed and removed together."""
    async with app, Website() as site:
        service = Service(load())
        await service.add(definition(site, interval=60))
        first = (await by_name())["uptime-check-shop"]
        assert (first.every, first.paused, first.job) == (60, 0.0, "uptime-probe")
        await service.change("shop", definition(site, interval=30, name="The shop"))
        assert (await by_name())["uptime-check-shop"].every == 30
        await service.pause("shop", True)
        assert (await by_name())["uptime-check-shop"].paused
        await service.change("shop", definition(site, interval=45, paused=True))
        assert (await by_name())["uptime-check-shop"].paused
        await service.pause("shop", False)
        assert not (await by_name())["uptime-check-shop"].paused
        await service.remove("shop")
        assert await by_name() == {}


async def test_reconcile_repairs_what_a_crash_left(store: Server) -> None:
    """A check without a schedule gets one, a schedule without a check goes; then all is well."""
    async with app, Website() as site:
        service = Service(load())
        await service.add(definition(site))
        await service.add(definition(site, id="lost"))
        await service.add(definition(site, id="resting"))
        schedules = await Schedules.of(app)
        foreign = notify.schedule("uptime-check-foreign", every="1h", payload=FOREIGN)
        await schedules.add(foreign)
        await schedules.remove("uptime-check-shop")
        await schedules.pause("uptime-check-resting")
        await checks.delete("lost")
        await states.put("removed", State(status="down"))
        assert await reconcile() == 4
        assert await states.get("removed") is None
        found = await by_name()
        left = {"uptime-check-shop", "uptime-check-resting", "uptime-check-foreign"}
        assert set(found) == left, "what is not ours is left alone"
        assert not found["uptime-check-resting"].paused
        assert await reconcile() == 0


async def test_checks_are_spread_over_their_interval(store: Server) -> None:
    """Not all checks fall on the same second."""
    async with app, Website() as site:
        service = Service(load())
        added = [await service.add(definition(site, id=f"c{n}", interval=60)) for n in range(20)]
        assert len({check.phase for check in added}) > 10


# ---- what is refused


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"id": "Big"}, "id"),
        ({"id": "a.b"}, "id"),
        ({"id": "new"}, "id"),
        ({"id": "../x"}, "id"),
        ({"name": ""}, "name"),
        ({"name": "two\nlines"}, "one line"),
        ({"target": "ftp://example.org"}, "http and https"),
        ({"target": "http://user:pw@example.org"}, "Authorization"),
        ({"target": "http://169.254.169.254/"}, "never"),
        ({"target": "http://2852039166/"}, "never"),
        ({"target": "http://0xa9fea9fe/"}, "never"),
        ({"target": "http://[::ffff:169.254.169.254]/"}, "never"),
        ({"target": "http://10.0.0.1/"}, "private"),
        ({"target": "example.org", "kind": "tcp"}, "443"),
        ({"interval": 0}, "interval"),
        ({"timeout": 31}, "timeout"),
        ({"timeout": 20, "interval": 10}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"status": "2xx"}, "200-299"),
        ({"headers": {"Host": "x"}}, "set by the check"),
        ({"headers": {"X": "a\r\nY: b"}}, "one line"),
        ({"headers": {"X y": "a"}}, "name of a header"),
        ({"headers": {f"X{n}": "" for n in range(21)}}, "at most 20"),
        ({"method": "DELETE"}, "method"),
        ({"kind": "icmp"}, "kind"),
        ({"surprise": 1}, "surprise"),
        ({"contains": "x" * 501}, "contains"),
    ],
)
async def test_service_refuses_a_check(members: dict[str, Any], words: str) -> None:
    """With a sentence that names the member; before anything is sent, so it needs no server."""
    async with Website() as site:
        with pytest.raises(Refusal, match=words):
            await Service(load()).add(definition(site, **members))


async def test_service_refuses_a_short_interval(
    store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds, unless this installation says otherwise."""
    monkeypatch.delenv("UPTIME_SHORTEST_INTERVAL")
    async with app, Website() as site:
        with pytest.raises(Refusal, match="at least 10 seconds"):
            await Service(load()).add(definition(site, interval=9))
        await Service(load()).add(definition(site, interval=10))


async def test_service_keeps_a_secret_header(store: Server) -> None:
    """It is shown as a mask, and a mask that comes back keeps the value."""
    async with app, Website() as site:
        service = Service(load())
        await service.add(definition(site, headers={"Authorization": "Bearer s3cret"}))
        shown = (await service.check("shop")).shown()
        assert "s3cret" not in str(shown)
        await service.change("shop", {**shown, "name": "New"})
        assert (await service.check("shop")).headers == {"Authorization": "Bearer s3cret"}


@pytest.mark.parametrize(
    "given",
    [
        {"id": "x", "kind": "webhook", "target": "file:///etc/passwd"},
        {"id": "x", "kind": "webhook", "target": "http://u:p@example.org/"},
        {"id": "x", "kind": "email", "target": "nobody"},
        {"id": "x", "kind": "email", "target": "a@b.example, c@d.example"},
        {"id": "x", "kind": "email", "target": "a@b.example\r\nBcc: c@d.example"},
        {"id": "x", "kind": "pigeon", "target": "coop"},
        {"id": "X Y", "kind": "email", "target": "a@b.example"},
    ],
)
async def test_service_refuses_a_channel(given: dict[str, Any]) -> None:
    """One address, or one URL that the guard would take."""
    with pytest.raises(Refusal):
        await Service(load()).set_channel(given)


async def test_webhook_passes_the_guard(
    store: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A webhook into the network behind us is not called."""
    async with Receiver() as receiver, monitoring(store, namespace) as service:
        await service.set_channel({"id": "hook", "kind": "webhook", "target": receiver.url})
        monkeypatch.setenv("UPTIME_ALLOW_PRIVATE", "")
        notice = Notice(Incident("shop.1-down", "shop", "Shop", "down", 1), "opened")
        run = await notify.enqueue("hook", notice)
        await until(lambda: _failed(run), 20, "an attempt that failed")
        assert receiver.told == []


# ---- mail


async def test_mail_is_sent_once_with_an_id(
    store: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a real SMTP conversation: one recipient, the incident's id as the message's id."""
    letters: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 test ESMTP\r\n")
        while line := (await reader.readline()).strip().upper():
            if line == b"DATA":
                writer.write(b"354 go on\r\n")
                letters.append(await reader.readuntil(b"\r\n.\r\n"))
            writer.write(b"221 bye\r\n" if line == b"QUIT" else b"250 fine\r\n")
            await writer.drain()
            if line == b"QUIT":
                break
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    monkeypatch.setenv("UPTIME_SMTP_URL", f"smtp://127.0.0.1:{port}")
    monkeypatch.setenv("UPTIME_MAIL_FROM", "Uptime <uptime@example.org>")
    async with server, monitoring(store, namespace) as service:
        await service.set_channel({"id": "me", "kind": "email", "target": "oncall@example.org"})
        incident = Incident("shop.1-down", "shop", "Shöp", "down", 1_800_000_000, reason="gone")
        run = await notify.options(key="once").enqueue("me", Notice(incident, "opened"))
        again = await notify.options(key="once").enqueue("me", Notice(incident, "opened"))
        assert await run.result(timeout=20) == "shop.1-down.opened"
        assert again.duplicate
    [sent] = letters
    message = email.message_from_bytes(sent, policy=email.policy.default)
    assert message["Subject"] == "Shöp is down"
    assert message["To"] == "oncall@example.org"
    assert message["Message-ID"] == "<shop.1-down.opened@example.org>"
    assert "Reason:   gone" in str(message.get_content())


async def test_mail_without_a_server_says_what_to_set() -> None:
    """The dead letter of such a notice tells what is missing."""
    notice = Notice(Incident("a.1-down", "a", "A", "down", 1), "opened")
    with pytest.raises(ConfigError, match="UPTIME_SMTP_URL"):
        await mail("a@b.example", notice, load({}))


def test_subject_says_how_long() -> None:
    """A recovery tells what it was, and for how long."""
    incident = Incident("a.1-down", "a", "A", "down", 1000, ended=1000 + 3_725)
    assert subject(Notice(incident, "closed")) == "A has recovered (down for 1 h 2 min)"


# ---- configuration and cache


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALLOW_PRIVATE", "10.0.0.0/33"),
        ("ALLOW_PRIVATE", "everything"),
        ("SHORTEST_INTERVAL", "0"),
        ("SHORTEST_INTERVAL", "ten"),
        ("CACHE_SECONDS", "-1"),
    ],
)
def test_config_refuses_nonsense(name: str, value: str) -> None:
    """And names the variable."""
    with pytest.raises(ConfigError, match=f"UPTIME_{name}"):
        load({f"UPTIME_{name}": value})


async def test_cache_is_shared_and_made_once(store: Server) -> None:
    """Many who ask at once, of two caches, get one answer; forgotten, it is made anew."""
    async with app:
        one, two = Cache(60), Cache(60)
        calls = 0

        async def make() -> dict[str, Any]:
            nonlocal calls
            calls += 1
            return {"number": calls}

        answers = await asyncio.gather(*(one.get("status", make) for _ in range(10)))
        assert [a["number"] for a in answers] == [1] * 10
        assert await two.get("status", make) == {"number": 1}
        assert (one.made, two.made) == (1, 0)
        await two.forget("status")
        assert await one.get("status", make) == {"number": 2}


async def test_cache_forgets_by_itself(store: Server) -> None:
    """The server removes an answer when its time is over."""
    async with app:
        cache, bucket = Cache(1), app.bucket("uptime-cache")

        async def make() -> dict[str, Any]:
            return {}

        async def gone() -> bool:
            return await bucket.get("status") is None

        await cache.get("status", make)
        assert not await gone()
        await until(gone, 20, "an answer that is too old to be gone")


# ---- what it is built on


def test_monitor_uses_only_the_public_api() -> None:
    """From Holdfast, only names that it exports for users; the demo, which kills, is no monitor."""
    folder = Path(uptime.__file__).parent
    public = {"holdfast": holdfast.__all__, "holdfast.notices": notices.__all__}
    found = 0
    for path in folder.rglob("*.py"):
        if path.is_relative_to(folder / "demo"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast"):
                assert node.module in public, f"{path.name} imports {node.module}"
                assert {alias.name for alias in node.names} <= set(public[node.module])
                found += 1
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    assert not alias.name.startswith(("holdfast.", "nats")), path.name
    assert found >= 3
    assert isinstance(app, Holdfast)


async def test_incidents_are_not_opened_again_by_somebody_slow(store: Server) -> None:
    """A worker that stalled with an old notice does not undo what came after."""
    from uptime.app import _write_down

    async with app:
        opened = Incident("shop.1-down", "shop", "Shop", "down", 1)
        ended = Incident("shop.1-down", "shop", "Shop", "down", 1, ended=9)
        for step in (opened, ended, opened):
            await _write_down(step)
        entry = await incidents.get("shop.1-down")
        assert entry
        assert entry.value == ended
