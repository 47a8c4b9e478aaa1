"""A server, two schedulers, two workers and the status page, each a real process.

A process that dies is replaced (`holdfast.worker.supervisor`). All of them die with this one.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Self

from holdfast.cli.worker import SOCKET_VARIABLE
from holdfast.server import Server
from holdfast.server.process import free_ports
from holdfast.worker.supervisor import KeptProcess, Spec, Supervisor

APP = "uptime.app:app"
GRACE_SECONDS = 3
STOP_SECONDS = 15.0
READY_SECONDS = 120.0


class Stage:
    """Everything that runs, while the block lasts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = Server(store=folder / "server", fast=True)
        self._port = free_ports(1)[0]
        self.kills: list[str] = []
        self._log: IO[bytes] | None = None
        self._before: dict[str, str | None] = {}

    async def __aenter__(self) -> Self:
        self.server.start()
        self.server.wait_ready()
        self._set_environment(
            HOLDFAST_NATS_URL=self.server.url,
            UPTIME_ALLOW_PRIVATE="127.0.0.1",
            UPTIME_SHORTEST_INTERVAL="1",
            UPTIME_CACHE_SECONDS="1",
        )
        self._log = (self.folder / "processes.log").open("ab")
        self.supervisor = Supervisor(self._specs(), stop_seconds=STOP_SECONDS, output=self._log)
        self._running = asyncio.create_task(self.supervisor.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.supervisor.stop()
        await self._running
        if self._log:
            self._log.close()
        self.server.close()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _set_environment(self, **values: str) -> None:
        """Set variables for this process and its children; restored afterwards."""
        given = {name for name in os.environ if name.startswith(("UPTIME_", "HOLDFAST_"))}
        for name in given | values.keys():
            self._before[name] = os.environ.pop(name, None)
        os.environ.update(values)

    def _specs(self) -> list[Spec]:
        holdfast = [sys.executable, "-m", "holdfast"]
        found = []
        for n in (1, 2):
            place = self.folder / f"worker-{n}.sock"
            command = [*holdfast, "worker", APP, "--grace", f"{GRACE_SECONDS}s"]
            found.append(Spec(f"worker {n}", command, {SOCKET_VARIABLE: str(place)}, place))
        for n in (1, 2):
            ready = self.folder / f"scheduler-{n}.ready"
            command = [*holdfast, "control", APP, "--ready-file", str(ready)]
            found.append(Spec(f"scheduler {n}", command, {}, ready))
        page = [sys.executable, "-m", "uptime", "--port", str(self._port)]
        return [*found, Spec("status page", page)]

    @property
    def victims(self) -> list[KeptProcess]:
        """What may be killed: workers and schedulers."""
        return self.supervisor.keepers[:4]

    async def ready(self) -> None:
        """Return when everything is up; raise if something cannot start."""
        deadline = time.monotonic() + READY_SECONDS
        page = f"http://127.0.0.1:{self._port}/"
        while True:
            if self._running.done() or time.monotonic() > deadline:
                raise RuntimeError(f"the processes do not come up: {self.log_tail()}")
            up = all(keeper.up.is_set() for keeper in self.victims)
            if up and await asyncio.to_thread(_answers, page):
                return
            await asyncio.sleep(0.1)

    def kill_one(self, dice: random.Random) -> str | None:
        """Kill -9 one of the victims that are up; never both of a kind."""
        up = [keeper for keeper in self.victims if keeper.up.is_set() and keeper.child]
        kinds = [keeper.spec.name.split()[0] for keeper in up]
        spare = [k for k, kind in zip(up, kinds, strict=True) if kinds.count(kind) > 1]
        if not spare:
            return None
        victim = dice.choice(spare)
        assert victim.child is not None
        victim.up.clear()
        victim.child.signal(signal.SIGKILL)
        self.kills.append(victim.spec.name)
        return f"{victim.spec.name} (pid {victim.child.pid})"

    def log_tail(self) -> str:
        """The end of the processes' logs."""
        text = (self.folder / "processes.log").read_text(encoding="utf-8", errors="replace")
        return " / ".join(text.splitlines()[-8:])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
