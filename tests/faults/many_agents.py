"""Many agents' settings in one process, each with its own connection.

    python -m tests.faults.many_agents URL NAMESPACE FOLDER FIRST COUNT

Prints `ready` when all of them follow the server, and then, for each revision that has come into
force on all of them: its number, and when the first and the last of them had it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from holdfast.agent.settings import AgentSettings
from holdfast.broker import Broker
from holdfast.config import ConnectionConfig
from holdfast.identity.seed import AccountSeed
from holdfast.process import run_loop
from holdfast.settings.renderer import Renderer
from holdfast.settings.resolving import Snapshot

SEED = AccountSeed(bytes(range(32)))


def tell(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Tally:
    """When each revision took effect, and on how many agents."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._times: dict[int, list[float]] = {}

    def note(self, number: int) -> None:
        times = self._times.setdefault(number, [])
        times.append(time.time())
        if len(times) == self._count:
            tell(number, times[0], times[-1])


class Counted(AgentSettings):
    """An agent's settings that report to the tally; its values must all be of one revision."""

    tally: Tally

    def _put_into_force(self, snapshot: Snapshot) -> None:
        values = snapshot.values
        assert values["one"] == values["two"] == int(values["secret"].rpartition("-")[2]), values
        new = self._snapshot is None or self._snapshot.number != snapshot.number
        super()._put_into_force(snapshot)
        if new:
            self.tally.note(snapshot.number)


async def follow(url: str, namespace: str, folder: Path, first: int, count: int) -> int:
    renderer, tally = Renderer(), Tally(count)
    agents = []
    for n in range(first, first + count):
        broker = Broker(ConnectionConfig(nats_url=url, namespace=namespace))
        await broker.open(check=False)
        id = f"web{n}"
        facts = {"name": id, "os": "debian"}
        agent = Counted(
            broker, id, SEED.agent_keys(id), lambda f=facts: f, folder / id, renderer=renderer
        )
        agent.tally = tally
        agents.append(agent)
    runs = [asyncio.create_task(agent.run()) for agent in agents]
    tell("ready")
    await asyncio.gather(*runs)
    return 0


if __name__ == "__main__":
    url, namespace, folder, first, count = sys.argv[1:]
    run_loop(follow(url, namespace, Path(folder), int(first), int(count)))
