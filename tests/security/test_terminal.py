"""Hosts, jobs and clients write texts that want to act on the operator's terminal: none does."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from holdfast import Holdfast
from holdfast.cli import build
from holdfast.client import Client
from holdfast.config import RecordConfig
from holdfast.server import Server
from tests.integration.cli_support import environment, holdfast
from tests.security.hostile import ACTS, ID, SEEN, plant

CHILD = Path(__file__).with_name("terminal_child.py")
READS = (
    "runs list",
    "runs show r1",
    "runs show r2",
    "runs show r3",
    "runs trace r1",
    "runs copy r1",
    "runs logs r1",
    "flows list",
    "limits list",
    "jobs list",
    "dead list",
    "dead show 1",
    "dead show 2",
    "dead show 3",
    "dead replay --job add --dry-run",
    "schedules list",
    "schedules show s1",
    "schedules next s1",
    "nodes list --all",
    "nodes show a1",
    "agents list",
    "agents show a1",
    "fleet list",
    "fleet active",
    "fleet slots",
    "fleet show f1",
    "settings status",
    "settings history",
    "unreadable list",
    "alerts list",
    "doctor",
)
"""Commands that print what others wrote."""
NO_JSON = ("doctor", "settings status", "settings history", "runs logs r1", "runs copy r1")
"""What is told in sentences, or has nothing to show here."""
OTHERS = (
    "top",
    "runs edit",
    "demo",
    "dev",
    "worker",
    "server",
    "scheduler",
    "coordinator",
    "control",
    "agent",
    "dispatcher",
    "backup",
    "restore",
    "enqueue",
    "publish",
    "relay",
    "flows show",
    "flows journal",
    "flows signal",
    "flows resume",
    "flows cancel",
    "limits show",
    "limits set",
    "limits pause",
    "limits resume",
    "fleet resolve",
    "settings show",
    "settings rollback",
    "web token",
    "schedules add",
    "schedules remove",
    "schedules pause",
    "schedules resume",
    "schedules trigger",
    "schedules backfill",
    "schedules why",
    "schedules sync",
    "nodes drain",
    "nodes watch",
    "agents forget",
    "fleet run",
    "fleet cancel",
    "auth ",
    "alerts test",
    "settings push",
    "settings diff",
    "settings get",
    "unreadable remove",
    "secrets ",
    "runs cancel",
    "runs retry",
    "jobs pause",
    "jobs resume",
    "jobs purge",
    "dead drop",
    "new ",
    "deploy ",
)
"""Commands that are not walked here: they change something, or print what their user gave. They
print through the same functions (`tests/unit/test_visible.py` sees that no other is called)."""


def commands(found: Any = None, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Every command there is."""
    found = found or typer.main.get_command(build())
    if hasattr(found, "commands"):
        for name, inner in found.commands.items():
            yield from commands(inner, (*path, name))
    else:
        yield " ".join(path)


def test_every_command_is_walked_or_named() -> None:
    """A command that is added later is walked too, or somebody says why not."""
    walked = {" ".join(one.split()[:2]) for one in READS}
    for command in commands():
        assert command in walked or command.startswith(OTHERS), command


def on_terminal(words: list[str], env: dict[str, str]) -> bytes:
    """What a process writes to its terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    written: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end was closed
            while part := os.read(ours, 65536):
                written.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    process.wait(timeout=300)
    reader.join(timeout=30)
    os.close(ours)
    return b"".join(written)


async def planted(app: Holdfast) -> None:
    from holdfast.broker import Broker

    async with Broker(app.connection_config(), name="attacker") as broker:
        client = Client(broker, RecordConfig())
        await client.topology.ensure()
        await plant(client)


async def test_no_listing_acts_on_the_terminal(nats: Server, namespace: str) -> None:
    """Escapes, the clipboard, bidi, zero width, carriage return, backspace and markup: as text."""
    app = Holdfast("shop", nats_url=nats.url, namespace=namespace)
    await planted(app)
    env = environment(app) | {"TERM": "xterm-256color", "COLUMNS": "4000", "PYTHONPATH": "."}
    env.pop("NO_COLOR", None)
    lists = [command.split() for command in READS] + [["runs", "show", ID]]
    out = on_terminal([sys.executable, str(CHILD), json.dumps(lists)], env).decode()
    for act in ACTS:
        assert act not in out, (act, out[max(0, out.find(act) - 200) :][:400])
    assert "\r" not in out.replace("\r\n", "")
    assert "Traceback" not in out
    assert out.count("=== exit") == len(lists)
    parts = out.split("=== ")
    for part in parts:
        if "HOSTILE" in part:
            assert "1b[38;5;203m" in part, part[:300]
    assert sum("HOSTILE" in part for part in parts) >= 15
    assert out.count(SEEN) >= 15


async def test_json_output_is_json_and_does_not_act(nats: Server, namespace: str) -> None:
    """`--json` means the same as before, and a terminal shows nothing but text."""
    app = Holdfast("shop", nats_url=nats.url, namespace=namespace)
    await planted(app)
    lists = [[*c.split(), "--json"] for c in READS if c not in NO_JSON]
    words = [sys.executable, str(CHILD), json.dumps(lists)]
    done = subprocess.run(
        words, env=environment(app) | {"PYTHONPATH": "."}, capture_output=True, check=True
    )
    out = done.stdout.decode()
    acting = {c for c in out if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")} - {"\n"}
    assert not acting
    texts = [part.partition("\n")[2] for part in out.split("=== ") if "--json'\n" in part]
    for text in texts:
        json.loads(text)
    assert sum("HOSTILE" in text for text in texts) >= 12


async def test_text_log_of_a_worker_does_not_act(nats: Server, namespace: str) -> None:
    """What handlers log and raise is one line each, whatever is in it."""
    app = Holdfast("loud", nats_url=nats.url, namespace=namespace)
    run = await holdfast(app, "enqueue", "shout", "1")
    assert run.code == 0, run.err
    words = [sys.executable, "-m", "holdfast", "worker", "tests.security.loud_app:app"]
    env = environment(app) | {"PYTHONPATH": ".", "HOLDFAST_WORKER_HEALTH_PORT": "0"}
    with subprocess.Popen(words, env=env, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line.decode())
            if "dead letter" in lines[-1] or "RuntimeError" in lines[-1]:
                process.terminate()
    log = "".join(lines)
    assert "a host said HOSTILE\\x1b" in log
    assert not {c for c in log if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")} - {"\n"}
    assert not [line for line in lines if line.startswith("12:00:00.000 INFO    worker: all")]
