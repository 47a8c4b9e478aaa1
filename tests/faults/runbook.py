"""What runbook tests share: the commands of a page, exactly as written, and a load.

The load is an app with a job and a schedule that fires every second, real processes that serve it,
and a sender that runs until stopped. Effects are written outside the system, one line for each
attempt, so that losses, misses and repeats can be counted.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast import Holdfast
from holdfast.broker import Broker
from holdfast.client import Client
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.errors import BrokerError
from holdfast.names import parse_slot_run
from tests.docs.pages import ROOT, Page
from tests.faults.test_rollout import APP, effects
from tests.integration.command import Command, free_port, ready
from tests.support import until

PACE_SECONDS = 0.05

ROLES = {
    "control": ["control", "rolled:app"],
    "worker": ["worker", "rolled:app", "--concurrency", "20", "--grace", "20s"],
}


def commands(page: str, heading: str) -> list[str]:
    """The shell blocks below a heading of a runbook, in order."""
    found = Page(ROOT / "docs" / "operations" / page)
    lines = found.text.splitlines()
    start = lines.index(f"## {heading}") + 1
    end = next((n for n in range(start, len(lines)) if lines[n].startswith("## ")), len(lines))
    return [b.text for b in found.blocks("sh") if start <= b.line <= end]


class Shell:
    """Runs a page's commands in one folder, with the `holdfast` and `nats-server` of these tests.

    What differs on this machine (addresses, paths) is replaced, and must occur on the page.
    """

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        tools = folder / "tools"
        tools.mkdir()
        tool = tools / "holdfast"
        tool.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m holdfast "$@"\n')
        tool.chmod(0o755)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
        places = os.pathsep.join([str(tools), str(Path(sys.executable).parent), kept["PATH"]])
        paths = [str(Path(p).resolve()) for p in sys.path if p and Path(p).is_dir()]
        self._env = kept | {"PATH": places, "PYTHONPATH": os.pathsep.join(paths)} | dict(env)

    async def run(self, text: str, changes: Mapping[str, str] | None = None) -> str:
        """Run one block, which must succeed; returns its output."""
        for old, new in (changes or {}).items():
            assert old in text, f"{old!r} is not on the page:\n{text}"
            text = text.replace(old, new)
        process = await asyncio.create_subprocess_exec(
            "sh", "-euc", text,
            cwd=self.folder, env=self._env, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        printed = (await process.communicate())[0].decode()
        assert process.returncode == 0, f"{text}\nended with {process.returncode}:\n{printed}"
        return printed


class Load:
    """Processes that serve the app, and runs sent to them."""

    def __init__(self, folder: Path, env: Mapping[str, str], stack: AsyncExitStack) -> None:
        self.folder = folder
        self.env = {**env, "EFFECTS": str(folder)}
        self.running: dict[str, list[Command]] = {}
        self.accepted: list[str] = []
        self.refused = 0
        self._stack = stack
        (folder / "rolled.py").write_text(APP)

    async def start(self, role: str, **env: str) -> Command:
        """Start another process of a role and wait until it is ready."""
        port = free_port()
        words = [*ROLES[role], "--health-port", str(port)]
        new = Command(*words, folder=self.folder, cwd=self.folder, env=self.env | env)
        self._stack.enter_context(new)
        self.running.setdefault(role, []).append(new)
        try:
            await ready(port, 60)
        except AssertionError:
            raise AssertionError(f"{role} is not ready:\n{new.text}") from None
        return new

    async def stop_oldest(self, role: str) -> None:
        """Send SIGTERM to the oldest process of a role; it must end cleanly."""
        old = self.running[role].pop(0)
        old.signal(signal.SIGTERM)
        assert await old.ended() == 0, old.text

    def kill_all(self) -> None:
        """Kill every process at once, as when a machine is lost."""
        for command in [c for found in self.running.values() for c in found]:
            command.process.kill()
            command.process.wait()
        self.running.clear()

    @asynccontextmanager
    async def sending(self, **connection: Any) -> AsyncIterator[None]:
        """Send runs while the block lasts, and remember which were accepted.

        A failed send is not counted, because nothing was promised.
        """
        app = Holdfast("rolled")

        @app.job
        async def work(number: int) -> None: ...

        stop = asyncio.Event()
        async with Broker(ConnectionConfig(**connection)) as broker:
            client = Client(broker, RecordConfig())

            async def send() -> None:
                while not stop.is_set():
                    try:
                        request = work.options().request(len(self.accepted))
                        self.accepted.append((await client.enqueue(request)).run)
                    except BrokerError:
                        self.refused += 1
                    await asyncio.sleep(PACE_SECONDS)

            task = asyncio.create_task(send())
            try:
                yield
            finally:
                stop.set()
                await task

    def done(self) -> Counter[str]:
        """How often each run had its effect."""
        return Counter(run for run, _ in effects(self.folder, "work"))

    def slots(self) -> Counter[int]:
        """How often each second's slot had its effect."""
        found = (parse_slot_run(run) for run, _ in effects(self.folder, "tick"))
        return Counter(_second(slot[1]) for slot in found if slot)

    async def all_done(self, runs: Sequence[str], limit: float = 60) -> None:
        await until(lambda: not set(runs) - set(self.done()), limit, "an effect of every run")

    async def more_slots(self, count: int = 2) -> None:
        before = len(self.slots())
        await until(lambda: len(self.slots()) >= before + count, what=f"{count} more slots")

    def missed(self) -> list[int]:
        """Seconds between the first and the last slot without an effect."""
        found = self.slots()
        return sorted(set(range(min(found), max(found) + 1)) - set(found))


def repeated(found: Counter[Any]) -> list[Any]:
    """What occurs more than once."""
    return [one for one, count in found.items() if count > 1]


def _second(text: str) -> int:
    moment = datetime.strptime(text, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    return int(moment.timestamp())
