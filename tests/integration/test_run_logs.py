"""What handlers log and print: kept with their run, live, bounded, masked, and never in the way."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from holdfast import Backoff, Holdfast
from holdfast.client import Client
from holdfast.client import client as client_module
from holdfast.config import RecordConfig
from holdfast.model.runlog import LOG_MESSAGE, Logged, LogMessage
from holdfast.server import Server
from tests.integration import talking_app
from tests.integration.cli_support import environment, holdfast
from tests.integration.command import Command
from tests.integration.support import Seen, client_of, working
from tests.integration.web_support import site
from tests.support import until

log = logging.getLogger("shop")


async def test_lines_of_every_logger_and_thread_belong_to_their_run(app: Holdfast) -> None:
    """Async and threaded handlers, two at a time: each run has its own lines, with its fields."""

    @app.job
    async def wait(n: int) -> None:
        log.info("first %d", n, extra={"n": n})
        await asyncio.sleep(0.01)
        logging.getLogger(f"other.{n}").warning("second %d", n)

    @app.job(retry=Backoff.never())
    def block(n: int) -> None:
        log.error("in a thread", exc_info=ValueError(f"why {n}"))
        raise RuntimeError("the end")

    async with app, working(app) as worker:
        waits = await app.enqueue_many([wait.request(n) for n in range(20)])
        blocks = await block.enqueue(1)
        for n, run in enumerate(waits):
            await run.result(60)
            lines = await run.logs()
            assert [line.text for line in lines] == [f"first {n}", f"second {n}"]
            assert [line.level for line in lines] == ["info", "warning"]
            assert [line.logger for line in lines] == ["shop", f"other.{n}"]
            assert lines[0].extra == {"n": n}
            assert {(line.attempt, line.node) for line in lines} == {(1, worker.node)}
        told = [line async for line in blocks.follow()]
    assert told[0].text.startswith("in a thread\nValueError: why 1")
    assert "is a dead letter (failed): Traceback" in told[-1].text
    assert "RuntimeError: the end" in told[-1].text


async def test_following_a_run_without_a_record_ends_with_it(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing says that it ended, but no message carries it any more."""
    monkeypatch.setattr(client_module, "LOOK_AGAIN_SECONDS", 0.02)
    gate = asyncio.Event()

    @app.job(delivery="at_least_once")
    async def ping(number: int) -> None:
        await gate.wait()
        log.info("pong %d", number)

    async with app:
        run = await ping.enqueue(7)

        async def follow() -> list[str]:
            return [line.text async for line in app.run(run.id).follow()]

        following = asyncio.create_task(follow())
        async with working(app):
            gate.set()
            assert await following == ["pong 7"]


async def test_lines_are_shown_while_the_run_runs(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """A worker process: what is logged and printed is in its log with the run's fields, and
    `runs logs --follow` shows it at once, and ends with the run."""
    sender = Holdfast("talking", nats_url=nats.url, namespace=namespace)
    for job in talking_app.app.jobs.values():
        sender.job(name=job.name, execution=job.spec.execution, retry=Backoff.never())(job.func)
    gate = tmp_path / "gate"
    env = environment(sender) | {"HOLDFAST_LOG_FORMAT": "json"}
    target = "tests.integration.talking_app:app"
    async with sender:
        with Command("worker", target, folder=tmp_path, env=env) as worker:
            run = await sender.enqueue("talk", str(gate))
            await worker.says('"order 42"')
            with Command("runs", "logs", run.id, "-f", folder=tmp_path, env=env) as follow:
                shown = await follow.says("does not propagate")
                assert "a dead letter" not in shown
                gate.touch()
                assert await follow.ended() == 0
                shown = follow.text
            computed = await sender.enqueue("compute", 7)
            await computed.result(60)
            lines = await computed.logs()
            printed = worker.text
        first = [line.split("  [")[0] for line in shown.splitlines() if "  [" in line]
        parts = [line.split(": ", 1)[1] for line in first]
        assert parts[:4] == ["order 42 customer=ann items=3", "printed", "two", "to stderr"]
        assert parts[4:6] == ["of a logger that does not propagate", "in an executor"]
        assert parts[6] == "parts"  # its line never ended
        assert "it failed" in shown
        assert "not kept" not in shown
    assert [line.text for line in lines] == ["computing 7", "slow", "unfinished"]
    assert [line.logger for line in lines] == ["print", "shop", "print"]
    assert lines[1].extra == {"n": 7}
    told = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    order = next(line for line in told if line["message"] == "order 42")
    assert order.items() >= {
        "run": run.id, "job": "talk", "attempt": 1, "customer": "ann", "items": 3
    }.items()  # fmt: skip
    slow = next(line for line in told if line["message"] == "slow")
    assert (slow["run"], slow["n"]) == (computed.id, 7)


async def test_flood_of_lines_neither_fails_nor_fills(app: Holdfast) -> None:
    """A run that logs without end keeps its newest lines, and says that others were lost."""

    @app.job
    async def flood(n: int) -> int:
        for number in range(n):
            log.info("line %d %s", number, "x" * 1000)
        return n

    async with app, working(app) as worker:
        run = await flood.enqueue(3_000)
        assert await run.result(60) == 3_000
        lines = await run.logs()
        dropped = worker.telemetry.log_lines.labels("dropped")._value.get()
    assert dropped + sum(line.logger == "shop" for line in lines) == 3_000
    assert dropped > 0
    assert any(f"{int(dropped)} lines were dropped here" in line.text for line in lines)


async def test_lines_of_a_run_are_bounded_by_the_server(app: Holdfast) -> None:
    """The stream keeps a number of messages of each run and of bytes of all, the newest."""
    async with app:
        client = await client_of(app)
        await client.topology.ensure()
        broker = client.broker
        config = (await broker.api(f"STREAM.INFO.{broker.names.run_logs}"))["config"]
        assert config["max_bytes"] == RecordConfig().run_log_megabytes * 1_000_000
        for number in range(config["max_msgs_per_subject"] + 5):
            body = LOG_MESSAGE.encode(LogMessage((Logged(1.0, str(number)),)))
            await broker.publish(broker.names.run_log("r1"), body)
        await broker.flush()
        await until(lambda: _last(client, config["max_msgs_per_subject"] + 4))
        lines = await client.logs("r1")
    assert len(lines) == config["max_msgs_per_subject"]
    assert lines[0].text == "5"


async def _last(client: Client, number: int) -> bool:
    lines = await client.logs("r1")
    return bool(lines) and lines[-1].text == str(number)


async def test_nothing_is_kept_when_it_is_off(app: Holdfast) -> None:
    """`run_log = off`: no lines, and the root logger is left alone."""

    @app.job
    async def talk(n: int) -> list[Any]:
        log.warning("something")
        return [logging.root.level, len(logging.root.handlers)]

    before = [logging.root.level, len(logging.root.handlers)]
    async with app, working(app, run_log="off"):
        run = await talk.enqueue(1)
        assert await run.result(60) == before
        assert await run.logs() == []


async def test_level_of_the_worker_stays_when_runs_log_more(
    app: Holdfast, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines from `run_log` on are kept even if the worker's own log shows fewer; afterwards the
    levels are what they were."""

    @app.job
    async def talk(n: int) -> None:
        log.debug("fine")
        log.warning("coarse")

    before = logging.root.level
    async with app, working(app, run_log="debug"):
        run = await talk.enqueue(1)
        await run.result(60)
        assert [line.text for line in await run.logs()][-2:] == ["fine", "coarse"]
    assert logging.root.level == before
    assert "coarse" in caplog.text
    assert "fine" not in caplog.text


async def test_broken_log_calls_fail_nothing(app: Holdfast) -> None:
    """Arguments that do not fit, values that cannot be shown, half characters."""

    class Rude:
        def __str__(self) -> str:
            raise RuntimeError("no")

    rude = logging.getLogger("shop.rude")
    rude.addHandler(logging.NullHandler())
    rude.propagate = False

    @app.job
    async def talk(n: int) -> int:
        rude.warning("one %d", "text")
        rude.warning("two", extra={"rude": Rude(), "set": {1}, "bytes": b"x"})
        rude.warning("three \ud800")
        rude.warning(Rude())
        rude.warning("four")
        return n

    async with app, working(app):
        run = await talk.enqueue(1)
        assert await run.result(60) == 1
        lines = [line.text for line in await run.logs()]
    assert lines[0] == "one %d"
    assert lines[-1] == "four"
    assert any(line.startswith("three") for line in lines)


async def test_unreadable_lines_are_passed_over(app: Holdfast) -> None:
    """Somebody else's bytes among the lines of a run hide only themselves."""

    @app.job
    async def talk(n: int) -> None:
        log.info("readable")

    async with app, working(app):
        client = await client_of(app)
        run = await talk.enqueue(1)
        for body in (b"\xff", b"[", b'{"lines": 1}', b""):
            await client.broker.store(client.broker.names.run_log(run.id), body)
        await run.result(60)
        assert [line.text for line in await run.logs()] == ["readable"]


async def test_viewer_reads_masked_lines(nats: Server, namespace: str) -> None:
    """By API and page: a viewer sees the lines without their secrets, an operator all of them; a
    secret of the payload is in nobody's lines."""
    app = Holdfast("shop", nats_url=nats.url, namespace=namespace)

    @app.job
    async def login(password: str) -> None:
        log.info("password=hunter2-text", extra={"api_key": "hunter2-extra", "user": "ann"})
        log.info("trying %s", password)

    async with app, working(app), site(nats, namespace, with_pages=True) as there:
        run = await login.enqueue("hunter2-payload")
        await run.result(60)
        answers = {}
        for role in ("viewer", "operator"):
            answer = await getattr(there, role).get(f"/runs/{run.id}/logs")
            assert answer.status_code == 200
            answers[role] = answer.json()
            token = getattr(there, role).headers["authorization"]
            headers = {"authorization": token, "accept": "text/html"}
            page = await there.browser().get(f"/runs/{run.id}", headers=headers)
            assert "password=" in page.text
            assert ("hunter2-text" in page.text) == (role == "operator")
            assert ("hunter2-payload" in page.text) == (role == "operator"), "as the payload only"
            assert "trying ***" in page.text
        first, second = answers["viewer"]["items"]
        assert "hunter2" not in json.dumps(answers["viewer"])
        assert first["extra"]["user"] == "ann"
        assert second["text"] == "trying ***"
        assert answers["operator"]["items"][0]["text"] == "password=hunter2-text"
        newer = await there.viewer.get(f"/runs/{run.id}/logs?after={answers['viewer']['next']}")
        assert newer.json() == {"items": [], "next": answers["viewer"]["next"]}


async def test_command_shows_lines_by_level_and_key(app: Holdfast, seen: Seen) -> None:
    """`runs logs` takes the key as it was given, and can show only what is serious."""

    @app.job
    async def talk(n: int) -> None:
        log.info("fine", extra={"n": n})
        log.error("serious\x1b[31m")

    async with app, working(app):
        run = await talk.options(key="d2:ocr/left").enqueue(1)
        await run.result(60)
        shown = await holdfast(app, "runs", "logs", "talk/d2:ocr/left")
        assert shown.code == 0
        assert [part in shown.out for part in ("fine n=1", "serious\\x1b[31m")] == [True, True]
        shown = await holdfast(app, "runs", "logs", run.id, "--level", "error", "--json")
        line = json.loads(shown.out)
        assert (line["level"], line["attempt"]) == ("error", 1)
        detail = await holdfast(app, "runs", "show", "talk/d2:ocr/left")
        assert detail.out.split()[:2] == ["run", run.id]
        none = await holdfast(app, "runs", "logs", "talk/other", "-f")
        assert (none.code, none.out) == (1, "")
        assert "no trace of run talk/other" in none.err
