"""Publishers that die in the middle: an agent sees the old snapshot or the new one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.agent.settings import AgentSettings
from holdfast.identity.files import write_private
from holdfast.server import Server
from holdfast.settings.resolving import Snapshot
from tests.faults.processes import ROOT
from tests.integration.settings_support import World, following, world

SEED = bytes(range(32))
NEVER = 1_000_000
AGENTS = [f"web{n}" for n in range(3)]


def write_tree(w: World, number: int) -> None:
    """Two files and a secret that all tell the same number."""
    w.write(
        top="base: {'web*': [one, two]}\n",
        one=f"one: {number}\n",
        two=f"two: {number}\nsecret: !encrypted secret-number-{number}\n",
        **{name: "" for name in ("common", "db", "apt") if (w.folder / f"{name}.yaml").exists()},
    )


def number_of(values: dict[str, Any]) -> int:
    """The one number of a snapshot; a mixture has several."""
    numbers = {values["one"], values["two"], int(values["secret"].rpartition("-")[2])}
    assert len(numbers) == 1, f"a mixture: {values}"
    return int(numbers.pop())


def watched(w: World, agent: AgentSettings, seen: list[int]) -> AgentSettings:
    """Note every snapshot that an agent puts into force."""
    put = agent._put_into_force

    def note(snapshot: Snapshot) -> None:
        seen.append(number_of(snapshot.values))
        put(snapshot)

    agent._put_into_force = note  # type: ignore[method-assign]
    return agent


async def push(w: World, die_at: int, *words: str) -> int:
    """A real publisher in a process of its own; returns how it ended."""
    config = w.broker.config
    env = os.environ | {
        "HOLDFAST_NATS_URL": config.nats_url,
        "HOLDFAST_NAMESPACE": config.namespace,
        "DIE_AT": str(die_at),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.faults.dying_push", *words]
    command += ["--seed", str(w.root / "account.seed")]
    done = await asyncio.to_thread(subprocess.run, command, env=env, capture_output=True)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode


async def test_publisher_killed_at_every_step_leaves_no_mixture(
    nats: Server, namespace: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """kill -9 before each of its writes, every time on top of what the last one left behind.

    Agents that follow, and agents that start afresh at that moment, have one whole snapshot, and
    nothing is refused. In the end a push that lives brings everybody to its own.
    """
    async with world(nats, namespace, tmp_path) as w:
        write_private(tmp_path / "account.seed", SEED.hex().encode(), "seed", replace=False)
        seen: list[int] = []
        fleet = [watched(w, w.agent(id), seen) for id in AGENTS]
        write_tree(w, 0)
        await w.push(*AGENTS)
        async with following(*fleet):
            step, published = 0, 0
            while True:
                step += 1
                write_tree(w, step)
                code = await push(w, step, "settings", "push", str(w.folder))
                fresh = w.agent("web1")
                fresh._snapshot = None
                await fresh.refresh()
                found = number_of(dict(fresh.settings))
                assert found in (published, step)
                assert fresh.refused == 0, fresh.report
                published = found
                if code == 0:
                    break
            for agent in fleet:
                while number_of(dict(agent.settings)) != step:
                    await asyncio.sleep(0.02)
        assert step >= 6  # secrets, switch and tidying, each in two writes
        assert set(seen) <= set(range(step + 1))
        assert [agent.refused for agent in fleet] == [0, 0, 0]
        for id in AGENTS:
            versions = (await w.publisher.store.sealed(id)).boxes["two:secret"]
            assert len(versions) == 1
        report(f"killed at {step - 1} writes, {len(seen)} snapshots in force, 0 mixtures")


async def test_rotation_killed_at_every_step_can_be_repeated(
    nats: Server, namespace: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """Begin and finish: whatever was left, agents read, and the next try completes it."""
    async with world(nats, namespace, tmp_path) as w:
        write_private(tmp_path / "account.seed", SEED.hex().encode(), "seed", replace=False)
        write_tree(w, 0)
        fleet = [w.agent(id) for id in AGENTS]
        named = [word for id in AGENTS for word in ("--agent", id)]
        assert await push(w, NEVER, "settings", "push", str(w.folder), *named) == 0
        kills = 0
        for words in (["secrets", "rotate"], ["secrets", "rotate", "--finish"]):
            step, before = 1, await generations(w)
            while await push(w, step, *words) != 0:
                kills += 1
                for agent in fleet:
                    agent._rendered_from = None
                    await agent.refresh()
                    assert (number_of(dict(agent.settings)), agent.refused) == (0, 0)
                if await generations(w) != before:
                    break  # killed after the switch: it is done, only tidying is left
                step += 1
            for agent in fleet:
                await agent.refresh()
        await w.push()  # tidies
        assert await generations(w) == [2]
        for agent in fleet:
            await agent.refresh()
            assert (agent.report.generations, agent.refused) == ([2], 0)
            boxes = (await w.publisher.store.sealed(agent.agent)).boxes["two:secret"]
            assert [list(by) for by in boxes.values()] == [[2]]
        report(f"killed at {kills} writes")


async def generations(w: World) -> list[int]:
    from holdfast.settings.records import claimed

    data = await w.publisher.store.revision()
    assert data
    return claimed(data).generations
