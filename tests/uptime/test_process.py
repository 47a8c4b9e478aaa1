"""`python -m uptime`: the pages as a process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from holdfast.server import Server
from holdfast.server.process import free_ports
from tests.support import until


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
