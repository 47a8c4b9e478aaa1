"""What was asked of the system: an append-only history, written before and after each operation.

An operation ends in one of three ways. `ok`: it was accepted, so its effects must happen, once.
`failed`: it was refused or withdrawn, so they must not happen. `unknown`: no answer came; its
effects may happen or not, but all of them or none, and not twice. An operation that was made
several times (the same key again) is `ok` as soon as one of them is.

`marks` name the effects that an operation stands for, in whatever terms the effect store uses: a
run has one, a chain of jobs has one for each link.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Literal

import msgspec

State = Literal["invoked", "ok", "failed", "unknown"]


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the history."""

    operation: str
    state: State
    at: float
    """On the monotonic clock, which all processes of one machine share."""
    kind: str = ""
    marks: tuple[str, ...] = ()
    not_before: float = 0.0
    at_most_once: bool = False
    doomed: bool = False
    run: str = ""
    error: str = ""


class Operation:
    """One operation, built from its steps."""

    def __init__(self, first: Step) -> None:
        self.name = first.operation
        self.kind = first.kind
        self.marks = first.marks
        self.invoked = first.at
        self.not_before = first.not_before
        self.at_most_once = first.at_most_once
        self.doomed = first.doomed
        self.answered = 0.0
        self.state: State = "invoked"
        self.runs: set[str] = set()
        self.made = 0

    def add(self, step: Step) -> None:
        """Take a step into account."""
        if step.state == "invoked":
            self.made += 1
            return
        order: tuple[State, ...] = ("invoked", "failed", "unknown", "ok")
        if order.index(step.state) > order.index(self.state):
            self.state = step.state
            self.answered = step.at
        if step.run:
            self.runs.add(step.run)

    @property
    def required(self) -> bool:
        return self.state == "ok"

    @property
    def forbidden(self) -> bool:
        return self.state == "failed"


class History:
    """The history of one run, in a file and in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.operations: dict[str, Operation] = {}
        self._file: IO[bytes] | None = None

    @classmethod
    def load(cls, path: Path) -> History:
        """Load a history from its file."""
        history = cls(path)
        for line in path.read_bytes().splitlines():
            history._take(msgspec.json.decode(line, type=Step))
        return history

    def invoke(
        self,
        operation: str,
        kind: str,
        marks: Iterable[str],
        *,
        not_before: float = 0.0,
        at_most_once: bool = False,
        doomed: bool = False,
    ) -> None:
        """Record that an operation is about to be made.

        `at_most_once`: it may be given up, if that is recorded. `doomed`: it must be.
        """
        now = time.monotonic()
        step = Step(operation, "invoked", now, kind, tuple(marks), not_before, at_most_once, doomed)
        self._append(step)

    def ok(self, operation: str, run: str = "") -> None:
        """It was accepted."""
        self._append(Step(operation, "ok", time.monotonic(), run=run))

    def failed(self, operation: str, error: str) -> None:
        """It was refused, or withdrawn in time: it must not happen."""
        self._append(Step(operation, "failed", time.monotonic(), error=error))

    def unknown(self, operation: str, error: str) -> None:
        """No answer came."""
        self._append(Step(operation, "unknown", time.monotonic(), error=error))

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def counts(self) -> Mapping[str, int]:
        """How many operations ended in which way."""
        found = {"ok": 0, "failed": 0, "unknown": 0}
        for operation in self.operations.values():
            state = "unknown" if operation.state == "invoked" else operation.state
            found[state] += 1
        return found

    def _append(self, step: Step) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        self._file.write(msgspec.json.encode(step) + b"\n")
        self._take(step)

    def _take(self, step: Step) -> None:
        if step.operation not in self.operations:
            self.operations[step.operation] = Operation(step)
        self.operations[step.operation].add(step)
