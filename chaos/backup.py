"""A backup in the middle of a chaos run, restored on other servers when the run is over.

What was accepted before the backup began must have its effect: before the backup ended, or on the
restored servers. No faults happen there; a worker of each group and a coordinator take over.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Final

from chaos.effects import Effects
from chaos.fleet import Member, python_path
from holdfast.server import Cluster

APP: Final = "chaos.app:app"
PAUSE_SECONDS: Final = 2.0
"""Between two attempts: a backup fails while servers are down."""
MOST_TRIES: Final = 60
"""Far longer than any outage in a run."""
RESTORED_SECONDS: Final = 120.0
"""Longer than any retry of the app, with half a run's queue to work through."""
GROUPS: Final = ("quick", "steady", "zoo")


class Backup:
    """One backup and its restore."""

    def __init__(self, root: Path, namespace: str) -> None:
        self._folder = root / "backup"
        self._root = root / "restored"
        self._namespace = namespace
        self.began = 0.0
        """On the monotonic clock; what was accepted before this is in the backup."""
        self.ended = 0.0

    async def take(self, url: str, after: float) -> None:
        """Back up after some seconds, retrying while the servers are down."""
        await asyncio.sleep(after)
        for number in range(MOST_TRIES):
            folder, began = self._folder / str(number), time.monotonic()
            if await self._holdfast("backup", str(folder), url=url):
                self.began, self.ended = began, time.monotonic()
                self._folder = folder
                return
            await asyncio.sleep(PAUSE_SECONDS)
        raise RuntimeError(f"no backup in {MOST_TRIES} tries: see {self._root}/backup.log")

    async def missing(self, wanted: set[str]) -> list[str]:
        """Restore it on fresh servers, let workers run, and return the marks without an effect."""
        cluster = Cluster(3, self._root / "servers", fast=True, name="restored")
        cluster.start()
        await asyncio.to_thread(cluster.wait_ready, 60.0)
        members: list[Member] = []
        try:
            if not await self._holdfast("restore", str(self._folder), url=cluster.url):
                return ["everything: the backup could not be restored"]
            commands = [("worker", APP, "--group", group) for group in GROUPS]
            for number, command in enumerate([("coordinator",), *commands]):
                member = Member(
                    f"restored-{number}",
                    command[0],
                    command,
                    self._root,
                    env=self._environment(),
                    servers=3,
                )
                members.append(member)
                await member.start([node.port for node in cluster.nodes])
            return await self._wait(wanted)
        finally:
            await asyncio.gather(*(member.close() for member in members))
            await asyncio.to_thread(cluster.close)

    async def _wait(self, wanted: set[str]) -> list[str]:
        deadline = time.monotonic() + RESTORED_SECONDS
        effects = Effects(self._root)
        while True:
            happened = {line.mark for line in effects.lines() if line.what == "effect"}
            missing = wanted - happened
            if not missing or time.monotonic() > deadline:
                return sorted(missing)
            await asyncio.sleep(0.5)

    def _environment(self) -> dict[str, str]:
        return {"HOLDFAST_NAMESPACE": self._namespace, "HOLDFAST_REPLICAS": "3"}

    async def _holdfast(self, *arguments: str, url: str) -> bool:
        env = {**os.environ, "PYTHONPATH": python_path(), **self._environment()}
        env["HOLDFAST_NATS_URL"] = url
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / f"{arguments[0]}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "holdfast", *arguments, env=env, stdout=log, stderr=log
            )
            return await process.wait() == 0
