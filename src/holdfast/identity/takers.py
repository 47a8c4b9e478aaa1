"""Servers that take the users of a folder by themselves, and what they have taken.

Each server of `holdfast server --auth DIR` keeps a file in `DIR/.servers`, locked while it lives:
its address, which content of `auth.conf` it has looked at last, and why it could not use that.
Whoever changes the users reads there whether the change is in force.

Not guaranteed: that these are all the servers. One that was started otherwise keeps no such file.
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
PACE_SECONDS: Final = 0.05


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What one server has taken."""

    server: str
    """Its address."""
    looked_at: str = ""
    """The digest of the configuration that it looked at last."""
    error: str = ""
    """Why it goes on with what it had before."""


def digest(config: Path) -> str:
    """What tells one content of a configuration from another."""
    return hashlib.sha256(config.read_bytes()).hexdigest()


class Taker:
    """One server's own file. `OSError` where the folder cannot be written."""

    def __init__(self, config: Path, server: str) -> None:
        self._path = config.parent / FOLDER / f"{os.getpid()}.json"
        self._server = server
        self._file: IO[bytes] | None = None

    def write(self, looked_at: str, error: str = "") -> None:
        """Say what was looked at, and how it went."""
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
        """The server ends."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def takers(config: Path) -> list[Taken]:
    """The servers that live; what others have left behind is removed."""
    found = []
    for path in sorted((config.parent / FOLDER).glob("*.json")):
        try:
            with path.open("rb") as file:
                if _locked(file):
                    found.append(_read(file.read(), path.stem))
                else:
                    path.unlink(missing_ok=True)
        except OSError:  # it ended just now
            continue
    return found


def wait_taken(
    config: Path, seconds: float, monotonic: Callable[[], float] = time.monotonic
) -> tuple[list[Taken], list[Taken]]:
    """Wait until every server has looked at the configuration: who uses it, and who does not."""
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
    except msgspec.DecodeError:  # it is being written
        return Taken(server=f"process {name}")
