"""Requests that are no requests: the web process lives on, answers others, and keeps its memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from holdfast.server import Server
from tests.integration.web_support import TOKENS
from tests.security.malformed_http import malformed

MANY = 100_000 if os.environ.get("HOLDFAST_SOAK") else 1_500
SEED = int(os.environ.get("HOLDFAST_SEED", "20261118"))
AT_ONCE = 8
FLAT = 32 * 1024
"""Kilobytes by which the memory may differ: arenas and caches, and no leak of a request each."""


@contextlib.asynccontextmanager
async def web(nats: Server, namespace: str, log: list[str]) -> AsyncIterator[tuple[str, Process]]:
    """A web process, and its address."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")} | {
        "HOLDFAST_NATS_URL": nats.url,
        "HOLDFAST_NAMESPACE": namespace,
        "HOLDFAST_WEB_TOKENS": ",".join(line for _, line in TOKENS.values()),
        "HOLDFAST_WEB_RATE_PER_SECOND": "0",
    }
    words = [sys.executable, "-m", "holdfast", "web", "--port", "0"]
    process = await asyncio.create_subprocess_exec(*words, env=env, stdout=PIPE, stderr=PIPE)
    assert process.stdout
    assert process.stderr
    line = (await process.stdout.readline()).decode()
    found = re.search(r"http://[^\s/]+", line)
    assert found, line

    async def keep(stream: asyncio.StreamReader) -> None:
        while said := await stream.readline():
            log.append(said.decode("utf-8", "replace"))

    keeping = [asyncio.create_task(keep(s)) for s in (process.stdout, process.stderr)]
    try:
        yield found[0], process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        await asyncio.gather(*keeping)


def memory_of(process: Process) -> int:
    """The kilobytes that a process has in memory."""
    text = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    return int(re.findall(r"VmRSS:\s+(\d+)", text)[0])


async def ask(port: int, request: bytes) -> bytes:
    """What comes back; nothing when the connection was closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with contextlib.suppress(OSError):
            writer.write(request)
            writer.write_eof()
            return await reader.read()
        return b""
    finally:
        writer.transport.abort()


async def probe(url: str, seconds: list[float], done: asyncio.Event) -> None:
    """Ask for the health meanwhile, and note how long it takes."""
    async with httpx.AsyncClient(timeout=60) as client:
        while not done.is_set():
            began = time.monotonic()
            answer = await client.get(f"{url}/health/live")
            assert answer.status_code == 200
            seconds.append(time.monotonic() - began)
            await asyncio.sleep(0.05)


async def test_malformed_requests_harm_nobody(nats: Server, namespace: str, report: Any) -> None:
    """No process ends, no traceback is logged, no answer is a 500, and the memory stays."""
    log: list[str] = []
    codes: dict[str, int] = {}
    made = itertools.islice(malformed(SEED, TOKENS["viewer"][0]), MANY)
    async with web(nats, namespace, log) as (url, process):
        port = int(url.rpartition(":")[2])
        slow: list[float] = []
        done = asyncio.Event()
        probing = asyncio.create_task(probe(url, slow, done))
        before = 0

        async def work() -> None:
            nonlocal before
            for n, request in enumerate(made):
                said = await ask(port, request)
                code = said[9:12].decode("latin-1") if said.startswith(b"HTTP/1.1 ") else "none"
                codes[code] = codes.get(code, 0) + 1
                assert not code.startswith("5") or code == "503", (request, said[:300])
                if n == MANY // 4 // AT_ONCE:
                    before = before or memory_of(process)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        done.set()
        await probing
        after = memory_of(process)
        assert process.returncode is None
    assert not [line for line in log if "Traceback" in line or "ERROR" in line], log[:20]
    assert after - before < FLAT, f"{before:,} kB before, {after:,} kB after"
    report(
        f"{MANY:,} requests of seed {SEED}: {dict(sorted(codes.items()))}; {len(slow)} probes, "
        f"slowest {max(slow):.3f} s; memory {before:,} → {after:,} kB"
    )
