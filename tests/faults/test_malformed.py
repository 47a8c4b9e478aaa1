"""10,000 malformed inputs: each gets a clear error or a dead letter, and no worker stops."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.app import Holdfast
from holdfast.broker import Broker
from holdfast.cli import main
from holdfast.cli.command import TOLD
from holdfast.config import ConnectionConfig
from holdfast.errors import BrokerError, HoldfastError
from holdfast.job import Job
from holdfast.server import Server
from tests.faults.app import sender
from tests.faults.effects import Effects
from tests.faults.processes import until, worker_fleet

RAW, API, CLI = 5_000, 4_600, 400

NASTY = [
    "a\r\nb",
    "\r\n\r\nPUB x 0\r\n",
    "*",
    ">",
    "a.*",
    "a..b",
    "..",
    "../../etc/passwd",
    " ",
    "",
    "\x00",
    "é",
    "😀",
    "a" * 5_000,
    "$JS.API.STREAM.DELETE.X",
    "\ud800",
    "-",
    "NaN",
    "'; DROP TABLE runs; --",
    "<script>alert(1)</script>",
]


def _bodies(dice: random.Random) -> bytes:
    """A body that is wrong in one of many ways (or happens to be fine)."""
    kinds: list[Any] = [
        lambda: dice.randbytes(dice.randint(0, 200)),
        lambda: b"\xff\xfe" + dice.randbytes(5),
        lambda: b"{" * dice.choice([1, 100, 100_000]),
        lambda: b"[" * 5_000 + b"]" * 5_000,
        lambda: b'{"a": NaN}',
        lambda: b'{"a": Infinity}',
        lambda: b'{"a": 1e999}',
        lambda: b'{"a": ' + b"9" * dice.choice([20, 5_000]) + b"}",
        lambda: b'{"a": "one"}',
        lambda: b'{"a": null}',
        lambda: b'{"a": 1, "a": 2, "zzz": 3}',
        lambda: b'{"b": "x"}',
        lambda: b'"\\ud800"',
        lambda: b"null",
        lambda: b"[]",
        lambda: b"1",
        lambda: json.dumps({"a": 1, "b": dice.choice(NASTY)}).encode()[: dice.randint(1, 60)],
        lambda: b'{"a": 1, "b": "' + b"x" * 200_000,
        lambda: b"\r\n",
        lambda: b"",
    ]
    made: bytes = dice.choice(kinds)()
    return made


def _headers(dice: random.Random) -> dict[str, str] | None:
    """Nonsense where the system's own headers would be."""
    if dice.random() < 0.4:
        return None
    names = ["Hf-Run", "Hf-Attempt", "Hf-Failures", "Hf-Crashes", "Hf-Created", "Nats-Msg-Id", "X"]
    values = ["-1", "1e9", "999999999999999999999", "x y", "*", "a.b.>", "é", "../x", "0", "NaN"]
    chosen = {dice.choice(names): dice.choice(values) + str(dice.randint(0, 10**9)) for _ in "ab"}
    if dice.random() < 0.2:
        chosen["Hf-Attempt"] = dice.choice(["-1", "abc", "1000000000000", " "])
    return chosen


@pytest.mark.timeout(400)
async def test_malformed_inputs_stop_nobody(
    nats: Server,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: Callable[[str], None],
) -> None:
    """Raw publishes, the API and the command line: all answered, the same worker still runs."""
    dice = random.Random(11)
    async with sender(nats.url, namespace) as app:
        env = {"HOLDFAST_LOG_LEVEL": "error", "HOLDFAST_WORKER_UNKNOWN_PAYLOAD_SECONDS": "1"}
        with worker_fleet(1, nats.url, namespace, tmp_path, **env) as [worker]:
            await app.jobs["typed"].options(key="first").enqueue(a=1)
            stored = await _raw(nats.url, namespace, dice)
            refused = await _through_api(app, dice)
            said = await asyncio.to_thread(_through_cli, nats.url, namespace, dice, monkeypatch)
            run = await app.jobs["typed"].enqueue(a=7)
            assert await run.result(timeout=120) == 7
            drained = await _drained(nats.url, namespace)
            assert worker.running
            log = worker.text()
    report(
        f"{RAW} raw ({stored} stored), {API} calls ({refused} refused), {CLI} commands: "
        f"{drained['dead']} dead letters, {drained['records']} records, nothing waiting"
    )
    assert "Traceback" not in log
    assert said == CLI
    assert drained["waiting"] == 0
    assert drained["dead"] > 1_000
    assert Effects(tmp_path / "effects").count() > 0


async def _raw(url: str, namespace: str, dice: random.Random) -> int:
    """Publish straight to the jobs' subjects, as any client of any language could."""
    config = ConnectionConfig(nats_url=url, namespace=namespace)
    async with Broker(config) as broker:
        await until(lambda: _stream_there(broker), what="the streams")
        futures = []
        for _ in range(RAW):
            job = dice.choice(["typed", "anything", "loose", "once"])
            subject = broker.names.job("default", job)
            futures.append(await broker.send(subject, _bodies(dice), _headers(dice)))
            if len(futures) % 500 == 0:
                await asyncio.gather(*futures[-500:])
        answers = await asyncio.gather(*futures)
        return sum(1 for a in answers if b'"seq"' in a.body)


async def _stream_there(broker: Broker) -> bool:
    try:
        await broker.api(f"STREAM.INFO.{broker.names.jobs}")
    except BrokerError:
        return False
    return True


async def _through_api(app: Holdfast, dice: random.Random) -> int:
    """Every refusal is one of ours; nothing else comes out."""
    refused = 0
    said: list[str] = []
    typed: Job[Any] = app.jobs["typed"]
    for _ in range(API):
        nasty = dice.choice(NASTY)
        call = dice.choice(
            [
                lambda n=nasty: typed.enqueue(n),
                lambda n=nasty: typed.enqueue(a=1, b=n, headers={n: "x"}),
                lambda n=nasty: typed.enqueue(a=1, headers={"X": n}),
                lambda n=nasty: typed.enqueue(a=float("nan")),
                lambda n=nasty: typed.enqueue(a=1, wrong=n),
                lambda n=nasty: typed.enqueue(a=1, delay=n),
                lambda n=nasty: typed.enqueue(a=1, delay=-5),
                lambda n=nasty: typed.enqueue(a=1, at=n),
                lambda n=nasty: typed.enqueue(a=1, group=n or "*"),
                lambda n=nasty: typed.enqueue(a=1, key=n),
                lambda n=nasty: typed.enqueue(a=1, b="x" * 1_048_576),
                lambda n=nasty: app.enqueue(n, 1),
                lambda n=nasty: app.publish(n, {"x": 1}),
                lambda n=nasty: app.publish("fine", {"x": float("inf")}),
                lambda n=nasty: typed.enqueue({"deep": [[[[[[object()]]]]]]}),
            ]
        )
        try:
            await call()
        except HoldfastError as error:
            refused += 1
            said.append(str(error))
    assert all(text and "\n" not in text for text in said)
    return refused


def _through_cli(
    url: str, namespace: str, dice: random.Random, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Each command ends with a code and a sentence, never with a traceback."""
    monkeypatch.setenv("HOLDFAST_NATS_URL", url)
    monkeypatch.setenv("HOLDFAST_NAMESPACE", namespace)
    ended = 0
    for _ in range(CLI):
        nasty = dice.choice(NASTY).replace("\x00", "0").encode("utf-8", "replace").decode()
        command = dice.choice(
            [
                ["enqueue", "typed", nasty],
                ["enqueue", nasty, "{}"],
                ["enqueue", "typed", _bodies(dice)[:2_000].decode("utf-8", "replace")],
                ["enqueue", "typed", '{"a": 1}', "--key", nasty],
                ["enqueue", "typed", '{"a": 1}', "--delay", nasty],
                ["enqueue", "typed", '{"a": 1}', "--at", nasty],
                ["enqueue", "typed", '{"a": 1}', "--header", nasty],
                ["enqueue", "typed", f"@{nasty}"],
                ["runs", "show", nasty],
                ["runs", "cancel", nasty],
                ["dead", "show", nasty],
                ["jobs", "pause", nasty or "x"],
                ["nodes", "show", nasty],
                ["--namespace", nasty, "runs", "list"],
            ]
        )
        code, out = _run_cli(command)
        assert code in (0, 1, 2, 3, 4), (command, code, out)
        assert "Traceback" not in out, (command, out)
        assert code == 0 or out.strip(), command
        ended += 1
    return ended


def _run_cli(command: list[str]) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), _same_logging():
        try:
            main(command)
        except SystemExit as end:
            return int(end.code or 0), out.getvalue()
    return 0, out.getvalue()


@contextlib.contextmanager
def _same_logging() -> Iterator[None]:
    """A command sets up the logging of its process, which here is that of other tests, too."""
    loggers = [logging.getLogger(name) for name in ("", "holdfast", "nats", *TOLD)]
    levels = [one.level for one in loggers]
    handlers, disabled = loggers[0].handlers[:], logging.root.manager.disable
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        loggers[0].handlers[:] = handlers
        logging.disable(disabled)


async def _drained(url: str, namespace: str) -> dict[str, int]:
    """Wait until nothing waits any more, then count what became of it all."""
    config = ConnectionConfig(nats_url=url, namespace=namespace)
    async with Broker(config) as broker:

        async def waiting() -> int:
            listed = await broker.api(f"CONSUMER.LIST.{broker.names.jobs}", {})
            known = [c for c in listed["consumers"] if c["name"].startswith("default=")]
            return sum(c["num_pending"] + c["num_ack_pending"] for c in known)

        async def empty() -> bool:
            return await waiting() == 0

        await until(empty, 120, "an empty queue")
        dead = await broker.api(f"STREAM.INFO.{broker.names.dead}")
        runs = await broker.api(f"STREAM.INFO.KV_{broker.names.runs}")
        return {
            "waiting": await waiting(),
            "dead": dead["state"]["messages"],
            "records": runs["state"]["messages"],
        }
