"""A stage: one subject with a fresh broker, its worker processes and its senders."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import services, tally
from benchmarks.plan import ROOT, Kind, Subject

LOOK_SECONDS = 0.01
SEND_SECONDS = 180.0


class Failed(Exception):
    """A sample could not be taken; the text says why."""


class Stage:
    """What a sample is taken from. Made by `staged`."""

    def __init__(self, subject: Subject, url: str, folder: Path) -> None:
        self.subject = subject
        self.url = url
        self.folder = folder
        self.tallies = tally.Tallies(folder / "tally")
        self.workers: list[subprocess.Popen[bytes]] = []
        self._beside: list[subprocess.Popen[bytes]] = []
        self._env = {
            **os.environ,
            **subject.env(url),
            "BENCH_URL": url,
            "BENCH_VARIANT": subject.mode,
            "PYTHONPATH": os.pathsep.join(subject.path),
            "PYTHONUNBUFFERED": "1",
            tally.FOLDER: str(folder / "tally"),
        }

    def send(self, kind: str, number: float) -> dict[str, Any]:
        """Run the sender to its end; gives what it printed."""
        process = self.start_sender(kind, number)
        try:
            out, error = process.communicate(timeout=SEND_SECONDS)
        except subprocess.TimeoutExpired:
            raise Failed(f"sending took more than {SEND_SECONDS:g} s") from None
        finally:
            _kill(process)
        if process.returncode:
            raise Failed(f"the sender ended with {process.returncode}: {_last_line(error)}")
        answer: dict[str, Any] = json.loads(out.splitlines()[-1])
        return answer

    def start_sender(self, kind: str, number: float) -> subprocess.Popen[bytes]:
        """Run the sender beside something else."""
        command = [*self.subject.sender, "send", kind, str(number)]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def start_workers(self, processes: int = 1, kind: Kind = "noop") -> None:
        """Start as many worker processes as its users would, in their way."""
        self.workers += [self._start(c) for c in self.subject.worker(processes, kind)]

    def start_beside(self) -> None:
        """Start what watches over the workers."""
        if self.subject.beside:
            self.start(self.subject.beside)

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a process that is no worker."""
        self._beside.append(self._start(command))
        return self._beside[-1]

    def replace(
        self, process: subprocess.Popen[bytes], command: list[str]
    ) -> subprocess.Popen[bytes]:
        """kill -9 one of those, and start another in its place."""
        self._beside.remove(process)
        _kill(process)
        return self.start(command)

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "worker.log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=self._env, stdout=log, stderr=log, start_new_session=True
            )

    def kill_workers(self) -> None:
        """kill -9 every worker that was started, with its children."""
        for process in self.workers:
            _kill(process)
        self.workers.clear()

    def close(self) -> None:
        """End everything that was started."""
        self.kill_workers()
        for process in self._beside:
            _kill(process)

    def check(self) -> None:
        """Fail when a worker has ended by itself."""
        for process in (*self.workers, *self._beside):
            if process.poll() is not None:
                log = (self.folder / "worker.log").read_bytes()
                raise Failed(f"a worker ended with {process.returncode}: {_last_line(log)}")

    def processes(self) -> list[int]:
        """The workers' processes, with their children."""
        groups = {process.pid for process in self.workers}
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                with contextlib.suppress(OSError):
                    if os.getpgid(int(path.name)) in groups:
                        found.append(int(path.name))
        return found


@contextlib.contextmanager
def staged(subject: Subject) -> Iterator[Stage]:
    """A subject with a fresh broker; every process of it is gone afterwards."""
    broker = services.redis() if subject.broker == "redis" else services.nats(always=subject.always)
    with broker as url, tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        (folder / "tally").mkdir()
        stage = Stage(subject, url, folder)
        try:
            yield stage
        finally:
            stage.close()


def memory_mb(processes: list[int]) -> float:
    """Resident memory of processes, together."""
    pages = 0
    for pid in processes:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_seconds(processes: list[int]) -> float:
    """Processor time that processes have used, together."""
    ticks = 0
    for pid in processes:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def pause() -> None:
    """Between two looks at the tallies."""
    time.sleep(LOOK_SECONDS)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(text: bytes) -> str:
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "(it said nothing)"
