"""`make demo`: it shows that nothing is missed, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from holdfast.server import Server
from holdfast.server.process import free_ports
from tests.integration.command import gone, watched
from tests.support import until

ROOT = Path(__file__).parents[2]


class Demo:
    """A running demo; what it prints goes to a file."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self._log = folder / "demo.log"
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HOLDFAST_", "UPTIME_"))}
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "uptime.demo", *arguments],
                env=env | {"TMPDIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self._log.read_text(encoding="utf-8")

    async def says(self, pattern: str, limit: float = 150) -> str:
        def over() -> bool:
            return bool(re.search(pattern, self.text)) or self.process.poll() is not None

        await until(over, limit, pattern)
        found = re.search(pattern, self.text)
        assert found, self.text
        return found[found.re.groups]

    async def ended(self) -> int:
        await until(lambda: self.process.poll() is not None, 150, "the end of the demo")
        assert "Traceback" not in self.text
        assert not list(self.folder.glob("holdfast-*")), "its temporary files are gone"
        return int(self.process.returncode)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


async def test_demo_shows_its_pages_and_stops_cleanly(short_path: Path) -> None:
    """The addresses that it prints answer; Ctrl-C ends every process and leaves no file."""
    demo = Demo(short_path)
    try:
        for name in ("status page", "dashboard"):
            url = await demo.says(rf"{name}: +(http://\S+)")
            with await asyncio.to_thread(urllib.request.urlopen, url, timeout=20) as answer:
                assert answer.status == 200
        children = _children(demo.process.pid)
        assert len(children) >= 6
        with watched(*children) as seen:
            demo.process.send_signal(signal.SIGINT)
            assert await demo.ended() == 0
            await gone(seen)
    finally:
        demo.close()


async def test_demo_ends_by_itself(short_path: Path) -> None:
    """With --seconds, and without a terminal: the last line tells what was counted."""
    demo = Demo(short_path, "--seconds", "5", "--kill-every", "2")
    try:
        assert await demo.ended() == 0
        last = demo.text.splitlines()[-1]
        found = re.search(r"killed [12] processes; checks due (\d+), made (\d+), missed 0;", last)
        assert found, demo.text
        assert found[1] == found[2] != "0"
        assert "told twice 0, not told 0" in last
    finally:
        demo.close()


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(p) for t in tasks.iterdir() for p in (t / "children").read_text().split()]


async def test_pages_as_a_process_end_in_order(store: Server, tmp_path: Path) -> None:
    """Exit code 0 after SIGTERM, 3 without NATS, 78 where anybody could change the checks."""
    command = [sys.executable, "-m", "uptime", "--port", str(free_ports(1)[0])]
    open_to_all = subprocess.run([*command, "--host", "0.0.0.0"], capture_output=True, text=True)
    assert open_to_all.returncode == 78
    assert "UPTIME_TOKEN" in open_to_all.stderr
    env = os.environ | {"HOLDFAST_NATS_URL": "nats://127.0.0.1:1"}
    env["HOLDFAST_CONNECT_TIMEOUT_SECONDS"] = "0.5"
    alone = subprocess.run(command, env=env, capture_output=True, text=True)
    assert alone.returncode == 3
    assert "cannot reach NATS" in alone.stderr
    pages = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        await until(lambda: _healthy(command[-1]), 60, "the pages to answer")
        pages.terminate()
        assert await asyncio.to_thread(pages.wait) == 0
    finally:
        pages.kill()
        pages.communicate()


def _healthy(port: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
