"""Alerts, with a real web and mail receiver."""

from __future__ import annotations

import asyncio
import email
import email.policy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from holdfast import Backoff, Holdfast
from holdfast.client import Client
from holdfast.config import AlertsConfig
from holdfast.coordinator import Coordinator
from holdfast.coordinator.alerting import Alerter
from holdfast.errors import ConfigError
from holdfast.model.node import Transition
from holdfast.model.slot import Slot, encode, stamp
from holdfast.names import kv_subject, slot_key
from holdfast.server import Server
from holdfast.status.alerts import Alerting, Readings, alerts, read_board, write_board
from tests.integration.support import client_of, working
from tests.integration.web_support import site
from tests.support import running, until


@dataclass
class Receiver:
    """A server on localhost that keeps what it gets."""

    port: int = 0
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    status: int = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def texts(self) -> list[str]:
        return [json.loads(body)["text"] for _, body in self.got]


@asynccontextmanager
async def http() -> AsyncIterator[Receiver]:
    found = Receiver()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:])}
        body = await reader.readexactly(int(headers["content-length"]))
        found.got.append((headers, body))
        writer.write(f"HTTP/1.1 {found.status} X\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        found.port = server.sockets[0].getsockname()[1]
        yield found


@asynccontextmanager
async def smtp() -> AsyncIterator[Receiver]:
    found = Receiver()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 test ESMTP\r\n")
        while line := await reader.readline():
            word = line.strip().upper()[:4]
            if word == b"DATA":
                writer.write(b"354 go on\r\n")
                found.got.append(({}, await reader.readuntil(b"\r\n.\r\n")))
            writer.write({b"QUIT": b"221 bye\r\n"}.get(word, b"250 fine\r\n"))
            await writer.drain()
            if word == b"QUIT":
                break
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        found.port = server.sockets[0].getsockname()[1]
        yield found


def alerting(rules: str, *channels: str, **options: Any) -> Alerting:
    given = {"every_seconds": 0.2, "clear_seconds": 0.0} | options
    return Alerting.of(AlertsConfig(rules=rules, channels=";".join(channels), **given))


@pytest.fixture
async def client(app: Holdfast) -> AsyncIterator[Client]:
    @app.job(retry=Backoff.never())
    async def work(n: int) -> None:
        raise RuntimeError(f"no {n}")

    async with app:
        found = await client_of(app)
        await found.topology.ensure()
        yield found


async def test_lag_is_told_once_by_any_number_of_coordinators(
    app: Holdfast, client: Client
) -> None:
    """Ten rounds of three coordinators at the same time: one notice; and one when it is over."""
    await app.jobs["work"].enqueue(1)
    async with http() as hook:
        plan = alerting("lag > 0", f"webhook {hook.url}", pages_url="https://jobs.example.org/")
        judges = [Alerter(client, f"control-{n}", plan) for n in range(3)]
        for _ in range(10):
            await asyncio.gather(*(judge.step() for judge in judges))
        assert hook.texts == [f"[{client.broker.names.namespace}] work has 1 runs waiting"]
        headers, body = hook.got[0]
        told = json.loads(body)
        assert headers["idempotency-key"] == told["id"]
        assert told["told"] == "opened"
        assert told["subjects"] == ["default/work"]
        assert told["url"] == "https://jobs.example.org/jobs/default/work"
        await client.broker.api("STREAM.PURGE." + client.broker.names.jobs, {})
        for _ in range(5):
            await asyncio.gather(*(judge.step() for judge in judges))
        assert len(hook.got) == 2
        assert json.loads(hook.got[1][1])["told"] == "closed"
    board = await alerts(client.broker)
    assert not board.firing
    assert [n.told for n in board.told] == ["closed", "opened"]


async def test_dead_letters_are_told_by_mail_and_slack(app: Holdfast, client: Client) -> None:
    """Each in its own form."""
    async with working(app):
        await app.jobs["work"].enqueue(1)
        await until(lambda: _dead(client))
    async with smtp() as post, http() as slack:
        plan = alerting(
            "dead_letters > 0",
            "mail oncall@example.org",
            f"slack {slack.url}",
            smtp_url=f"smtp://127.0.0.1:{post.port}",
            mail_from="Holdfast <hf@example.org>",
        )
        await Alerter(client, "control-1", plan).step()
    [(_, raw)] = post.got
    letter = email.message_from_bytes(raw, policy=email.policy.default)
    assert letter["Subject"] == f"[{client.broker.names.namespace}] work has 1 dead letter"
    assert letter["To"] == "oncall@example.org"
    assert letter["Message-ID"].endswith("@example.org>")
    assert "dead_letters > 0" in str(letter.get_content())
    [text] = slack.texts
    assert text.startswith(f"*[{client.broker.names.namespace}] work has 1 dead letter*")
    assert "dead_letters &gt; 0" in text


async def _dead(client: Client) -> bool:
    found, _ = await Readings(client).read(alerting("dead_letters > 0").rules)
    return bool(found)


async def test_failed_channel_is_tried_again_under_the_same_id(
    app: Holdfast, client: Client
) -> None:
    """Another channel is not told again meanwhile."""
    await app.jobs["work"].enqueue(1)
    async with http() as bad, http() as good:
        bad.status = 503
        plan = alerting("lag > 0", f"webhook {bad.url}", f"webhook {good.url}")
        judge = Alerter(client, "control-1", plan)
        await judge.step()
        board, revision = await read_board(client.broker)
        [notice] = board.outbox
        [waiting] = notice.left.values()
        assert "HTTP 503" in waiting.error
        waiting.next = 0.0  # as if its pause were over
        await write_board(client.broker, board, revision)
        bad.status = 200
        await judge.step()
        assert len(good.got) == 1
        first, second = (headers["idempotency-key"] for headers, _ in bad.got)
        assert first == second
    assert not (await alerts(client.broker)).waiting


async def test_frozen_coordinator_tells_nothing_when_it_comes_back(
    app: Holdfast, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had decided to tell, and somebody else has told meanwhile."""
    await app.jobs["work"].enqueue(1)
    async with http() as hook:
        plan = alerting("lag > 0", f"webhook {hook.url}")
        frozen, other = Alerter(client, "control-1", plan), Alerter(client, "control-2", plan)
        judge = frozen._judge

        async def slow(*args: Any) -> Any:
            due = await judge(*args)
            await other.step()
            return due

        monkeypatch.setattr(frozen, "_judge", slow)
        await frozen.step()
        assert len(hook.got) == 1


async def test_lost_node_and_missed_slot_are_read(app: Holdfast, client: Client) -> None:
    """From the ledger and the records of slots; nodes that ended by themselves do not count."""
    broker, names, now = client.broker, client.broker.names, client.broker.server_now()
    for node, before, after in (
        ("w1", "RUNNING", "DISCONNECTED"),
        ("w1", "DISCONNECTED", "NOT_RUNNING"),
        ("w2", "TERMINATING", "TERMINATED_GRACEFULLY"),
        ("w2", "TERMINATED_GRACEFULLY", "NOT_RUNNING"),
    ):
        step = Transition(node, "worker", "default", before, after, "no heartbeat", "c1", now)
        await broker.store(names.log("node", node), msgspec.json.encode(step))
    missed = Slot("skipped", now - 60, planned=now, reason="catch_up")
    done = Slot("dispatched", now - 60, planned=now, dispatched=now)
    for schedule, slot in (("nightly", missed), ("hourly", done)):
        key = slot_key(schedule, stamp(int(now) - 60))
        await broker.store(kv_subject(names.slots, key), encode(slot))
    rules = alerting("node_lost; schedule_missed").rules
    found, unread = await Readings(client).read(rules)
    assert not unread
    assert {(r.rule, r.subject) for r in found} == {
        ("node_lost", "w1"),
        ("schedule_missed", "nightly"),
    }


async def test_coordinator_judges_and_the_page_shows_it(
    app: Holdfast, client: Client, nats: Server
) -> None:
    """The role, the API and the page together."""
    await app.jobs["work"].enqueue(1)
    async with http() as hook:
        plan = alerting("lag > 0", f"webhook {hook.url}")
        async with running(Coordinator(client.broker.config, alerting=plan)):
            await until(lambda: hook.got)
    async with site(nats, client.broker.names.namespace, with_pages=True) as there:
        found = (await there.viewer.get("/alerts")).json()
        assert [one["subject"] for one in found["firing"]] == ["default/work"]
        assert found["rules"] == ["lag > 0"]
        page = await there.viewer.get(f"{there.host}/alerts")
        assert page.status_code == 200
        assert "work has 1 runs waiting" in page.text
        assert hook.url not in page.text


@pytest.mark.parametrize(
    ("channel", "says"),
    [("pigeon a", "mail ADDRESS"), ("webhook ftp://x", "webhook"), ("mail a@b", "smtp_url")],
)
def test_channel_that_cannot_work_is_refused(channel: str, says: str) -> None:
    """When the process starts, and without showing what may be secret."""
    with pytest.raises(ConfigError, match=says):
        alerting("node_lost", channel)


def test_rule_that_cannot_be_read_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="kinds are"):
        alerting("nonsense > 1")
