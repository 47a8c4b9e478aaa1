"""Schedules, as their users meet them: many due at once, two schedulers, one of them killed.

lateness_1000   s      from the instant at which 1,000 schedules are due to the last queued run
lateness_10000  s      the same of 10,000
slots_due       slots  of 50 schedules that are due every second, on two schedulers, of which one or
slots_missed    slots  the other is killed (kill -9) every few seconds: not in the queue afterwards,
slots_doubled   slots  more than once there

Instants and queue are compared as the server stored them; no worker runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator

import msgspec

from benchmarks.plan import Subject, scheduler
from benchmarks.stage import Failed, Stage, staged
from holdfast.broker import Broker, Bucket
from holdfast.broker.kv import direct_batch, parse_time
from holdfast.broker.streams import Topology
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.model.schedule import Schedule, define, encode, instants
from holdfast.model.slot import slot_id
from holdfast.names import H_MSG_ID, schedule_key

START_SECONDS = 6.0
STORED_EACH = 500
TICKING = 50
KILLS = 3
KILL_EVERY_SECONDS = 3.0
PATIENCE_SECONDS = 60.0


def schedules(subject: Subject) -> dict[str, float]:
    """All of them, each on a fresh server."""
    found: dict[str, float] = {}
    for count in (1_000, 10_000):
        with staged(subject) as stage:
            found[f"lateness_{count}"] = asyncio.run(_lateness(stage, count))
    with staged(subject) as stage:
        found |= asyncio.run(_kills(stage))
    return found


async def _lateness(stage: Stage, count: int) -> float:
    async with _namespace(stage) as broker:
        due = int(time.time() + START_SECONDS + count / 500)
        await _store(broker, [define(f"s{n}", "job", at=due) for n in range(count)])
        stage.start(scheduler())
        deadline = due + PATIENCE_SECONDS
        while await _waiting(broker) < count:
            if time.time() > deadline:
                raise Failed(f"not all of {count} slots in {PATIENCE_SECONDS:g} s")
            await asyncio.sleep(0.1)
        return max([at for _, at in await _runs(broker)]) - due


async def _kills(stage: Stage) -> dict[str, float]:
    async with _namespace(stage) as broker:
        rules = await _store(broker, [define(f"s{n}", "job", every=1) for n in range(TICKING)])
        fleet = [stage.start(scheduler()) for _ in range(2)]
        await asyncio.sleep(START_SECONDS)
        for turn in range(KILLS):
            fleet[turn % 2] = stage.replace(fleet[turn % 2], scheduler())
            await asyncio.sleep(KILL_EVERY_SECONDS)
        end = time.time()
        await asyncio.sleep(START_SECONDS)  # what is late still comes
        fired = Counter(run for run, _ in await _runs(broker))
    due = {slot_id(rule.name, m) for rule in rules for m in instants(rule, rule.since, end)}
    doubled = sum(count - 1 for count in fired.values())
    return {"slots_due": len(due), "slots_missed": len(due - set(fired)), "slots_doubled": doubled}


@contextlib.asynccontextmanager
async def _namespace(stage: Stage) -> AsyncIterator[Broker]:
    async with Broker(ConnectionConfig(nats_url=stage.url)) as broker:
        await Topology(broker, RecordConfig()).ensure()
        yield broker


async def _store(broker: Broker, rules: list[Schedule]) -> list[Schedule]:
    """Straight into the bucket: that is not what is measured."""
    bucket = Bucket(broker, broker.names.schedules)
    now = time.time()
    rules = [msgspec.structs.replace(rule, since=now, changed=now) for rule in rules]
    for start in range(0, len(rules), STORED_EACH):
        some = rules[start : start + STORED_EACH]
        await asyncio.gather(
            *(bucket.put(schedule_key(rule.name), encode(rule), expected=0) for rule in some)
        )
    return rules


async def _waiting(broker: Broker) -> int:
    info = await broker.api(f"STREAM.INFO.{broker.names.jobs}")
    return int(info["state"]["messages"])


async def _runs(broker: Broker) -> list[tuple[str, float]]:
    """Every run in the queue, with the time at which the server stored it."""
    subject = broker.names.job("default", "job")
    return [
        (message.headers[H_MSG_ID], parse_time(message.headers["Nats-Time-Stamp"]))
        async for message in direct_batch(broker, broker.names.jobs, subject)
    ]
