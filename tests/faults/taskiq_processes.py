"""`taskiq worker` and `taskiq scheduler` as real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.processes import ROOT, Process
from tests.support import until


class TaskiqProcess(Process):
    """One `taskiq …` process of `tests.faults.taskiq_app`."""

    def __init__(self, command: list[str], url: str, namespace: str, log: Path, **env: str) -> None:
        self.ready_file = log.with_suffix(".ready")
        self._given = (command, url, namespace, env)
        ready = {"READY_FILE": str(self.ready_file), "WORKER_READY": str(self.ready_file)}
        env = {"TASKIQ_URL": url, "TASKIQ_NAMESPACE": namespace, **ready, **env}
        super().__init__(command, url, namespace, log, **env)

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "taskiq", *self._given[0]]
        with self.log.open("ab") as out:
            return subprocess.Popen(command, env=self._env, cwd=ROOT, stdout=out, stderr=out)

    def successor(self) -> TaskiqProcess:
        """Another one like it, with a separate log."""
        command, url, namespace, env = self._given
        log = self.log.with_name(f"{self.log.stem}x.log")
        return type(self)(command, url, namespace, log, **env)

    async def ready(self) -> None:
        """Wait for the file that a probe checks."""
        await until(lambda: self.ready_file.exists() or not self.running, 60, "the ready file")
        assert self.running, self.text()


@contextmanager
def schedulers(
    count: int, url: str, namespace: str, root: Path, **env: str
) -> Iterator[list[TaskiqProcess]]:
    """Several `taskiq scheduler` processes, killed afterwards in any case."""
    command = ["scheduler", "tests.faults.taskiq_app:scheduler", "--log-level", "INFO"]
    fleet = [
        TaskiqProcess(command, url, namespace, root / f"scheduler-{n}.log", **env)
        for n in range(count)
    ]
    try:
        yield fleet
    finally:
        for process in fleet:
            process.close()


@contextmanager
def worker(url: str, namespace: str, root: Path, **env: str) -> Iterator[TaskiqProcess]:
    """One `taskiq worker`, killed afterwards with its children."""
    command = ["worker", "tests.faults.taskiq_app:broker", "--workers", "1"]
    effects = str(root / "effects")
    process = TaskiqProcess(command, url, namespace, root / "worker.log", EFFECTS=effects, **env)
    try:
        yield process
    finally:
        for child in children(process.pid):
            os.kill(child, 9)
        process.close()


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(p) for p in path.read_text().split()] if path.exists() else []
