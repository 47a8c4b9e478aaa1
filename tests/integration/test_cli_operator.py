"""`holdfast runs`, `jobs` and `dead`, as an operator types them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from holdfast import Backoff, Context, Holdfast, Limit
from holdfast.client import Run
from holdfast.names import H_ATTEMPT, H_RUN
from tests.integration.cli_support import environment, holdfast, run_command
from tests.integration.support import Seen, operating, queue_empty, record_of, until, working


def define(app: Holdfast, seen: Seen) -> Any:
    """A job that fails as long as nobody has been told."""

    @app.job(retry=Backoff.never())
    async def mail(ctx: Context, data: Any) -> Any:
        if not seen:
            raise ValueError("nobody listens")
        return data

    return mail


async def in_state(app: Holdfast, run: str, state: str) -> None:
    async def there() -> bool:
        record = await record_of(app, run)
        return record is not None and record.state == state

    await until(there, 10, f"{run} being {state}")


async def test_missing_namespace_is_told_and_not_created(app: Holdfast) -> None:
    """Looking at a namespace that does not exist is an error, more often a wrong name."""
    for arguments in (("runs", "list"), ("jobs", "list"), ("dead", "list", "--json")):
        ended = await holdfast(app, *arguments)
        assert (ended.code, ended.out) == (1, "")
        assert "does not exist on this server" in ended.err


async def test_story_of_a_dead_run_from_list_to_replay(app: Holdfast, seen: Seen) -> None:
    """An operator finds a dead run, reads why, sends it again and sees it done."""
    mail = define(app, seen)
    async with operating(app), working(app):
        run = await mail.options(headers={"Trace": "t1"}).enqueue({"to": "ada"})
        await in_state(app, run.id, "dead")

        listed = await holdfast(app, "runs", "list", "--state", "dead")
        assert run.id in listed.out
        assert "ValueError: nobody listens" in listed.out
        shown = await holdfast(app, "runs", "show", run.id)
        assert "dead letter 1" in shown.out

        letters = (await holdfast(app, "dead", "list", "--json", "--error", "LISTENS")).json
        assert [letter["run"] for letter in letters] == [run.id]
        letter = await holdfast(app, "dead", "show", "1")
        assert '{"to":"ada"}' in letter.out
        assert "Traceback" in letter.out
        assert "header Trace" in letter.out

        planned = await holdfast(app, "dead", "replay", "--job", "mail", "--dry-run", "--json")
        assert [p["result"] for p in planned.json] == ["would replay"]
        seen.append("told")
        done = await holdfast(app, "dead", "replay", "1", "--json")
        assert [(d["run"], d["result"]) for d in done.json] == [(run.id, "replayed")]
        assert await run.result(60) == {"to": "ada"}

        again = await holdfast(app, "runs", "retry", run.id)
        assert again.code == 0
        assert "sent again, as run r" in again.out + again.err
        story = await holdfast(app, "runs", "trace", run.id)
        for words in ("accepted", "ValueError: nobody listens", "replay by", "done"):
            assert words in story.out
        steps = (await holdfast(app, "runs", "trace", run.id, "--json")).json["steps"]
        assert [s["outcome"] for s in steps if s["what"] == "ended"] == ["failed", "done"]
        detail = (await holdfast(app, "runs", "show", run.id, "--json")).json
        assert detail["record"]["result"] == {"to": "ada"}


async def test_refused_replay_exits_with_1_and_says_why(app: Holdfast) -> None:
    """A letter whose run has moved on is not sent; the reason is in the table."""
    async with operating(app) as client:
        subject = client.broker.names.dead_letter("default", "mail")
        await client.broker.store(subject, b"1", {"Hf-Reason": "failed"})
        ended = await holdfast(app, "dead", "replay", "--all", "--yes")
    assert ended.code == 1
    assert "names no run" in ended.out
    assert "1 refused" in ended.err


async def test_many_letters_need_a_yes(app: Holdfast) -> None:
    """Replaying or dropping many asks first; where nobody can answer it is refused."""
    async with operating(app) as client:
        subject = client.broker.names.dead_letter("default", "mail")
        for n in range(3):
            await client.broker.store(subject, b"\xff", {H_RUN: f"r{n}", H_ATTEMPT: "1"})
        for verb in ("replay", "drop"):
            ended = await holdfast(app, "dead", verb, "--all")
            assert (ended.code, ended.out) == (1, "")
            assert "3 dead letters? No terminal to confirm on; pass --yes" in ended.err
            wrong = await holdfast(app, "dead", verb)
            assert wrong.code == 2
            assert "name ids, or filters, or --all" in wrong.err
        shown = (await holdfast(app, "dead", "show", "1", "--json")).json
        assert shown["body"] == {"encoding": "base64", "text": "/w=="}
        dropped = await holdfast(app, "dead", "drop", "1", "3", "--yes", "--json")
        assert [d["result"] for d in dropped.json] == ["dropped", "dropped"]
        gone = await holdfast(app, "dead", "show", "1")
        assert (gone.code, gone.out) == (1, "")
        left = (await holdfast(app, "dead", "list", "--json")).json
        assert [letter["run"] for letter in left] == ["r1"]


async def test_jobs_are_paused_resumed_and_purged(app: Holdfast, seen: Seen) -> None:
    """The numbers follow what the operator does; a purge needs a yes."""
    mail = define(app, seen)
    async with operating(app), working(app):
        paused = (await holdfast(app, "jobs", "pause", "mail", "--json")).json
        assert [(j["job"], j["paused"]) for j in paused] == [("mail", True)]
        await mail.enqueue(1)
        await mail.enqueue(2, delay="1h")
        listed = await holdfast(app, "jobs", "list")
        assert "paused" in listed.out
        info = (await holdfast(app, "jobs", "list", "mail", "--json")).json[0]
        assert (info["waiting"], info["parked"]) == (1, 1)
        refused = await holdfast(app, "jobs", "purge", "mail")
        assert refused.code == 1
        assert "default/mail" in refused.err
        wrong = await holdfast(app, "jobs", "purge", "mail", "--which", "some", "--yes")
        assert wrong.code == 2
        purged = await holdfast(app, "jobs", "purge", "mail", "--yes")
        assert purged.out == "default/mail: 1 waiting and 1 parked runs removed\n"
        assert await queue_empty(app)
        resumed = (await holdfast(app, "jobs", "resume", "--group", "default", "--json")).json
        assert [j["paused"] for j in resumed] == [False]
        unknown = await holdfast(app, "jobs", "pause", "nope")
        assert unknown.code == 1
        assert "known are default/mail" in unknown.err


async def test_run_is_cancelled_once(app: Holdfast, seen: Seen) -> None:
    """A queued run is cancelled; a second time it had ended already."""
    mail = define(app, seen)
    async with operating(app):
        run = await mail.enqueue(1)
        first = await holdfast(app, "runs", "cancel", run.id)
        assert (first.code, first.out) == (0, f"{run.id} is cancelled\n")
        second = await holdfast(app, "runs", "cancel", run.id, "--json")
        assert second.json["cancelled"]
        unknown = await holdfast(app, "runs", "cancel", "r1nope")
        assert unknown.code == 1
        assert "no trace of run r1nope" in unknown.err


async def test_lists_are_bounded_and_filtered_by_time(app: Holdfast, seen: Seen) -> None:
    """`--limit` and `--since` narrow a list; what cannot be read as a time is refused."""
    mail = define(app, seen)
    async with operating(app):
        for n in range(5):
            await mail.enqueue(n)
        assert len((await holdfast(app, "runs", "list", "--limit", "3", "--json")).json) == 3
        assert len((await holdfast(app, "runs", "list", "--since", "1h", "--json")).json) == 5
        future = "2099-01-01T00:00:00Z"
        assert (
            json.loads((await holdfast(app, "runs", "list", "--since", future, "--json")).out) == []
        )
        ended = await holdfast(app, "runs", "list", "--since", "yesterday")
        assert ended.code == 1
        assert "--since 'yesterday' is not a time" in ended.err


async def test_many_runs_are_cancelled_and_sent_again(app: Holdfast, seen: Seen) -> None:
    """By filters: shown first, then each by itself; what cannot be done is told."""
    mail = define(app, seen)

    @app.job
    async def later(n: int) -> None: ...

    async with operating(app), working(app):
        failed = [await mail.enqueue({"to": n}) for n in range(3)]
        waiting = [await later.options(delay="1h", key=f"k:{n}").enqueue(n) for n in range(25)]
        for run in failed:
            await in_state(app, run.id, "dead")
        found = await holdfast(app, "runs", "list", "--search", "NOBODY listens")
        assert found.out.count("dead") == 3
        assert "25 delayed" in found.err
        found = await holdfast(app, "runs", "list", "--search", "k:7")
        assert [line.split()[0] for line in found.out.splitlines()[1:]] == [waiting[7].id]

        asked = await holdfast(app, "runs", "cancel", "--job", "later")
        assert asked.code == 1
        assert "Cancel 25 runs?" in asked.err
        shown = await holdfast(app, "runs", "cancel", "--job", "later", "--dry-run", "--json")
        assert {one["result"] for one in shown.json} == {"would cancel"}
        done = await holdfast(app, "runs", "cancel", "--job", "later", "-y", "--json")
        assert {(one["run"], one["result"]) for one in done.json} == {
            (run.id, "cancelled") for run in waiting
        }
        both = await holdfast(app, "runs", "retry", failed[0].id, waiting[0].id, "-y", "--json")
        results = {one["run"]: one["result"] for one in both.json}
        assert "sent again" in results[failed[0].id]
        seen.append("told")
        done = await holdfast(app, "runs", "retry", "--state", "dead", "--job", "mail", "-y")
        assert "2 done, 0 refused" in done.err or "3 done" in done.err
        for run in failed[1:]:
            await in_state(app, run.id, "done")
        none = await holdfast(app, "runs", "cancel")
        assert none.code == 2
        one = await later.options(delay="1h", key="one").enqueue(1)
        mixed = await holdfast(app, "runs", "cancel", "later/nobody", one.id, "-y", "--json")
        results = {found["run"]: found["result"] for found in mixed.json}
        assert (mixed.code, results[one.id]) == (1, "cancelled")
        assert "no trace of run later/nobody" in results["later/nobody"]


async def test_cancelling_by_filters_reaches_runs_that_wait_for_a_limit(app: Holdfast) -> None:
    """Whoever empties a job means its line too; what `--limit` leaves out is told."""
    started = asyncio.Event()

    @app.job(limits=[Limit(running=1)])
    async def charge(n: int) -> None:
        started.set()
        await asyncio.sleep(600)

    async with operating(app), working(app):
        runs = [await charge.options(key=str(n)).enqueue(n) for n in range(4)]
        await started.wait()
        for run in runs[1:]:
            await until(lambda run=run: _is(run, "waiting"), what=run.id)
        two = ("runs", "cancel", "--job", "charge", "--state", "waiting", "--limit", "2", "-y")
        done = await holdfast(app, *two)
        assert (done.code, done.out.count("cancelled")) == (0, 2)
        assert "more than 2 match: this takes 2" in done.err
        rest = await holdfast(app, "runs", "cancel", "--job", "charge", "-y")
        assert "2 done, 0 refused" in rest.err
        assert "more" not in rest.err
        for run in runs:
            assert await _is(run, "cancelled")


async def _is(run: Run[Any], state: str) -> bool:
    return (await run.status()).state == state


async def test_empty_list_of_dead_letters_names_what_may_become_one(app: Holdfast) -> None:
    """A run that fails is no dead letter until its last attempt: the list says so."""

    @app.job(retry=Backoff.list(["1h"]))
    async def fail(n: int) -> None:
        raise ValueError("no")

    async with operating(app), working(app):
        run = await fail.enqueue(1)
        await in_state(app, run.id, "failed")
        listed = await holdfast(app, "dead", "list")
        assert (listed.code, listed.out) == (0, "")
        assert f"1 failed so far and wait for their next attempt, {run.id} until" in listed.err


async def test_event_is_published_from_the_shell(app: Holdfast, seen: Seen) -> None:
    """`holdfast publish EVENT JSON`: its subscribers run; a repeated id sends nothing."""

    @app.job(on="paid")
    async def receipt(data: Any) -> None:
        seen.append(data)

    async with operating(app), working(app):
        sent = await holdfast(app, "publish", "paid", '{"order": 1}', "--id", "o1")
        assert (sent.code, sent.out, sent.err) == (0, "o1\n", "")
        again = await holdfast(app, "publish", "paid", '{"order": 1}', "--id", "o1", "--json")
        assert again.json == {"event": "paid", "id": "o1", "duplicate": True, "subscribed": True}
        await seen.wait()
        nobody = await holdfast(app, "publish", "lost")
        assert "no job subscribes to lost" in nobody.err
        assert (await holdfast(app, "publish", "a b")).code == 1
    assert seen == [{"order": 1}]


TYPED = {
    "holdfast enqueue ma": {"mail"},
    "holdfast runs show mail/d": {"mail/d2=3Aocr"},
    "holdfast runs list --job m": {"mail"},
    "holdfast schedules show n": {"nightly"},
    "holdfast ru": {"runs"},
}


async def test_shell_completes_names_of_the_server(app: Holdfast, seen: Seen) -> None:
    """Tab: jobs, runs and schedules, as bash asks for them; nothing without a server."""
    mail = define(app, seen)
    seen.append("told")
    async with operating(app), working(app):
        cron = ("--cron", "0 3 * * *")
        added = await holdfast(app, "schedules", "add", "nightly", "mail", *cron)
        assert added.code == 0, added.err
        run = await mail.options(key="d2:ocr").enqueue(1)
        await in_state(app, run.id, "done")
        for line, offered in TYPED.items():
            words = line.split(" ")
            env = environment(app) | {
                "_HOLDFAST_COMPLETE": "complete_bash",
                "COMP_WORDS": "\n".join(words),
                "COMP_CWORD": str(len(words) - 1),
            }
            ended = await run_command(env=env)
            assert (set(ended.out.split()), ended.err) == (offered, ""), line
            if len(words) > 2:
                env["HOLDFAST_NATS_URL"] = "nats://127.0.0.1:1"
                ended = await run_command(env=env)
                assert (ended.out.strip(), ended.err) == ("", "")
        env["COMP_WORDS"] = "holdfast\nruns\nlist\n--state\nde"  # known without a server
        env["COMP_CWORD"] = "4"
        assert set((await run_command(env=env)).out.split()) == {"delayed", "dead"}
