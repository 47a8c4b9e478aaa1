"""Flows while their workers are killed: every one ends, no effect twice under one epoch."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from pathlib import Path

from holdfast.server import Server
from tests.faults.flow_app import app, story
from tests.integration.command import QUICK, Command
from tests.support import until

FLOWS = 40
KILLS = 4


async def test_flows_end_although_workers_are_killed(tmp_path: Path) -> None:
    """kill -9 of workers in the middle of steps, parks and wakes; seeds vary from run to run."""
    effects = tmp_path / "effects"
    effects.touch()
    seed = int(os.environ.get("FLOW_SEED", random.randrange(1_000_000)))
    chance = random.Random(seed)
    with Server(fast=True) as server:
        env = QUICK | {"HOLDFAST_NATS_URL": server.url, "HOLDFAST_NAMESPACE": "flowfaults"}
        env |= {"EFFECTS": str(effects)}
        app.connect_with(nats_url=server.url, namespace="flowfaults")

        def start() -> Command:
            return Command("worker", "tests.faults.flow_app:app", folder=tmp_path, env=env)

        workers = [start(), start()]
        coordinator = Command("coordinator", folder=tmp_path, env=env)
        try:
            async with app:
                await until(lambda: "jobs" in _log(tmp_path), 20, "a worker")
                runs = await story.enqueue_many(range(FLOWS))
                for _ in range(KILLS):
                    await asyncio.sleep(chance.uniform(0.3, 1.0))
                    victim = workers.pop(chance.randrange(len(workers)))
                    victim.process.kill()
                    victim.process.wait()
                    workers.append(start())
                for key in "012":
                    await app.publish("go", key=key)
                states: Counter[str] = Counter()
                for run in runs:

                    async def over(run_id: str = run.id) -> bool:
                        return (await app.run(run_id).status()).ended

                    await until(over, 60, f"the end of {run.id} with FLOW_SEED={seed}")
                    states[(await app.run(run.id).status()).state] += 1
        finally:
            for command in (*workers, coordinator):
                command.process.kill()
                command.process.wait()
    assert states == {"done": FLOWS * 4 // 5, "dead": FLOWS // 5}, seed
    lines = effects.read_text().split("\n")[:-1]
    assert max(Counter(lines).values()) == 1, f"an effect twice under one epoch: seed {seed}"
    names = Counter({line.rpartition(" ")[0] for line in lines})
    kinds = Counter(name.split()[0] for name in names)
    assert kinds == {
        "first": FLOWS,
        "inner": FLOWS,
        "last": FLOWS,
        "undo-first": FLOWS // 5,
    }, seed


def _log(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.glob("command-*.log"))
