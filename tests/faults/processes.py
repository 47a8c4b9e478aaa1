"""Worker processes that a test may kill, freeze and replace."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.integration.cli_support import forking
from tests.support import until

__all__ = ["Forked", "Process", "WorkerProcess", "children", "keepers", "until", "worker_fleet"]

ROOT = Path(__file__).parents[2]


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def keepers(pid: int) -> list[int]:
    """The keepers among the children of a process."""
    found = []
    for child in children(pid):
        with suppress(OSError):  # it may just have ended
            if "holdfast.keeper" in Path(f"/proc/{child}/cmdline").read_text():
                found.append(child)
    return found


class Forked:
    """A `holdfast` process that was forked from one that has it loaded: only imports are shared.

    It has what tests need of `subprocess.Popen`.
    """

    def __init__(self, arguments: list[str], env: dict[str, str], log: Path) -> None:
        self.returncode: int | None = None
        self._answers = socket.socket(socket.AF_UNIX)
        self._answers.connect(forking())
        files = [os.devnull, str(log), str(log)]
        wanted = {"arguments": arguments, "env": env, "cwd": str(ROOT), "files": files}
        self._answers.sendall(json.dumps(wanted).encode() + b"\n")
        self.pid = self._number()

    def _number(self) -> int:
        line = b""
        while not line.endswith(b"\n"):
            line += (more := self._answers.recv(1))
            assert more, "the process that forks has ended"
        return int(line)

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Wait for its end; returns its exit code."""
        if self.returncode is None:
            self.returncode = self._number()
            self._answers.close()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens if it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)


class Process:
    """One real `holdfast` process."""

    def __init__(self, command: list[str], url: str, namespace: str, log: Path, **env: str) -> None:
        self.log = log
        self._command = command
        self._env = {
            **os.environ,
            "HOLDFAST_NATS_URL": url,
            "HOLDFAST_NAMESPACE": namespace,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            **env,
        }
        self.process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes] | Forked:
        with self.log.open("ab") as out:
            if "LD_PRELOAD" not in self._env:  # which works on a new program only
                return Forked(self._command, self._env, self.log)
            command = [sys.executable, "-m", "holdfast", *self._command]
            return subprocess.Popen(command, env=self._env, cwd=ROOT, stdout=out, stderr=out)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """kill -9, and wait for the process to end."""
        self.process.kill()
        self.process.wait()

    def kill_all(self) -> None:
        """kill -9 of the whole of it at once, its keeper too, as when a container is killed."""
        self.process.send_signal(signal.SIGSTOP)  # it starts no other child meanwhile
        for child in children(self.pid):
            os.kill(child, signal.SIGKILL)
        self.kill()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def replace(self) -> None:
        """kill -9 and start another."""
        self.kill()
        self.process = self._spawn()

    async def stopped(self, limit: float = 40.0) -> int:
        """Wait for the process to end; returns its exit code."""
        await until(lambda: not self.running, limit, "worker end")
        return self.process.wait()

    def close(self) -> None:
        if self.running:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


class WorkerProcess(Process):
    """One real worker of `tests.faults.app`."""

    def __init__(self, url: str, namespace: str, effects: Path, log: Path, **env: str) -> None:
        command = ["worker", "tests.faults.app:app"]
        super().__init__(command, url, namespace, log, EFFECTS=str(effects), **env)

    async def ready(self) -> None:
        """Wait until it pulls."""
        await until(lambda: "at a time" in self.text() or not self.running, what="worker start")
        assert self.running, self.text()


@contextmanager
def worker_fleet(
    count: int, url: str, namespace: str, root: Path, **env: str
) -> Iterator[list[WorkerProcess]]:
    """Several workers, killed afterwards in any case."""
    fleet = [
        WorkerProcess(url, namespace, root / "effects", root / f"worker-{n}.log", **env)
        for n in range(count)
    ]
    try:
        yield fleet
    finally:
        for worker in fleet:
            worker.close()
