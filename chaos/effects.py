"""The effect store outside the system: an append-only log written by handlers, without locks.

One line per fact, in one write each, so a process may be killed or frozen at any point without
corrupting the log or blocking others. The order of the log decides, as in a database: the first
effect under a mark counts; a smaller epoch after a larger one is rejected as stale; the same run
with a larger epoch is a repeat, detected by its run id.

Times are monotonic: all processes of a machine share that clock, even one with a wrong wall clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

DIRECTORY_VARIABLE: Final = "HOLDFAST_CHAOS_DIR"
MEMBER_VARIABLE: Final = "HOLDFAST_CHAOS_MEMBER"
"""Set for every process of a fleet: the name by which faults target it."""
LOG: Final = "effects.jsonl"

What = Literal["start", "effect", "fail"]


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fact: a handler started, had its effect, or failed as intended."""

    what: What
    mark: str
    run: str
    epoch: int
    attempt: int
    member: str
    at: float


class Effects:
    """The log in one directory."""

    def __init__(self, root: Path) -> None:
        self.path = root / LOG
        root.mkdir(parents=True, exist_ok=True)
        self._member = os.environ.get(MEMBER_VARIABLE, f"pid-{os.getpid()}")

    @classmethod
    def here(cls) -> Effects:
        """The store of the chaos run that this process is part of."""
        return cls(Path(os.environ[DIRECTORY_VARIABLE]))

    def write(self, what: What, mark: str, run: str, epoch: int, attempt: int = 1) -> None:
        """Append one fact."""
        line = Line(what, mark, run, epoch, attempt, self._member, time.monotonic())
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, msgspec.json.encode(line) + b"\n")
        finally:
            os.close(handle)

    def lines(self) -> list[Line]:
        """Every fact so far, in order."""
        return list(self.tail(0)[0])

    def tail(self, offset: int) -> tuple[Iterator[Line], int]:
        """The facts after an offset, and the offset after them."""
        if not self.path.exists():
            return iter(()), 0
        with self.path.open("rb") as log:
            log.seek(offset)
            data = log.read()
        whole = data[: data.rfind(b"\n") + 1]
        decode = msgspec.json.Decoder(Line).decode
        return (decode(line) for line in whole.splitlines()), offset + len(whole)
