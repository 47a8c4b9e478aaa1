"""What a worker process tells the benchmark: how many runs, when, and how long each had waited.

Each process writes numbers into a small file that the benchmark maps and reads. That costs a run
less than a microsecond, the same for every system. A forked child opens a file of its own, and a
lock makes it right for threads.

Times are `CLOCK_MONOTONIC`, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

FOLDER = "BENCH_TALLY"
"""Environment variable: the folder for the files."""

STARTED, ENDED, FIRST, LAST, WAITS = range(5)
_HEAD = 8
_ROOM = 8192
_BYTES = 8 * (_HEAD + _ROOM)

_lock = threading.Lock()
_owner = 0
_cells = memoryview(bytearray(_BYTES)).cast("q")


def started(sent: int) -> None:
    """A run begins; `sent` is when it was enqueued, in nanoseconds, or 0 to keep no latency."""
    now = time.monotonic_ns()
    with _lock:
        if _owner != os.getpid():
            _open()
        if not _cells[FIRST]:
            _cells[FIRST] = now
        _cells[STARTED] += 1
        if sent and _cells[WAITS] < _ROOM:
            _cells[_HEAD + _cells[WAITS]] = now - sent
            _cells[WAITS] += 1


def ended() -> None:
    """A run is over."""
    with _lock:
        _cells[ENDED] += 1
        _cells[LAST] = time.monotonic_ns()


def _open() -> None:
    global _owner, _cells
    path = Path(os.environ[FOLDER]) / str(os.getpid())
    with path.open("w+b") as file:
        file.truncate(_BYTES)
        _cells = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("q")
    _owner = os.getpid()


class Tallies:
    """All files of a folder, as the benchmark reads them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cells: dict[str, memoryview] = {}

    def _all(self) -> list[memoryview]:
        for path in self._folder.iterdir():
            if path.name not in self._cells and path.stat().st_size == _BYTES:
                with path.open("r+b") as file:
                    mapped = mmap.mmap(file.fileno(), _BYTES)
                self._cells[path.name] = memoryview(mapped).cast("q")
        return list(self._cells.values())

    def of(self, cell: int) -> list[int]:
        """One cell of every process."""
        return [cells[cell] for cells in self._all()]

    def total(self, cell: int) -> int:
        """The sum of a cell."""
        return sum(self.of(cell))

    def waits(self) -> list[int]:
        """Every latency that was kept, in nanoseconds."""
        return [w for c in self._all() for w in c[_HEAD : _HEAD + c[WAITS]].tolist()]
