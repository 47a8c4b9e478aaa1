"""The processes of a chaos run: real `holdfast` commands, kept running as an orchestrator would.

A process that exits is restarted after a second; one that a fault took down stays down until the
fault is over. Each has its own links to the servers and, where libfaketime is installed, a wall
clock that can be set wrong while it runs (its monotonic clock stays right, as on a real machine).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chaos.effects import DIRECTORY_VARIABLE, MEMBER_VARIABLE
from chaos.links import LinkState, Network
from chaos.plan import Fault
from holdfast.child import Child

RESTART_SECONDS: Final = 1.0
END_SECONDS: Final = 40.0
FAKETIME: Final = (
    "/usr/lib/*/faketime/libfaketimeMT.so.1",
    "/usr/lib/faketime/libfaketimeMT.so.1",
    "/usr/local/lib/faketime/libfaketimeMT.so.1",
)
KINDS: Final = ("kill", "stop", "freeze", "cut", "stall")
_LINKS: Final[dict[str, LinkState]] = {"cut": "cut", "stall": "stalled"}


def find_faketime() -> Path | None:
    """The library that fakes a process's clock, if it is installed."""
    for pattern in FAKETIME:
        for found in sorted(Path("/").glob(pattern.lstrip("/"))):
            return found
    return None


def python_path() -> str:
    """Lets the started processes import `chaos.app` from any working directory."""
    root = str(Path(__file__).parents[1])
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))


@dataclass(frozen=True, slots=True)
class Exit:
    """An exit that was not requested."""

    member: str
    at: float
    code: int
    expected: bool = False
    """Whether it was caused by a run that kills its process."""


class Member:
    """One process of the fleet, as a target."""

    def __init__(
        self,
        name: str,
        role: str,
        command: Sequence[str],
        root: Path,
        *,
        env: Mapping[str, str],
        servers: int,
        faketime: Path | None = None,
        ends_with: int | None = None,
    ) -> None:
        """`command` is what follows `holdfast`; `faketime` gives it a clock that can be set.

        With `ends_with` its handlers end it, with this code, and no fault hits it: otherwise the
        cause of an exit would be ambiguous.
        """
        self.name = name
        self.role = role
        self.kinds: tuple[str, ...] = (*KINDS, "reclock") if faketime else KINDS
        if ends_with is not None:
            self.kinds = ()
        self._ends_with = ends_with
        self.network = Network(servers)
        self.exits: list[Exit] = []
        self.log = root / "logs" / f"{name}.log"
        self._command = [sys.executable, "-m", "holdfast", *command]
        self._root = root
        self._env = dict(env)
        self._faketime = faketime
        self._clock = root / "clocks" / name
        self._child: Child | None = None
        self._down = False
        self._keeper: asyncio.Task[None] | None = None

    # ---- life

    async def start(self, ports: Sequence[int]) -> None:
        """Open the links to servers on these ports, start the process and keep it running."""
        for link, port in zip(self.network.links, ports, strict=True):
            link.target = port
        await self.network.open()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._clock.parent.mkdir(parents=True, exist_ok=True)
        self._set_clock(0.0)
        self._spawn()
        self._keeper = asyncio.create_task(self._keep(), name=f"chaos-{self.name}")

    async def close(self) -> None:
        """Stop it, by force if necessary, and close the links."""
        if self._keeper:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        child = self._child
        if child:
            child.signal(signal.SIGCONT)
            child.terminate()
            if not await asyncio.to_thread(child.exited.wait, END_SECONDS):
                await asyncio.to_thread(child.kill)
        await self.network.close()

    @property
    def running(self) -> bool:
        return self._child is not None and not self._child.exited.is_set()

    @property
    def pid(self) -> int | None:
        """The id of the current process."""
        return self._child.pid if self._child and self.running else None

    def _spawn(self) -> None:
        with self.log.open("ab") as output:
            self._child = Child(
                self._command, name=self.name, env=self._environment(), output=output
            )

    def _environment(self) -> dict[str, str]:
        env = {
            **os.environ,
            "PYTHONPATH": python_path(),
            **self._env,
            "HOLDFAST_NATS_URL": self.network.url,
            DIRECTORY_VARIABLE: str(self._root),
            MEMBER_VARIABLE: self.name,
        }
        if self._faketime:
            env |= {
                "LD_PRELOAD": str(self._faketime),
                "FAKETIME_TIMESTAMP_FILE": str(self._clock),
                "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "DONT_FAKE_MONOTONIC": "1",
            }
        return env

    def _set_clock(self, shift: float) -> None:
        draft = self._clock.with_suffix(".draft")
        draft.write_text(f"{shift:+.0f}\n")
        draft.replace(self._clock)

    async def _keep(self) -> None:
        while True:
            child = self._child
            if child is None or self._down:
                await asyncio.sleep(0.1)
                continue
            ended = await asyncio.to_thread(child.exited.wait, 0.5)
            if ended and self._owns(child):
                code = child.code or 0
                expected = code == self._ends_with
                self.exits.append(Exit(self.name, time.monotonic(), code, expected))
                await asyncio.sleep(RESTART_SECONDS)
                if self._owns(child):
                    self._spawn()

    def _owns(self, child: Child) -> bool:
        """Whether the keeper may restart it: no fault has taken it down or replaced it."""
        return not self._down and child is self._child

    # ---- being hit

    async def strike(self, fault: Fault) -> None:
        """Begin a fault."""
        if fault.kind in _LINKS:
            self.network.become(_LINKS[fault.kind])
        elif fault.kind == "reclock":
            self._set_clock(fault.shift)
        elif fault.kind == "freeze":
            self._signal(signal.SIGSTOP)
        else:
            await self._end(fault.kind)

    async def heal(self, fault: Fault) -> None:
        """End it."""
        if fault.kind in _LINKS:
            self.network.become("open")
        elif fault.kind == "reclock":
            self._set_clock(0.0)
        elif fault.kind == "freeze":
            self._signal(signal.SIGCONT)
        else:
            self._spawn()
            self._down = False

    def _signal(self, number: signal.Signals) -> None:
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                self._child.signal(number)

    async def _end(self, kind: str) -> None:
        self._down = True
        child = self._child
        if child is None:
            return
        if kind == "stop":
            child.terminate()
            if await asyncio.to_thread(child.exited.wait, END_SECONDS):
                return
        await asyncio.to_thread(child.kill)
