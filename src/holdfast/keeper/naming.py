"""Naming what blocks a worker whose interpreter is held, from outside.

A signal, which the worker has chosen, makes a thread write its stack into a pipe, straight from the
signal handler: that works while a C call holds the interpreter. It is sent to the thread that
computes and to the loop's thread. A frame of a job's function identifies the job, and the started
runs of that job are the culprits, often just one.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any, Final, NamedTuple

from holdfast.keeper.board import STARTED, Board
from holdfast.keeper.vitals import Vitals

_FRAME: Final = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
STACK_MOST: Final = 4_000
"""Characters of a stack that are logged."""


class Blockage(NamedTuple):
    """What keeps a loop from moving, as far as it is known."""

    job: str = ""
    runs: tuple[str, ...] = ()
    where: str = ""
    stack: str = ""

    def describe(self) -> str:
        """In words, to follow "blocked by"."""
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
        """Have the threads that matter write where they are."""
        self._text = ""
        if self._signal and self.descriptor >= 0:
            busiest = self._vitals.busiest()
            with contextlib.suppress(OSError, AttributeError):
                for thread in dict.fromkeys(t for t in (busiest, self._loop_thread) if t):
                    self._vitals.signal_thread(thread, self._signal)

    def receive(self) -> None:
        """Something was written."""
        with contextlib.suppress(OSError):
            self._text += os.read(self.descriptor, 65_536).decode("utf-8", "replace")

    def blockage(self) -> Blockage:
        """What the stacks that were written say."""
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
        """The runs of a job that have been started; the consumer's name is in the reply."""
        board, found = self._board, []
        for place, number in board.taken():
            reply, run, marks = board.reply(place), board.run(place), board.marks[place]
            ours = any(f".{consumer}." in reply for consumer in job["consumers"])
            if run and ours and marks & STARTED and board.held[place] == number:
                found.append(run)
        return tuple(found)
