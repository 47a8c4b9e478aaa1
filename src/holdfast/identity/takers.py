"""Tracks which servers have loaded the users of a folder.

Each server of `holdfast server --auth DIR` keeps a file in `DIR/.servers`, locked while it runs:
its address, a digest of the `auth.conf` it last tried, and why it could not load that. Commands
that change users read it to tell whether the change is in force.

Not guaranteed: that these are all the servers. Servers started otherwise keep no such file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

import msgspec

FOLDER: Final = ".servers"
PACE_SECONDS: Final = 0.05  # a person is waiting; checking is a few file reads


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What one server has loaded."""

    server: str
    """The server's address."""
    looked_at: str = ""
    """Digest of the configuration it last tried."""
    error: str = ""
    """Why it kept the previous one."""


def digest(config: Path) -> str:
    """Identifies a configuration's content."""
    return hashlib.sha256(config.read_bytes()).hexdigest()


class Taker:
    """One server's file. Raises `OSError` if the folder is not writable."""

    def __init__(self, config: Path, server: str) -> None:
        self._path = config.parent / FOLDER / f"{os.getpid()}.json"
        self._server = server
        self._file: IO[bytes] | None = None

    def write(self, looked_at: str, error: str = "") -> None:
        """Record which configuration was tried, and the error if any."""
        if self._file is None:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            self._file = self._path.open("wb")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        record = Taken(server=self._server, looked_at=looked_at, error=error)
        self._file.seek(0)
        self._file.truncate()
        self._file.write(msgspec.json.encode(record))
        self._file.flush()

    def close(self) -> None:
        """Remove the file when the server stops."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def takers(config: Path) -> list[Taken]:
    """The running servers; removes files left by others."""
    found = []
    for path in sorted((config.parent / FOLDER).glob("*.json")):
        try:
            with path.open("rb") as file:
                if _locked(file):
                    found.append(_read(file.read(), path.stem))
                else:
                    path.unlink(missing_ok=True)
        except OSError:  # it just stopped
            continue
    return found


def wait_taken(
    config: Path, seconds: float, monotonic: Callable[[], float] = time.monotonic
) -> tuple[list[Taken], list[Taken]]:
    """Wait up to `seconds` for every server to try the configuration; returns (using it, not)."""
    wanted, deadline = digest(config), monotonic() + seconds
    while True:
        found = takers(config)
        if all(one.looked_at == wanted for one in found) or monotonic() > deadline:
            used = [one for one in found if one.looked_at == wanted and not one.error]
            return used, [one for one in found if one not in used]
        time.sleep(PACE_SECONDS)


def _locked(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _read(raw: bytes, name: str) -> Taken:
    try:
        return msgspec.json.decode(raw, type=Taken)
    except msgspec.DecodeError:  # being written
        return Taken(server=f"process {name}")
