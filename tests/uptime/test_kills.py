"""Two schedulers, two workers, and one of them killed every few seconds: nothing is missed.

In the suite for about half a minute; `HOLDFAST_SOAK=1` makes it ten.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from uptime.app import app, incidents
from uptime.config import load
from uptime.service import Service

from tests.support import until
from tests.uptime.audit import Audit
from tests.uptime.sites import Mood, Receiver, Website
from tests.uptime.stage import Stage

SECONDS = 600 if os.environ.get("HOLDFAST_SOAK") else 22
STEADY, SLOW, FLAKY = 8, 6, 2
OUTAGE_SECONDS = 9.0
MOODS: tuple[Mood, ...] = ("broken", "away")


async def come_and_go(site: Website, outages: list[float], ends: float) -> None:
    """Out of order for a while, again and again, and well at the end."""
    while time.monotonic() + OUTAGE_SECONDS + 2 < ends:
        await asyncio.sleep(2)
        outages.append(time.time())
        await site.become(MOODS[len(outages) % 2])
        await asyncio.sleep(OUTAGE_SECONDS)
        await site.become("up")
        await asyncio.sleep(OUTAGE_SECONDS)


async def kill_now_and_then(stage: Stage, ends: float, dice: random.Random) -> None:
    while time.monotonic() < ends:
        await asyncio.sleep(dice.uniform(2, 5))
        stage.kill_one(dice)


@pytest.mark.timeout(SECONDS + 240)
async def test_no_check_is_missed_and_each_alert_is_told_once(
    tmp_path: Path, report: Callable[[str], None]
) -> None:
    """Every due instant of every check has its result; every outage is one incident, told once."""
    seed = random.randrange(1_000_000)
    report(f"seed {seed}")
    sites = {f"site-{n}": Website() for n in range(STEADY + FLAKY)}
    receiver, audit = Receiver(), None
    async with AsyncExitStack() as stack:
        for server in (*sites.values(), receiver):
            await stack.enter_async_context(server)
        stage = await stack.enter_async_context(Stage(tmp_path))
        await stage.ready()
        await stack.enter_async_context(app)
        audit = Audit(receiver)
        service = Service(load())
        await service.set_channel({"id": "hook", "kind": "webhook", "target": receiver.url})
        for id, site in sites.items():
            await service.add(
                {"id": id, "name": id, "target": site.url, "interval": 2, "timeout": 2}
            )
        for site in list(sites.values())[-SLOW:]:
            await site.become("slow")  # so that a kill finds checks under way
        flaky = dict(list(sites.items())[:FLAKY])
        outages: dict[str, list[float]] = {id: [] for id in flaky}
        ends = time.monotonic() + SECONDS
        await asyncio.gather(
            kill_now_and_then(stage, ends, random.Random(seed)),
            *(come_and_go(site, outages[id], ends) for id, site in flaky.items()),
        )
        last = time.time()

        async def settled() -> bool:
            found = await audit.look(last)
            return found.clean and all([not (await service.state(id)).incident for id in flaky])

        await until(settled, 60, "every check made and every alert told")
        found = await audit.look(last)
        known = [entry.value async for entry in incidents.entries()]
        kills = Counter(name.split()[0] for name in stage.kills)
    report(
        f"{SECONDS} s, killed {dict(kills)}: {found}; "
        f"{found.repeated} attempts after a crash, {found.known_repeats} deliveries repeated"
    )
    assert found.clean
    assert found.made == found.due
    assert kills["worker"] + kills["scheduler"] == len(stage.kills) >= SECONDS // 10
    assert Counter(i.check for i in known) == {id: len(times) for id, times in outages.items()}
    assert {i.status for i in known} == {"down"}
    expected = {f"{i.id}.{told}" for i in known for told in ("opened", "closed")}
    assert set(receiver.counts) == expected
