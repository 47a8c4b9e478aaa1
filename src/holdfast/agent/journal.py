"""The journal: the runs this agent has seen, at which epoch, and their returns.

    accepted ──► done ──► sent          cancelled: whatever comes later is not executed

Guaranteed: an entry is on disk before its command is executed, so this agent starts a run at most
once, across any number of restarts: a run accepted but not done when the process died is reported
as interrupted, never repeated. A return of up to `LARGEST_KEPT_RETURN` is on disk before it is
sent, so it survives a restart too. The file is 0600 and its folder locked against other processes.

The file consists of lines, appended and synced; a line truncated by a crash is ignored. When the
file has grown it is rewritten and renamed into place. It keeps the newest 4,096 runs and those not
yet sent, of these at most 20,000: a host's schedules also run while the server is away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from pathlib import Path
from typing import IO, Final, Literal

import msgspec

from holdfast.errors import ConfigError, Unreadable
from holdfast.model.codec import Codec

log = logging.getLogger("holdfast.agent")

KEPT: Final = 4096
"""Runs to remember; a command repeated later has long expired."""
LARGEST_KEPT_RETURN: Final = 64 * 1024
"""Larger returns do not survive a restart, so that the journal stays small."""
LARGEST_FILE: Final = 16 * 1024 * 1024
"""The size at which the journal is rewritten, so that an agent reads little when it starts."""

MOST_UNSENT: Final = 20_000
"""Returns that wait for the server: two weeks of a schedule that runs every minute. Then the oldest
are dropped, so that the disk does not fill up."""

State = Literal["accepted", "done", "sent", "cancelled"]


class KnownRun(msgspec.Struct, omit_defaults=True):
    """One run as this agent knows it."""

    run: str
    epoch: int
    state: State
    body: bytes = b""
    """The return, until the server has stored it."""


SEEN: Final = Codec[KnownRun](KnownRun, "an entry of the journal")


class Journal:
    """The runs of one agent, in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "runs.jsonl"
        self._seen: dict[str, KnownRun] = {}
        self._size = 0
        self._most = (2 * KEPT, LARGEST_FILE)
        """Entries and bytes at which it is rewritten: twice what the last rewrite left, so that
        many unsent returns do not cause a rewrite for every line."""
        self._torn = False
        self._file: IO[bytes] | None = None
        self._lock: IO[bytes] | None = None

    # ---- life

    def open(self) -> None:
        """Lock the folder and read the journal."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = open(self._folder / "lock", "wb", opener=_private)  # noqa: SIM115
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
            self._rewrite()
        except BlockingIOError:
            self.close()
            raise ConfigError(
                f"another agent uses {str(self._folder)!r}: give this one its own --data"
            ) from None
        except OSError as error:
            self.close()
            raise ConfigError(
                f"the agent's folder {str(self._folder)!r} cannot be used: {error.strerror}. Free "
                "space or correct its permissions, then start the agent again"
            ) from None

    def close(self) -> None:
        """Close the journal and unlock the folder."""
        for file in (self._file, self._lock):
            if file:
                file.close()
        self._file = self._lock = None

    def _read(self) -> None:
        if not self._path.exists():
            return
        for line in self._path.read_bytes().split(b"\n"):
            try:
                entry = SEEN.decode(line)
            except Unreadable:
                continue  # truncated by a crash: it was never accepted
            self._seen.pop(entry.run, None)
            self._seen[entry.run] = entry

    # ---- reading

    def get(self, run: str) -> KnownRun | None:
        """The entry of a run, if known."""
        return self._seen.get(run)

    def waiting(self) -> list[KnownRun]:
        """Runs accepted or done whose return the server does not have yet."""
        return [e for e in self._seen.values() if e.state in ("accepted", "done")]

    # ---- writing

    def enter(self, run: str, epoch: int, state: State = "accepted") -> None:
        """Record a run before acting on it."""
        self._put(KnownRun(run, epoch, state), sync=True)

    def raise_epoch(self, run: str, epoch: int) -> None:
        """A later owner has asked about a known run."""
        entry = self._seen[run]
        entry.epoch = max(entry.epoch, epoch)
        self._put(entry, sync=True)

    def done(self, run: str, body: bytes) -> None:
        """The command has ended with this return."""
        entry = self._seen[run]
        entry.state = "done"
        entry.body = body if len(body) <= LARGEST_KEPT_RETURN else b""
        self._put(entry, sync=True)

    def sent(self, run: str) -> None:
        """The server has stored the return."""
        entry = self._seen.get(run)
        if entry and entry.state == "done":
            entry.state, entry.body = "sent", b""
            with contextlib.suppress(OSError):  # sent again after a restart; a repeat is harmless
                self._put(entry, sync=False)

    def _put(self, entry: KnownRun, *, sync: bool) -> None:
        """Append a line; on `OSError` the entry is not recorded."""
        if self._file is not None:  # closed: a command that could not be stopped ended late
            self._append(msgspec.json.encode(entry) + b"\n", sync=sync)
        self._seen[entry.run] = entry
        if len(self._seen) > self._most[0] or self._size > self._most[1]:
            self._rewrite()

    def _append(self, line: bytes, *, sync: bool) -> None:
        assert self._file is not None
        try:
            whole = b"\n" + line if self._torn else line
            if os.write(self._file.fileno(), whole) < len(whole):
                raise OSError(errno.ENOSPC, "the disk is full")
            if sync:
                os.fsync(self._file.fileno())
        except OSError:
            self._torn = True  # the next line must not be appended to a partial one
            raise
        self._torn = False
        self._size += len(line)

    def _rewrite(self) -> None:
        """Replace the journal by a new, compacted file."""
        self._drop("sent", "cancelled", most=KEPT - len(self.waiting()))
        if dropped := self._drop("done", most=MOST_UNSENT):
            log.error("%d returns are dropped: the server has been away for too long", dropped)
        fresh = self._path.with_suffix(".new")
        with open(fresh, "wb", opener=_private) as file:
            file.writelines(msgspec.json.encode(entry) + b"\n" for entry in self._seen.values())
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
        if self._file:
            self._file.close()
        self._file = open(self._path, "ab", opener=_private)  # noqa: SIM115 - open until `close`
        self._size = self._path.stat().st_size
        self._most = (2 * max(KEPT, len(self._seen)), max(LARGEST_FILE, 2 * self._size))

    def _drop(self, *states: State, most: int) -> int:
        """Forget the oldest entries in these states until `most` are left; returns how many."""
        found = [run for run, entry in self._seen.items() if entry.state in states]
        dropped = found[: max(0, len(found) - max(0, most))]
        for run in dropped:
            del self._seen[run]
        return len(dropped)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
