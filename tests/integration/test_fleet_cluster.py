"""A fleet on three servers: replicated returns, one of each."""

from __future__ import annotations

from pathlib import Path

from holdfast.server import Cluster
from tests.fleet_world import World
from tests.support import until


async def test_fleet_run_on_three_servers(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    """Agents, dispatchers and sender on servers of their choice: all return, a repeat is known."""
    world = World(cluster, namespace, tmp_path)
    async with world, world.dispatcher(), world.dispatcher():
        await world.start_agents("web1", "web2", "web3")
        await until(lambda: _complete(world), 30, "an index that is complete")
        for n in range(3):
            record, returns = await world.run("*", "mark", f"m{n}")
            assert record.status == "complete"
            assert set(returns) == {"web1", "web2", "web3"}
            assert world.effects.of(f"m{n}") == dict.fromkeys(("web1", "web2", "web3"), 1)
        agent = world.agents["web1"]
        agent._commands._again(record.run, record.epoch)  # sends its return once more
        await until(lambda: not agent._outbox._under_way, 10, "a repeat that is known as stored")


async def _complete(world: World) -> bool:
    return all([len(await world.fleet.resolve("*")) == 3 for _ in range(4)])
