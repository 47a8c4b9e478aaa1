"""Worker processes that a test may kill, freeze and replace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import until

__all__ = ["WorkerProcess", "until", "worker_fleet"]

ROOT = Path(__file__).parents[2]


class WorkerProcess:
    """One real worker process."""

    def __init__(self, url: str, namespace: str, effects: Path, log: Path, **env: str) -> None:
        self.log = log
        self._env = {
            **os.environ,
            "HOLDFAST_NATS_URL": url,
            "HOLDFAST_NAMESPACE": namespace,
            "EFFECTS": str(effects),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            **env,
        }
        self.process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-c", "import sys;from holdfast.worker.process import run_worker;from holdfast.worker import Worker;from holdfast.config import *;from holdfast.telemetry import configure_logging;configure_logging(__import__('os').environ.get('HOLDFAST_LOG_LEVEL','info'));from tests.faults.app import app;sys.exit(run_worker(lambda: Worker(app, load(WorkerConfig), records=load(RecordConfig))))"],
                env=self._env,
                cwd=ROOT,
                stdout=out,
                stderr=out,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    async def ready(self) -> None:
        """Wait until it pulls."""
        await until(lambda: "at a time" in self.text() or not self.running, what="worker start")
        assert self.running, self.text()

    def kill(self) -> None:
        """kill -9, and wait for it to be gone."""
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def replace(self) -> None:
        """kill -9 and start another."""
        self.kill()
        self.process = self._spawn()

    async def stopped(self, limit: float = 40.0) -> int:
        """Wait for the process to end; returns its exit code."""
        await until(lambda: not self.running, limit, "worker end")
        return int(self.process.returncode)

    def close(self) -> None:
        if self.running:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


@contextmanager
def worker_fleet(
    count: int, url: str, namespace: str, root: Path, **env: str
) -> Iterator[list[WorkerProcess]]:
    """Several workers, gone afterwards whatever happens."""
    fleet = [
        WorkerProcess(url, namespace, root / "effects", root / f"worker-{n}.log", **env)
        for n in range(count)
    ]
    try:
        yield fleet
    finally:
        for worker in fleet:
            worker.close()
