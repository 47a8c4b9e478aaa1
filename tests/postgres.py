"""A real Postgres for tests, in a directory of its own on a free port."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg

_START_SECONDS = 60.0
"""A loaded machine takes seconds for recovery after a kill."""


def binary(name: str) -> str:
    """A program of Postgres: on the PATH, or where Debian keeps it."""
    found = shutil.which(name)
    debian = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    assert found or debian, f"{name} is missing: apt install postgresql"
    return found or str(debian[-1])


class Postgres:
    """One server; `kill` and `start` as often as a test likes."""

    def __init__(self) -> None:
        # Not below pytest's directory: Postgres refuses to run as root, and another user may not
        # enter that.
        self.directory = Path(tempfile.mkdtemp(prefix="holdfast-postgres-"))
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            os.chown(self.directory, user.pw_uid, user.pw_gid)
            self._as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        made = [binary("initdb"), "-D", str(self._data), "-U", "shop", "-A", "trust", "-N"]
        subprocess.run(made, check=True, capture_output=True, **self._as)

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def conninfo(self) -> str:
        return f"host=127.0.0.1 port={self.port} user=shop dbname=postgres connect_timeout=5"

    @property
    def url(self) -> str:
        """For SQLAlchemy."""
        return f"postgresql+psycopg://shop@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [binary("postgres"), "-D", str(self._data), "-p", str(self.port)]
        command += ["-k", str(self.directory), "-h", "127.0.0.1"]
        with (self.directory / "log").open("ab") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, **self._as)
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                psycopg.connect(self.conninfo).close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, (self.directory / "log").read_text()
                time.sleep(0.05)

    def kill(self) -> None:
        """End it as a crash does: SIGQUIT to the parent ends all of its processes at once."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait()

    def close(self) -> None:
        """End it and remove what it stored."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
