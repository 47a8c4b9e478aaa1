"""The brokers: a fresh one for every sample, on a free port, gone afterwards.

NATS is Holdfast's embedded server: with default sync (`fast`, two minutes, as anybody who installs
nats-server has it) or with `sync_interval: always`. Redis is the system's own, with its defaults
for a queue: no append-only file, and no snapshots either, so that forks do not disturb others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.server import Server

READY_SECONDS = 10.0


class Missing(Exception):
    """Something that a subject needs is not on this machine; the text says what."""


@contextlib.contextmanager
def nats(*, always: bool) -> Iterator[str]:
    """A nats-server; gives its URL."""
    with Server(fast=not always, monitor_port=0) as server:
        yield server.url


@contextlib.contextmanager
def redis() -> Iterator[str]:
    """A redis-server; gives its URL."""
    program = shutil.which("redis-server")
    if not program:
        raise Missing(redis_missing())
    with tempfile.TemporaryDirectory(prefix="bench-redis-") as folder:
        port = _free_port()
        process = subprocess.Popen(
            [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for(port, process)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait()


def redis_missing() -> str:
    """Why there is no Redis, or nothing."""
    if shutil.which("redis-server"):
        return ""
    return "no redis-server on this machine, and it could not be installed"


def install_redis(log: Path) -> None:
    """Install Redis from the system's packages, where that is ours to do."""
    if shutil.which("redis-server") or not shutil.which("apt-get") or os.geteuid() != 0:
        return
    with log.open("ab") as out:
        command = ["apt-get", "install", "--yes", "--no-install-recommends", "redis-server"]
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for step in (command, ["apt-get", "update"], command):
            subprocess.run(step, stdout=out, stderr=out, env=env, check=False)
            if shutil.which("redis-server"):
                return


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise Missing("redis-server does not start") from None
            time.sleep(0.01)
