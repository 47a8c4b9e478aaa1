"""Dead letters: looked at, sent again exactly once, dropped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Backoff, Context, Holdfast
from holdfast.broker.kv import direct_batch
from holdfast.client import Client
from holdfast.config import RecordConfig
from holdfast.errors import NotFound
from holdfast.names import H_ATTEMPT, H_MSG_ID, H_RUN, H_TTL, kv_subject
from holdfast.server import Server
from holdfast.status.actions import drop_dead, replay_dead
from holdfast.status.dead import DeadFilter, DeadLetter, DeadLetters, as_text
from holdfast.status.messages import last_of
from holdfast.status.operators import Operator
from holdfast.status.replaying import Replayer
from holdfast.status.runs import Runs
from tests.integration.support import (
    Seen,
    client_of,
    operating,
    queue_empty,
    raw,
    record_of,
    until,
    working,
)

HOUR = 3600.0


class Switch:
    """A handler that fails until it is mended."""

    def __init__(self, app: Holdfast, seen: Seen, **contract: Any) -> None:
        self.broken = True

        @app.job(name="send", retry=Backoff.never(), **contract)
        async def send(ctx: Context, data: Any) -> str:
            if self.broken:
                raise ValueError("the mail server is away")
            seen.append((ctx.run, ctx.attempt, data))
            return "sent"

        self.job = send


async def letters_of(app: Holdfast, count: int = 1) -> list[DeadLetter]:
    """The dead letters, once so many are there; newest first."""
    dead = DeadLetters(await client_of(app))

    async def enough() -> list[DeadLetter] | None:
        found = list(await dead.list())
        return found if len(found) >= count else None

    found: list[DeadLetter] = await until(enough, 10, f"{count} dead letters")
    return found


async def ended(app: Holdfast, run: str, state: str) -> None:
    """Wait until a run's record says so."""

    async def there() -> bool:
        record = await record_of(app, run)
        return record is not None and record.state == state

    await until(there, 10, f"{run} being {state}")


# ---- looking


async def test_letter_tells_the_story_of_its_run(app: Holdfast, seen: Seen) -> None:
    """A dead letter shows run, job, reason, error, traceback, attempts, headers and bytes."""
    job = Switch(app, seen).job
    async with app, working(app):
        run = await job.options(key="a b", headers={"Trace": "t1"}).enqueue({"to": "x"})
        letter = (await letters_of(app))[0]
        dead = DeadLetters(await client_of(app))
        assert letter == await dead.show(letter.id)
        assert (letter.run, letter.job, letter.group) == (run.id, "send", "default")
        assert (letter.reason, letter.failures, letter.crashes) == ("failed", 1, 0)
        assert letter.error == "ValueError: the mail server is away"
        assert "raise ValueError" in letter.traceback
        assert letter.headers == {"Trace": "t1"}
        assert await dead.body(letter.id) == b'{"to":"x"}'


async def test_letters_are_filtered_by_what_they_say(app: Holdfast, nats: Server) -> None:
    """Job, group, reason, a part of the error, and time narrow the list; newest come first."""
    async with operating(app) as client:
        names = client.broker.names
        for n, (job, reason) in enumerate((("a", "failed"), ("b", "failed"), ("a", "crashed"))):
            headers = {H_RUN: f"r{n}", "Hf-Reason": reason, "Hf-Error": f'"Boom {n}"'}
            await client.broker.store(names.dead_letter("g", job), b"", headers)
        dead = DeadLetters(client)

        async def found(**wanted: Any) -> list[str]:
            return [letter.run for letter in await dead.list(DeadFilter(**wanted))]

        assert await found() == ["r2", "r1", "r0"]
        assert await found(job="a") == ["r2", "r0"]
        assert await found(group="other") == []
        assert await found(reason="crashed") == ["r2"]
        assert await found(error="BOOM 1") == ["r1"]
        assert await found(run="r0") == ["r0"]
        middle = (await dead.list())[1].at
        assert await found(since=middle) == ["r2", "r1"]
        assert await found(before=middle) == ["r0"]
        assert len(await dead.list(limit=2)) == 2


async def test_letter_with_any_headers_does_not_cut_the_list_short(app: Holdfast) -> None:
    """A user's header called `Status`, or nonsense in ours, hides no letter."""
    async with operating(app) as client:
        subject = client.broker.names.dead_letter("g", "j")
        odd = {"Status": "204", "Hf-Error": "[1", "Hf-Attempts": "{", "Hf-Failures": "many"}
        await client.broker.store(subject, b"\xff", {**odd, "Hf-Dead-At": "never", H_ATTEMPT: "-1"})
        await client.broker.store(subject, b"", {})
        found = await DeadLetters(client).list()
        assert [(d.error, d.failures, d.attempt) for d in found] == [("", 0, 1), ("[1", 0, 1)]
        assert as_text(b"\xff").encoding == "base64"


STATUS_LIKE = {
    "Status": "503",
    "Description": "No Responders",
    "KV-Operation": "DEL",
    "Reply-To": "nobody",
}


@pytest.mark.parametrize("name", sorted(STATUS_LIKE))
async def test_letter_is_handled_whatever_its_headers_are_called(
    app: Holdfast, seen: Seen, name: str
) -> None:
    """A user's header that a client takes for the server's word does not hide or block a letter."""

    @app.job(retry=Backoff.never())
    async def fails(ctx: Context, n: int) -> None:
        seen.append((n, ctx.headers.get(name)))
        if len(seen) < 3:
            raise ValueError("no")

    async with working(app), operating(app) as client:
        run = await fails.options(headers={name: STATUS_LIKE[name]}).enqueue(1)
        letters = DeadLetters(client)
        [letter] = await until(lambda: letters.list(), 10, "the letter")
        assert (await letters.show(letter.id)).headers[name] == STATUS_LIKE[name]
        assert await letters.body(letter.id) == b"1"
        await until(lambda: _ended(app, run.id, "dead"), 10, "its record")
        [replayed] = await letters.replay(DeadFilter(job="fails"))
        assert replayed.result == "replayed"
        await seen.wait(2)
        await until(lambda: letters.list(), 10, "the second letter")
        await until(lambda: _ended(app, run.id, "dead"), 10, "its record")
        await Runs(client).retry(run.id)
        await run.result(timeout=60)
        assert seen == [(1, STATUS_LIKE[name])] * 3


async def _ended(app: Holdfast, run: str, state: str) -> bool:
    record = await record_of(app, run)
    return record is not None and record.state == state


async def test_letter_with_a_status_line_and_forged_facts_is_shown(
    app: Holdfast, nats: Server
) -> None:
    """Also one that another client published with a status in its first line."""
    async with operating(app) as client:
        names = client.broker.names
        block = b"NATS/1.0 503 No\r\nHf-Run: r1\r\nNats-Sequence: 77\r\nNats-Subject: x\r\n\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", nats.port)
        subject = names.dead_letter("g", "j")
        line = f"HPUB {subject} {len(block)} {len(block) + 2}\r\n".encode()
        writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n' + line + block + b"{}\r\n")
        await writer.drain()
        letters = DeadLetters(client)
        [letter] = await until(lambda: letters.list(), 10, "the letter")
        writer.close()
        await writer.wait_closed()
        shown = await letters.show(letter.id)
        assert (shown.run, shown.group, shown.job) == ("r1", "g", "j")


async def test_list_of_large_letters_is_complete(app: Holdfast) -> None:
    """The server ends a page early when its messages are large; the list goes on after it."""
    async with operating(app) as client:
        subject = client.broker.names.dead_letter("g", "j")
        body = b"x" * 1_000_000
        for n in range(75):  # more than the 64 MB that one answer takes
            await client.broker.store(subject, body, {H_RUN: f"r{n}"})
        found = [
            m.headers[H_RUN]
            async for m in direct_batch(client.broker, client.broker.names.dead, subject)
        ]
        assert found == [f"r{n}" for n in range(75)]
        assert len(await DeadLetters(client).list(limit=100)) == 75
        await client.topology.purge(client.broker.names.dead, subject)


# ---- replaying


async def test_replayed_run_keeps_its_id_bytes_and_headers(app: Holdfast, seen: Seen) -> None:
    """A replay is the same run with fresh counts; the letter is gone afterwards."""
    switch = Switch(app, seen)
    async with app, working(app):
        run = await switch.job.options(headers={"Trace": "t1"}).enqueue({"to": "x"})
        letter = (await letters_of(app))[0]
        switch.broken = False
        client = await client_of(app)
        done = await DeadLetters(client).replay([letter.id])
        assert [(d.run, d.result) for d in done] == [(run.id, "replayed")]
        assert await run.result(60) == "sent"
        record = await record_of(app, run.id)
        assert await DeadLetters(client).list() == []
    assert seen == [(run.id, 1, {"to": "x"})]
    assert record is not None
    assert (record.message, record.failures, len(record.attempts)) == (2, 0, 2)


async def test_replay_sends_what_is_not_json_unchanged(
    app: Holdfast, nats: Server, seen: Seen
) -> None:
    """Bytes that no job can read come back from a replay as the same bytes."""
    Switch(app, seen)
    body = b"\xff\x00 {not json"
    async with app, working(app), raw(nats) as (_, js):
        client = await client_of(app)
        await js.publish(client.broker.names.job("default", "send"), body)
        first = (await letters_of(app))[0]
        dead = DeadLetters(client)
        assert (first.reason, await dead.body(first.id)) == ("invalid", body)
        await dead.replay([first.id])
        second = (await letters_of(app))[0]
        assert second.id != first.id
        assert (second.run, second.attempt) == (first.run, 2)
        assert await dead.body(second.id) == body


async def test_replay_by_many_operators_makes_one_run(app: Holdfast, seen: Seen) -> None:
    """However many replay one letter at the same time, the handler starts once."""
    switch = Switch(app, seen)
    async with app, working(app):
        run = await switch.job.enqueue(1)
        letter = (await letters_of(app))[0]
        switch.broken = False
        client = await client_of(app)
        operators = [DeadLetters(client) for _ in range(8)]
        outcomes = await asyncio.gather(*(o.replay([letter.id]) for o in operators))
        assert any(o[0].result == "replayed" for o in outcomes)
        await ended(app, run.id, "done")
        await until(lambda: queue_empty(app), 10, "an empty queue")
        later = await operators[0].replay(DeadFilter())
        assert later == []
    assert len(seen) == 1


async def test_replay_repairs_a_crash_before_the_publish(app: Holdfast, seen: Seen) -> None:
    """An operator that died between the record and the message: replaying again sends it."""
    switch = Switch(app, seen)
    async with app, working(app):
        run = await switch.job.enqueue(1)
        letter = (await letters_of(app))[0]
        switch.broken = False
        client = await client_of(app)
        record = await record_of(app, run.id)
        entry = await client.runs.get(run.id)
        assert entry is not None
        assert await Replayer(client)._write(
            run.id, record, entry.revision, "default", "send", message=2
        )
        done = await DeadLetters(client).replay([letter.id])
        assert done[0].result == "replayed"
        assert await run.result(60) == "sent"
    assert len(seen) == 1


async def test_replay_of_a_letter_left_behind_is_refused(app: Holdfast, seen: Seen) -> None:
    """An operator that died before removing the letter: it is not sent a second time."""
    switch = Switch(app, seen)
    async with app, working(app):
        run = await switch.job.enqueue(1)
        client = await client_of(app)
        letter = (await letters_of(app))[0]
        kept = await last_of(client.broker, client.broker.names.dead, letter_subject(client))
        assert kept is not None
        switch.broken = False
        assert await Replayer(client).replay(kept, "default", "send", kept.body) == ""
        await ended(app, run.id, "done")
        dead = DeadLetters(client)
        for dry_run in (True, False):
            done = await dead.replay([letter.id], dry_run=dry_run)
            assert done[0].result == "refused"
            assert "done since" in done[0].why
    assert len(seen) == 1


def letter_subject(client: Client) -> str:
    return client.broker.names.dead_letter("default", "send")


async def test_replay_survives_a_message_number_that_was_used_before(
    app: Holdfast, seen: Seen
) -> None:
    """A retry that a worker parked before it died, and that came to a dead run, is no replay.

    Also when the replay's operator died in between: the id carries the mark in the record.
    """
    switch = Switch(app, seen)
    async with app, working(app):
        for number in range(2):
            switch.broken = True
            run = await switch.job.enqueue(number)
            letter = (await letters_of(app))[0]
            client = await client_of(app)
            subject = client.broker.names.job("nobody", "listens")
            await client.broker.store(subject, b"", {H_MSG_ID: f"{run.id}.2"})
            switch.broken = False
            if number == 1:
                entry = await client.runs.get(run.id)
                assert entry is not None
                record = await record_of(app, run.id)
                assert await Replayer(client)._write(
                    run.id, record, entry.revision, "default", "send", message=2
                )
            await DeadLetters(client).replay([letter.id])
            assert await run.result(60) == "sent"
    assert len(seen) == 2


async def test_replay_after_the_record_expired_makes_one_that_expires(
    app: Holdfast, seen: Seen
) -> None:
    """Without a record the replay makes one, with a TTL until a worker's claim replaces it."""
    switch = Switch(app, seen)
    async with operating(app) as client:
        async with working(app):
            run = await switch.job.enqueue(1)
            letter = (await letters_of(app))[0]
        await client.runs.delete(run.id)
        switch.broken = False
        await DeadLetters(client).replay([letter.id])
        assert await ttl_of(client, run.id) == HOUR
        async with working(app):
            await ended(app, run.id, "done")
    assert [s[0] for s in seen] == [run.id]


async def ttl_of(client: Client, run: str) -> float | None:
    kept = await last_of(client.broker, client.runs.stream, kv_subject(client.runs.name, run))
    assert kept is not None
    text = kept.headers.get(H_TTL)
    return float(text.removesuffix("s")) if text else None


async def test_replay_of_at_least_once_leaves_no_lasting_record(app: Holdfast, seen: Seen) -> None:
    """A job that keeps no records: replayed, dead again, replayed again; what is left expires."""
    switch = Switch(app, seen, delivery="at_least_once")
    async with app, working(app):
        run = await switch.job.enqueue(1)
        client = await client_of(app)
        dead = DeadLetters(client)
        first = (await letters_of(app))[0]
        await dead.replay([first.id])
        second = (await letters_of(app))[0]
        assert (second.run, second.attempt) == (run.id, 2)
        switch.broken = False
        done = await dead.replay([second.id])
        assert done[0].result == "replayed"
        await seen.wait(1)
        await until(lambda: queue_empty(app), 10, "an empty queue")
        assert await ttl_of(client, run.id) == RecordConfig().keyless_ttl_seconds
    assert [s[0] for s in seen] == [run.id]


async def test_replay_gives_a_run_its_time_anew(app: Holdfast, seen: Seen) -> None:
    """`run_timeout` counts from the replay, not from when the run was first accepted."""
    switch = Switch(app, seen, run_timeout="1h")
    async with app, working(app):
        run = await switch.job.enqueue(1)
        letter = (await letters_of(app))[0]
        before = await record_of(app, run.id)
        switch.broken = False
        await DeadLetters(await client_of(app)).replay([letter.id])
        await ended(app, run.id, "done")
        after = await record_of(app, run.id)
    assert before is not None
    assert after is not None
    assert after.created > before.ended


async def test_replayed_run_is_claimed_by_its_jobs_own_rules(app: Holdfast, seen: Seen) -> None:
    """Without a record a replay knows neither restart strategy nor payload: the claim does."""
    gate = asyncio.Event()

    @app.job(delivery="at_most_once")
    async def once(n: int) -> None:
        seen.append(n)
        await gate.wait()

    async with operating(app) as client, working(app):
        subject = client.broker.names.dead_letter("default", "once")
        await client.broker.store(subject, b"7", {H_RUN: "r1", H_ATTEMPT: "1"})
        done = await DeadLetters(client).replay(DeadFilter())
        assert done[0].result == "replayed"
        await seen.wait(1)
        record = await record_of(app, "r1")
        assert record is not None
        assert (record.state, record.restart, record.body) == ("running", "never", b"7")
        gate.set()
        await ended(app, "r1", "done")
    assert seen == [7]


async def test_replay_of_many_keeps_to_the_rate(app: Holdfast) -> None:
    """Letters go out oldest first with a pause between them; a dry run sends nothing."""
    async with operating(app) as client:
        for n in range(4):
            subject = client.broker.names.dead_letter("g", "j")
            await client.broker.store(subject, b"1", {H_RUN: f"r{n}", H_ATTEMPT: "1"})
        pauses: list[float] = []

        class Clock(type(client.broker.clock)):
            async def sleep(self, seconds: float) -> None:
                pauses.append(seconds)

        client.broker.clock = Clock()
        dead = DeadLetters(client)
        planned = await dead.replay(DeadFilter(job="j"), dry_run=True)
        assert [p.result for p in planned] == ["would replay"] * 4
        assert await queue_empty(app)
        done = await dead.replay(DeadFilter(job="j"), rate=4, limit=3)
        assert [d.run for d in done] == ["r1", "r2", "r3"]
        assert pauses == [0.25, 0.25]
        assert [d.run for d in await dead.list()] == ["r0"]


async def test_large_body_is_kept_shown_and_replayed_whole(
    app: Holdfast, nats: Server, seen: Seen
) -> None:
    """A body that leaves no room for its story is kept as an object, and sent again whole."""
    Switch(app, seen)
    async with app, working(app), raw(nats) as (connection, js):
        client = await client_of(app)
        body = b'"' + b"x" * (connection.max_payload - 302) + b'"'
        await js.publish(client.broker.names.job("default", "send"), body)
        letter = (await letters_of(app))[0]
        dead = DeadLetters(client)
        assert letter.object
        assert await dead.body(letter.id) == body
        await dead.replay([letter.id])
        again = (await letters_of(app))[0]
        assert again.attempt == 2
        assert await dead.body(again.id) == body
        await dead.drop([again.id])
        with pytest.raises(NotFound):
            await client.objects.get(again.object)


# ---- dropping, and the ledger


async def test_drop_removes_and_the_ledger_tells_who_did(app: Holdfast) -> None:
    """A dropped letter is gone; every action names the operator, the time and the runs."""
    async with operating(app) as client:
        for n in range(3):
            subject = client.broker.names.dead_letter("g", "j")
            await client.broker.store(subject, b"1", {H_RUN: f"r{n}", H_ATTEMPT: "1"})
        by = Operator(client, "ada")
        dead = by.dead
        ids = [letter.id for letter in await dead.list()]
        assert [d.result for d in await drop_dead(by, ids[:1], dry_run=True)] == ["would drop"]
        assert [d.result for d in await drop_dead(by, ids[:1])] == ["dropped"]
        await replay_dead(by, ids[1:])
        assert await dead.list() == []
        with pytest.raises(NotFound, match="does not exist"):
            await dead.show(ids[0])
        actions = await by.audit.actions()
        assert [(a.verb, a.who, a.runs) for a in actions] == [
            ("replay", "ada", ("r0", "r1")),
            ("drop", "ada", ("r2",)),
        ]
