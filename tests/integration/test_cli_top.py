"""`holdfast top` on a real terminal, into a pipe, when NATS goes away, and how it is left."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest

from holdfast import Backoff, Holdfast
from holdfast.server import Server
from tests.integration.cli_support import environment, holdfast
from tests.integration.support import dead_letter, working

ALTERNATE, NORMAL = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.fixture
def shop(app: Holdfast) -> Holdfast:
    @app.job(retry=Backoff.never())
    async def broken(what: str) -> None:
        raise ValueError(f"{what} is broken")

    return app


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, env: dict[str, str], columns: int, rows: int) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        command = [sys.executable, "-m", "holdfast", "top", "--every", "0.5s"]
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=env | {"TERM": "xterm"},
        )
        os.set_blocking(self.ours, False)
        self.shown = b""

    async def shows(self, text: bytes, seconds: float = 60) -> None:
        """Wait until a text was drawn."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, self.shown[-2000:]
            self.read()
            await asyncio.sleep(0.05)

    def read(self) -> None:
        try:
            self.shown += os.read(self.ours, 1 << 20)
        except (BlockingIOError, OSError):
            return

    async def left(self) -> int:
        """Wait for its end; the terminal is as it was."""
        code = await asyncio.to_thread(self.process.wait, 30)
        self.read()
        assert self.shown.count(ALTERNATE) == self.shown.count(NORMAL)
        assert b"Traceback" not in self.shown
        assert termios.tcgetattr(self.theirs) == self.before
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    found: list[Terminal] = []
    yield found
    for one in found:
        one.close()


async def test_top_prints_one_look_into_a_pipe(app: Holdfast, shop: Holdfast) -> None:
    """As text, or as JSON: jobs, nodes and what failed."""
    async with app, working(app):
        await app.jobs["broken"].enqueue("the lamp")
        await dead_letter(app, 30)
        text = await holdfast(app, "top")
        data = await holdfast(app, "top", "--json")
        often = await holdfast(app, "top", "--every", "1ms")
    assert (text.code, data.code, often.code) == (0, 0, 1)
    assert "1 dead · " in text.out
    assert "ValueError: the lamp is broken" in text.out
    assert "\x1b" not in text.out
    assert data.json["jobs"][0]["job"] == "broken"
    assert data.json["failures"][0]["state"] == "dead"
    assert [node["role"] for node in data.json["nodes"]] == ["worker"]


@pytest.mark.parametrize(("columns", "rows"), [(120, 40), (30, 6)])
async def test_top_is_left_by_q_ctrl_c_and_sigterm(
    app: Holdfast, shop: Holdfast, terminals: list[Terminal], columns: int, rows: int
) -> None:
    """On a large and on a small terminal: exit code 0, and the terminal is restored."""
    async with app, working(app):
        await app.jobs["broken"].enqueue("the lamp")
        await dead_letter(app, 30)
        for leave in ("q", "ctrl-c", "sigterm"):
            one = Terminal(environment(app), columns, rows)
            terminals.append(one)
            await one.shows(b"in flight")
            if columns == 120:
                await one.shows(b"the lamp is broken")
            if leave == "q":
                os.write(one.ours, b"q")
            else:
                one.process.send_signal(signal.SIGINT if leave == "ctrl-c" else signal.SIGTERM)
            assert await one.left() == 0, leave


async def test_top_continues_when_nats_comes_back(terminals: list[Terminal]) -> None:
    """While it is away the last look stays, and a line says how old it is."""
    with Server(fast=True) as server:
        app = Holdfast("shop", nats_url=server.url)
        async with app:
            await app.job(nothing).enqueue()
        one = Terminal(environment(app), 120, 30)
        terminals.append(one)
        await one.shows(b"1 queued")
        server.stop()
        await one.shows(b"s ago)")
        one.shown = b""
        server.start()
        server.wait_ready()
        await one.shows(b"q quits")
        os.write(one.ours, b"q")
        assert await asyncio.to_thread(one.process.wait, 30) == 0


async def nothing() -> None: ...
