"""Malformed records and messages by the thousand: no process ends, none stops answering."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from holdfast.server import Server
from tests.faults.everybody import Everybody
from tests.security.fuzzing import inputs

SEED = int(os.environ.get("HOLDFAST_SEED", "20261118"))
COUNT = int(
    os.environ.get("HOLDFAST_FUZZ", "100000" if os.environ.get("HOLDFAST_SOAK") else "3000")
)
AT_ONCE = 100
WARM = 0.3
"""The part after which memory is measured first: by then every code path has been loaded."""


async def test_malformed_records_and_messages_stop_nobody(
    nats: Server, namespace: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """Every role goes on working, without a traceback, and its memory does not grow."""
    async with Everybody(nats.url, namespace, tmp_path).connected() as site:
        await site.start()
        over = asyncio.Event()
        probing = asyncio.create_task(site.slowest_answer(over))
        before: dict[str, int] = {}
        for number, (subject, body, headers) in enumerate(inputs(site.broker, SEED, COUNT)):
            await site.broker.publish(subject, body, headers)
            if number % AT_ONCE == 0:
                await site.broker.flush()
                site.quiet()
            if number == int(COUNT * WARM):
                before = site.memory()
        await site.broker.flush()
        over.set()
        slowest = await probing
        await site.works("after it all")
        after = site.memory()
        grown = {name: after[name] - before[name] for name in after}
        report(
            f"seed {SEED}: {COUNT:,} malformed records and messages, 0 processes ended, "
            f"0 tracebacks, slowest health answer {slowest:.2f} s, memory grown by {grown} kB"
        )
        for name in grown:
            assert grown[name] < 0.5 * before[name], (name, before, after)
