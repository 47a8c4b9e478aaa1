"""A worker's vital signs, as its keeper sees them from outside.

    ok       the event loop moves
    busy     it does not, and the process computes: the interpreter is held
    blocked  it does not, though the interpreter runs: something waits inside the loop
    hung     neither moves, and the process does not compute
    stopped  by a signal or a debugger: nothing of it can move
    gone     the process has ended

A busy, blocked or hung worker is alive: it still holds its runs, and may finish them. `process`
decides whether it takes too long. A stopped worker must not look alive.

The kernel provides a descriptor of the process that becomes readable when it ends, even if a child
inherited its sockets, and `/proc/<pid>/stat`. Without them, silence of both ticks counts as
stopped, and the control socket shows the end.

What blocks a worker is also found from outside (`Stacks`). A signal, which the worker has chosen,
makes a thread write its stack into a pipe, directly from the signal handler: that works while a C
call holds the interpreter. A frame of a job's function identifies the job, and the started runs of
that job are the culprits, often just one.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from enum import Enum
from typing import Any, Final, NamedTuple

from holdfast.keeper import board as words
from holdfast.keeper.board import STARTED, Board

FRESH_SECONDS: Final = 0.6
"""Ticks come every 0.25 s; a single missing tick proves nothing."""
LATE_SECONDS: Final = 1.0
"""A loop that has not moved for this long is reported; shorter blocks are common and harmless."""
COMPUTED_SECONDS: Final = 1.0
"""A process that used the CPU within this time is computing: on a busy machine it has to wait."""

_FRAME: Final = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
STACK_MOST: Final = 4_000
"""Characters of a stack to log: more than a stack of usual depth."""


class Condition(Enum):
    """The condition of a worker."""

    OK = "ok"
    BUSY = "busy"
    BLOCKED = "blocked"
    HUNG = "hung"
    STOPPED = "stopped"
    GONE = "gone"


class Vitals:
    """Watches one process."""

    def __init__(self, pid: int, board: Board) -> None:
        self.pid = pid
        self.descriptor = -1
        """Readable when the process has ended; -1 if the system has no pidfd."""
        self._board = board
        self._stat = f"/proc/{pid}/stat"
        self._known = os.path.exists(self._stat)
        self._computed = (0, 0.0)
        if hasattr(os, "pidfd_open"):
            try:
                self.descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                raise SystemExit(
                    0
                ) from None  # it died before its keeper started: there is nothing to watch

    def silence(self, now: float) -> float:
        """How long the loop has not moved."""
        return now - self._board.times[words.LOOP]

    def look(self, now: float) -> Condition:
        """The current condition of the process."""
        if self.silence(now) < FRESH_SECONDS:
            return Condition.OK
        ticking = now - self._board.times[words.THREAD] < LATE_SECONDS
        if not self._known:
            return Condition.BLOCKED if ticking else Condition.STOPPED
        try:
            with open(self._stat, "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return Condition.GONE
        if fields[0] in b"Tt":
            return Condition.STOPPED
        if fields[0] in b"ZXx":
            return Condition.GONE
        if ticking:
            return Condition.BLOCKED
        return Condition.BUSY if self._computes(fields, now) else Condition.HUNG

    def _computes(self, fields: list[bytes], now: float) -> bool:
        spent = int(fields[11]) + int(fields[12])  # utime and stime
        if spent != self._computed[0]:
            self._computed = (spent, now)
        return fields[0] == b"R" or now - self._computed[1] < COMPUTED_SECONDS

    def busiest(self) -> int:
        """The thread that is computing now; 0 if unknown."""
        found = (0, 0)
        try:
            for name in os.listdir(f"/proc/{self.pid}/task"):
                with open(f"/proc/{self.pid}/task/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                if fields[0] == b"R":
                    found = max(found, (int(fields[11]), int(name)))
        except OSError:
            return 0
        return found[1]

    def signal_thread(self, thread: int, number: int) -> None:
        """Send a signal to one thread of the process."""
        import ctypes

        ctypes.CDLL(None).tgkill(self.pid, thread, number)

    def kill(self) -> None:
        """Kill the process; never hits a new process with the same pid."""
        if self.descriptor >= 0:
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
        else:
            os.kill(self.pid, signal.SIGKILL)


class Blockage(NamedTuple):
    """What blocks a loop, as far as known."""

    job: str = ""
    runs: tuple[str, ...] = ()
    where: str = ""
    stack: str = ""

    def describe(self) -> str:
        """A phrase to follow "blocked by"."""
        if not self.job:
            what = "something outside of any job"
        elif len(self.runs) == 1:
            what = f"run {self.runs[0]} of job {self.job}"
        else:
            what = f"job {self.job}"
        return f"{what} ({self.where})" if self.where else what


class Stacks:
    """Asks a worker's threads for their stacks."""

    def __init__(self, plan: dict[str, Any], board: Board, vitals: Vitals) -> None:
        self.descriptor: int = plan["stacks"]
        self._signal: int = plan["signal"]
        self._loop_thread: int = plan["loop_thread"]
        self._jobs: list[dict[str, Any]] = plan["jobs"]
        self._board = board
        self._vitals = vitals
        self._text = ""

    def ask(self) -> None:
        """Make the relevant threads write their stacks."""
        self._text = ""
        if self._signal and self.descriptor >= 0:
            busiest = self._vitals.busiest()
            with contextlib.suppress(OSError, AttributeError):
                for thread in dict.fromkeys(t for t in (busiest, self._loop_thread) if t):
                    self._vitals.signal_thread(thread, self._signal)

    def receive(self) -> None:
        """Read what was written."""
        with contextlib.suppress(OSError):
            self._text += os.read(self.descriptor, 65_536).decode("utf-8", "replace")

    def blockage(self) -> Blockage:
        """The blockage that the received stacks show."""
        stacks = [part for part in re.split(r"(?m)^(?=\S*.*[Tt]hread 0x)", self._text) if part]
        for stack in stacks:
            frames = [match.groupdict() for match in _FRAME.finditer(stack)]
            for job in self._jobs:
                if any((f["file"], f["name"]) == (job["file"], job["function"]) for f in frames):
                    top = frames[0]
                    where = f"{os.path.basename(top['file'])}:{top['line']} in {top['name']}"
                    return Blockage(job["name"], self._runs(job), where, stack[:STACK_MOST])
        return Blockage(stack=self._text[:STACK_MOST])

    def _runs(self, job: dict[str, Any]) -> tuple[str, ...]:
        """The started runs of a job; the reply subject contains the consumer's name."""
        board, found = self._board, []
        for place, number in board.taken():
            reply, run, marks = board.reply(place), board.run(place), board.marks[place]
            ours = any(f".{consumer}." in reply for consumer in job["consumers"])
            if run and ours and marks & STARTED and board.held[place] == number:
                found.append(run)
        return tuple(found)
