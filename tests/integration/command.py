"""A long-running `holdfast` command: its output, signals, exit and health."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from holdfast import Holdfast
from holdfast.server.process import free_ports
from tests.support import until

ROOT = Path(__file__).parents[2]

QUICK = {
    "HOLDFAST_LIVENESS_HEARTBEAT_SECONDS": "0.5",
    "HOLDFAST_LIVENESS_TIMEOUT_SECONDS": "2",
    "HOLDFAST_WORKER_ACK_WAIT_SECONDS": "1",
    "HOLDFAST_WORKER_EXTEND_SECONDS": "0.3",
}
"""A dead worker is detected within a few seconds, even without a coordinator."""


def _hear_interrupts() -> None:
    """Restore SIGINT: shells make background processes, and so their children, ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Command:
    """One running command; what it prints, on either stream, goes to one file."""

    def __init__(
        self, *arguments: str, folder: Path, cwd: Path = ROOT, env: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self._log = folder / f"command-{len(list(folder.glob('command-*')))}.log"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
        # Finding the package must not depend on the working directory.
        paths = [str(Path(p).resolve()) for p in sys.path if p and Path(p).is_dir()]
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "holdfast", *arguments],
                cwd=cwd,
                env=kept | {"PYTHONPATH": os.pathsep.join(paths)} | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_hear_interrupts,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def text(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    async def says(self, words: str, count: int = 1, limit: float = 40.0) -> str:
        """Wait until it has printed some words `count` times; returns all its output."""

        def over() -> bool:
            return self.text.count(words) >= count or self.process.poll() is not None

        with contextlib.suppress(AssertionError):  # the assertion below shows what was printed
            await until(over, limit)
        assert self.text.count(words) >= count, f"not {count} × {words!r} in:\n{self.text}"
        return self.text

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self, limit: float = 40.0) -> int:
        """Wait for its end; returns the exit code."""
        await until(lambda: self.process.poll() is not None, limit, f"the end of:\n{self.text}")
        return int(self.process.returncode)

    async def children(self) -> list[int]:
        """Its child processes that are still running."""
        listing = Path(f"/proc/{self.pid}/task")
        found = [int(p) for t in listing.iterdir() for p in (t / "children").read_text().split()]
        return sorted(found)


class Gates:
    """The gates of `gate_app`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, name: str) -> None:
        (self.folder / f"{name}.open").touch()

    def pids(self, name: str) -> list[int]:
        """The processes in which a run of that name has started."""
        return [int(p.name.split(".")[-2]) for p in self.folder.glob(f"{name}.*.started")]

    async def started(self, name: str, count: int = 1, limit: float = 40.0) -> list[int]:
        await until(lambda: len(self.pids(name)) >= count, limit, f"{count} starts of {name}")
        return self.pids(name)


def worker(sender: Holdfast, folder: Path, *arguments: str, **env: str) -> Command:
    """`holdfast worker` for the gates, on the server and in the namespace of the sender."""
    config = sender.connection_config()
    given = {"HOLDFAST_NATS_URL": config.nats_url, "HOLDFAST_NAMESPACE": config.namespace}
    given |= {"GATES": str(folder), **QUICK, **env}
    return Command("worker", "tests.integration.gate_app:app", *arguments, folder=folder, env=given)


async def ask(port: int, path: str) -> tuple[int, str]:
    """Status and body of a GET; status 0 while nothing listens."""

    def get() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    return await asyncio.to_thread(get)


async def ready(port: int, limit: float = 40.0) -> dict[str, Any]:
    """The health response once it is ready."""

    async def found() -> dict[str, Any] | None:
        status, body = await ask(port, "/health/ready")
        return dict(json.loads(body)) if status == 200 else None

    answer: dict[str, Any] = await until(found, limit, "readiness")
    return answer


def free_port() -> int:
    return free_ports(1)[0]


@contextmanager
def watched(*pids: int) -> Iterator[list[int]]:
    """Process handles that stay valid after the processes end."""
    handles = [os.pidfd_open(pid) for pid in pids]
    try:
        yield handles
    finally:
        for handle in handles:
            os.close(handle)


async def gone(handles: list[int], limit: float = 20.0) -> None:
    """Wait until every watched process has ended, whatever its parent."""

    def all_gone() -> bool:
        return len(select.select(handles, [], [], 0)[0]) == len(handles)

    await until(all_gone, limit, "the end of every process")
