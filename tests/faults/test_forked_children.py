"""Children that a handler forked do not keep a dead process's connection alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from holdfast.broker import Broker
from holdfast.config import ConnectionConfig
from holdfast.errors import BrokerError, Unavailable
from holdfast.server import Server
from tests.faults.processes import until

PARENT = """
import asyncio, os, sys, time
from holdfast.broker import Broker
from holdfast.config import ConnectionConfig

async def main():
    broker = Broker(ConnectionConfig(nats_url=sys.argv[1]))
    await broker.open()

    async def answer(message):
        await broker.publish(message.reply, b"here")

    await broker.subscribe(sys.argv[2], answer)
    await broker.flush()
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    print(child, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_forked_child_does_not_keep_its_dead_parents_connection(
    nats: Server, namespace: str
) -> None:
    """The server closes the connection of a killed process although its forked child lives."""
    subject = f"{namespace}.forked"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, nats.url, subject], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    try:
        async with Broker(ConnectionConfig(nats_url=nats.url)) as broker:
            answer = await broker.request(subject, timeout=10)
            assert answer.body == b"here", "the parent still has its connection after the fork"
            parent.kill()
            parent.wait()

            async def nobody() -> bool:
                try:
                    await broker.request(subject, timeout=0.5)
                except Unavailable:
                    return True
                except BrokerError:
                    return False
                return False

            await until(nobody, 20, "the server to close the dead parent's connection")
            os.kill(child, 0)  # it lives
    finally:
        parent.kill()
        parent.wait()
        os.kill(child, signal.SIGKILL)
