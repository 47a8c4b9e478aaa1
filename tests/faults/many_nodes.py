"""Many light nodes in one process, each with its own connection, which can be dropped.

    python -m tests.faults.many_nodes COUNT        (the connection is in the environment)

Prints `ready` when all are registered. Then it obeys lines on its standard input and answers each:

    drop COUNT     connections reset, which the nodes then make again     dropped COUNT
    kill           a node's connection reset for ever, its beats ended    killed NODE INSTANT
    connected      how many of those that live have a connection          connected COUNT of COUNT
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

from holdfast.broker import Broker
from holdfast.config import ConnectionConfig, load
from holdfast.ownership.membership import Membership
from holdfast.process import run_loop

OPENED_AT_ONCE = 10


@dataclass(eq=False)
class Light:
    """One node."""

    broker: Broker
    member: Membership
    beat: asyncio.Task[None]

    def reset(self) -> None:
        """Close its socket as the kernel does for a dead process."""
        transport: Any = self.broker._nc._transport
        if transport is not None and transport._io_writer is not None:
            transport._io_writer.transport.abort()

    def kill(self) -> None:
        self.beat.cancel()
        self.broker._nc.options["allow_reconnect"] = False
        self.broker._closing = True
        self.reset()


async def _open(turn: asyncio.Semaphore) -> Light:
    async with turn:
        broker = Broker(load(ConnectionConfig), name="light")
        await broker.open(check=False)
        member = Membership(broker, "worker", inbox=broker.pull_inbox)
        await member.start()
    return Light(broker, member, asyncio.create_task(member.heartbeat.run()))


def _tell(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def serve(count: int) -> int:
    turn = asyncio.Semaphore(OPENED_AT_ONCE)
    living = list(await asyncio.gather(*(_open(turn) for _ in range(count))))
    _tell("ready")
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    while line := (await lines.readline()).decode().split():
        if line[0] == "drop":
            chosen = random.sample(living, min(len(living), int(line[1])))
            for node in chosen:
                node.reset()
            _tell("dropped", len(chosen))
        elif line[0] == "kill":
            victim = living.pop(random.randrange(len(living)))
            at = time.monotonic()
            victim.kill()
            _tell("killed", victim.member.node, at)
        else:
            up = sum(1 for node in living if node.broker.connected)
            _tell("connected", up, "of", len(living))
    return 0


if __name__ == "__main__":
    sys.exit(run_loop(serve(int(sys.argv[1]))))
