"""A rolling upgrade from an earlier version to this one, and the way back, under load.

The earlier version is commit `EARLIER`, taken from the repository's history, so the test needs a
full clone. Its processes run its own code on the same server as the processes of this version, and
its own command line sends runs beside this version's client.

The order is the one of docs/operations.md: dispatchers before agents on the way up, agents first on
the way back, because an agent refuses commands of an earlier dispatcher.
"""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from holdfast import Holdfast
from holdfast.names import parse_slot_run
from holdfast.server import Server
from tests.faults.test_rollout import APP, Role, _missing, effects, send
from tests.integration.cli_support import clean_environment, run_command
from tests.support import until

ROOT = Path(__file__).parents[2]
EARLIER = "9799b665bca4f0b962c39603e2b6a8859ef1990b"
UP = ("control", "worker", "web", "agent")
SHALLOW = """The earlier version is not in this clone: this test needs the history.
In a shallow clone run `git fetch --unshallow`; in CI ask for the full history (`fetch-depth: 0`).
git says: {}"""
DELAY = "4s"
"""Longer than it takes to replace one role: these runs are parked by one version and worked by the
other."""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the earlier version."""
    command = ["git", "archive", "--format=tar", EARLIER, "src"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert done.returncode == 0, SHALLOW.format(done.stderr.decode())
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    sources = folder / "src"
    asked = subprocess.run(
        [sys.executable, "-c", "import holdfast; print(holdfast.__file__)"],
        env=os.environ | {"PYTHONPATH": str(sources)},
        capture_output=True,
        text=True,
    )
    assert asked.stdout.startswith(str(sources)), "the earlier version is not what would run"
    return sources


class Upgrade:
    """One namespace whose processes are of two versions."""

    def __init__(self, folder: Path, env: dict[str, str], stack: AsyncExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self._env = env
        self.roles: dict[str, Role] = {}
        self.sent: list[str] = []

    def _of(self, sources: Path) -> dict[str, str]:
        return self._env | {"PYTHONPATH": os.pathsep.join([str(sources), str(self.folder)])}

    async def start(self, sources: Path) -> None:
        """Every role in one version."""
        for name in UP:
            self.roles[name] = Role(name, self.folder, self._of(sources), self.stack)
        async with asyncio.TaskGroup() as starting:
            for role in self.roles.values():
                starting.create_task(role.start())

    async def replace(self, name: str, sources: Path) -> None:
        """One role by the other version: the new one first, but for agents of one id."""
        old = self.roles[name]
        new = self.roles[name] = Role(name, self.folder, self._of(sources), self.stack)
        if name == "agent":
            await old.stop_oldest()
            await new.start()
        else:
            await new.start()
            await old.stop_oldest()

    async def command(self, sources: Path, *words: str) -> str:
        """A command of one version, which has to succeed."""
        env = clean_environment() | self._of(sources)
        done = await run_command(*words, env=env, cwd=self.folder, sources=str(sources))
        assert done.code == 0, f"{words}:\n{done.err}"
        return done.out

    async def use(self, *versions: Path) -> None:
        """Send runs, a delayed one among them, and a command to the agent, by each version."""
        for sources in versions:
            await self.command(sources, "fleet", "run", "host", "ping")
            for options in ((), ("--delay", DELAY)):
                text = await self.command(sources, "enqueue", "work", "1", *options)
                self.sent.append(text.split()[0])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("direction", ["up", "back"])
async def test_rolling_upgrade_loses_nothing(
    earlier: Path,
    nats: Server,
    namespace: str,
    tmp_path: Path,
    report: Callable[[str], None],
    direction: str,
) -> None:
    """Runs, delayed runs, slots and commands of both versions: none is lost, missed or repeated."""
    current = ROOT / "src"
    first, then = (earlier, current) if direction == "up" else (current, earlier)
    order = UP if direction == "up" else UP[::-1]
    (tmp_path / "rolled.py").write_text(APP)
    env = {"HOLDFAST_NATS_URL": nats.url, "HOLDFAST_NAMESPACE": namespace, "EFFECTS": str(tmp_path)}
    app = Holdfast("rolled", nats_url=nats.url, namespace=namespace)

    @app.job
    async def work(number: int) -> None: ...

    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        site = Upgrade(tmp_path, env, stack)
        await site.start(first)
        async with app:
            await until(lambda: effects(tmp_path, "tick"), what="the first slot")
            sending = asyncio.create_task(send(app, site.sent, stop))
            await site.use(first, then)
            for name in order:
                await site.replace(name, then)
                await site.use(first, then)
            stop.set()
            await sending
            await until(lambda: len(effects(tmp_path, "work")) >= len(site.sent), what="every run")
            last = len(effects(tmp_path, "tick"))
            await until(lambda: len(effects(tmp_path, "tick")) >= last + 2, what="two more slots")
        await site.command(then, "runs", "list")
        await site.command(then, "nodes", "list")
    done, slots = effects(tmp_path, "work"), effects(tmp_path, "tick")
    assert Counter(run for run, _ in done) == Counter(site.sent), "lost or repeated runs"
    assert {attempt for _, attempt in done + slots} == {1}, "extra attempts"
    fired = sorted(found[1] for run, _ in slots if (found := parse_slot_run(run)))
    assert len(fired) == len(set(fired)) == len(slots), "repeated slots"
    assert _missing(fired) == [], "missed slots"
    report(f"{direction}: {len(site.sent)} runs, {len(slots)} slots, no run or slot lost")
