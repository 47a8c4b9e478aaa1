"""Transactions with rollbacks while everything is killed: runs = commits, each once, in order.

    python -m tests.faults.outbox_kills --transactions 10000

First writers and relays are killed, and Postgres crashes, while no worker runs: the queue must then
hold each committed row once, and the rows of a key in their order. Then workers are killed while
they execute: each row must have one effect, which is written under the run's id in Postgres.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from holdfast import Backoff, Holdfast, SyncContext
from holdfast.integrations import outbox
from holdfast.server import Server
from tests.integration.support import raw
from tests.postgres import Postgres

KEYS = 20
ROLLED_BACK = 0.3
"""Of the transactions: enough that each writer mixes both."""

app = Holdfast("outbox-kills")
engine = create_engine(os.environ.get("OUTBOX_DATABASE", "sqlite://"), pool_pre_ping=True)
relay = outbox.Relay(app, engine, batch=100)


# Postgres is killed while it runs: the default policy would wait for hours after the fifth time.
@app.job(retry=Backoff.exponential(first="100ms", last="2s", attempts=1000))
def effect(ctx: SyncContext, number: int) -> None:
    """Note the row; a repeated attempt of the same run notes it once."""
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO effects VALUES (:run, :number) ON CONFLICT DO NOTHING"),
            {"run": ctx.run, "number": number},
        )


def write(transactions: int) -> None:
    """One writer: commits, rolls back, and lives through crashes of Postgres."""
    while True:
        try:
            with Session(engine) as session:
                done = session.scalar(text("SELECT count(*) FROM written")) or 0
                if done >= transactions:
                    return
                key = f"key-{random.randrange(KEYS)}"
                # Transactions on one key follow each other, so that their rows have an order.
                session.execute(text("SELECT 1 FROM keys WHERE key = :k FOR UPDATE"), {"k": key})
                number = session.scalar(
                    text("INSERT INTO written (key) VALUES (:k) RETURNING number"), {"k": key}
                )
                outbox.ordered(key).enqueue(session, effect, number)
                if random.random() < ROLLED_BACK:
                    session.rollback()
                else:
                    session.commit()
        except SQLAlchemyError:
            time.sleep(0.05)


SCHEMA = f"""
CREATE TABLE written (number bigserial PRIMARY KEY, key text NOT NULL);
CREATE TABLE keys (key text PRIMARY KEY);
INSERT INTO keys SELECT 'key-' || n FROM generate_series(0, {KEYS - 1}) n;
CREATE TABLE effects (run text PRIMARY KEY, number bigint NOT NULL);
"""


class Story:
    """The processes of one run of this program."""

    def __init__(self, server: Server, namespace: str, postgres: Postgres) -> None:
        self.postgres = postgres
        self.server = server
        self.namespace = namespace
        self.kills: dict[str, int] = defaultdict(int)
        self._environment = {
            **os.environ,
            "OUTBOX_DATABASE": postgres.url,
            "HOLDFAST_NATS_URL": server.url,
            "HOLDFAST_NAMESPACE": namespace,
            "HOLDFAST_HEALTH_PORT": "0",
            "HOLDFAST_LOG_LEVEL": "error",
        }

    async def begin(self, *command: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", *command, env=self._environment, cwd=Path(__file__).parents[2]
        )

    def ask(self, query: str) -> list[Any]:
        """Rows of a query; waits while Postgres recovers from a crash."""
        while True:
            try:
                with psycopg.connect(self.postgres.conninfo) as connection:
                    return connection.execute(query).fetchall()
            except psycopg.OperationalError:
                time.sleep(0.05)

    async def kill_until(self, over: Any, roles: dict[str, list[str]], most: int) -> None:
        """Keep a process of each role running, and kill one after another, `most` times."""
        running = {role: await self.begin(*command) for role, command in roles.items()}
        victims = [*roles, "postgres"]
        killed = 0
        while not over():
            await asyncio.sleep(random.uniform(0.3, 1.0))
            if killed >= most:
                continue
            killed += 1
            victim = random.choice(victims)
            self.kills[victim] += 1
            if victim == "postgres":
                self.postgres.kill()
                await asyncio.to_thread(self.postgres.start)
                continue
            if running[victim].returncode is None:
                running[victim].kill()
            await running[victim].wait()
            running[victim] = await self.begin(*roles[victim])
        for process in running.values():
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def tell(story: Story, transactions: int, kills: int) -> dict[str, Any]:
    """Run both parts and check them; returns what was seen."""
    with psycopg.connect(story.postgres.conninfo) as connection:
        connection.execute(SCHEMA)
    database = create_engine(story.postgres.url)
    outbox.create(database)
    database.dispose()
    me = "tests.faults.outbox_kills"
    writer, relaying = [me, "--write", str(transactions)], ["holdfast", "relay", f"{me}:relay"]
    roles = {"writer-1": writer, "writer-2": writer, "relay-1": relaying, "relay-2": relaying}

    def relayed() -> bool:
        written, waiting = story.ask(
            "SELECT (SELECT count(*) FROM written), (SELECT count(*) FROM holdfast_outbox)"
        )[0]
        return bool(written >= transactions and not waiting)

    await story.kill_until(relayed, roles, kills)
    rows = story.ask("SELECT number, key FROM written ORDER BY number")
    queue = await _queue(story)
    assert sorted(queue) == [number for number, _ in rows], "each committed row once in the queue"
    keys = dict(rows)
    for key in {key for _, key in rows}:
        own = [number for number in queue if keys[number] == key]
        assert own == sorted(own), f"the rows of {key} in their order"
    working = ["holdfast", "worker", f"{me}:app"]

    def executed() -> bool:
        return bool(story.ask("SELECT count(*) FROM effects")[0][0] >= len(rows))

    await story.kill_until(executed, {"worker-1": working, "worker-2": working}, kills)
    effects = [number for (number,) in story.ask("SELECT number FROM effects ORDER BY number")]
    assert effects == [number for number, _ in rows], "one effect for each committed row"
    return {"committed": len(rows), "queued": len(queue), "effects": len(effects)} | story.kills


async def _queue(story: Story) -> list[int]:
    """The payloads in the queue, in the order of the stream."""
    found = []
    async with raw(story.server) as (_, jetstream):
        name = next(
            info.config.name
            for info in await jetstream.streams_info()
            if info.config.name and info.config.name.endswith("JOBS")
        )
        state = (await jetstream.stream_info(name)).state
        for sequence in range(state.first_seq, state.last_seq + 1):
            message = await jetstream.get_msg(name, sequence)
            found.append(int(message.data or b"0"))
    return found


async def _main(transactions: int) -> None:
    postgres = Postgres()
    postgres.start()
    try:
        with Server() as server:
            began = time.monotonic()
            seen = await tell(Story(server, "kills", postgres), transactions, transactions // 50)
            seen["seconds"] = round(time.monotonic() - began)
            sys.stdout.write(f"{json.dumps(seen)}\n")
    finally:
        postgres.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=10_000)
    parser.add_argument("--write", type=int, default=0, help="be a writer, until there are so many")
    given = parser.parse_args()
    if given.write:
        write(given.write)
    else:
        asyncio.run(_main(given.transactions))
