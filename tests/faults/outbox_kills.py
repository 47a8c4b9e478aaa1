"""Transactions with rollbacks while everything is killed: runs = commits, each once, in order.

    python -m tests.faults.outbox_kills --transactions 10000 --seed 7

First writers and relays are killed, and Postgres and NATS crash, while no worker runs: the queue
must then hold each committed row once, and the rows of a key in their order. Then workers are
killed while they execute: each row must have one effect, which is written under the run's id in
Postgres. At last every row is put back, as if its relay had died before it deleted it: no run that
has ended may run again.

`--seed` repeats the choice of victims and pauses; what is under way when they die still varies. It
fails when a part is not over after `--minutes`.
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
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psycopg
from nats.js import JetStreamContext
from sqlalchemy import create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from holdfast import Backoff, Holdfast, SyncContext
from holdfast.integrations import outbox
from holdfast.server import Server
from tests.integration.support import raw
from tests.postgres import Postgres

Over = Callable[[], Awaitable[bool]]

KEYS = 20
ROLLED_BACK = 0.3
"""Of the transactions: enough that each writer mixes both."""

app = Holdfast("outbox-kills")
engine = create_engine(os.environ.get("OUTBOX_DATABASE", "sqlite://"), pool_pre_ping=True)
relay = outbox.Relay(app, engine, batch=100)


# Postgres is killed while it runs: the default policy would wait for hours after the fifth time.
@app.job(retry=Backoff.exponential(first="100ms", last="2s", attempts=1000))
def effect(ctx: SyncContext, number: int) -> None:
    """Note the row; a repeated attempt of the same run counts."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO effects VALUES (:run, :number) "
                "ON CONFLICT (run) DO UPDATE SET times = effects.times + 1"
            ),
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
CREATE TABLE effects (
    run text PRIMARY KEY, number bigint NOT NULL, times bigint NOT NULL DEFAULT 1
);
"""
KEEP_SENT = """
CREATE TABLE sent (LIKE holdfast_outbox);
CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN INSERT INTO sent VALUES (OLD.*); RETURN OLD; END';
CREATE TRIGGER keep BEFORE DELETE ON holdfast_outbox FOR EACH ROW EXECUTE FUNCTION keep();
"""
PUT_BACK = """
DROP TRIGGER keep ON holdfast_outbox;
INSERT INTO holdfast_outbox SELECT * FROM sent ORDER BY id;
"""


class Story:
    """The processes of one run of this program."""

    def __init__(
        self, server: Server, namespace: str, postgres: Postgres, *, seed: int = 0, minutes: float
    ) -> None:
        self.random = random.Random(seed)
        self.seconds = 60 * minutes
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
                    asked = connection.execute(query)
                    return asked.fetchall() if asked.description else []
            except psycopg.OperationalError:
                time.sleep(0.05)

    async def kill_until(self, over: Over, roles: dict[str, list[str]], most: int) -> None:
        """Keep a process of each role running, and kill one after another, `most` times."""
        running = {role: await self.begin(*command) for role, command in roles.items()}
        victims = [*roles, "postgres", "nats"]
        killed = 0
        deadline = time.monotonic() + self.seconds
        try:
            while not await over():
                assert time.monotonic() < deadline, f"not over after {self.seconds / 60:g} minutes"
                await asyncio.sleep(self.random.uniform(0.3, 1.0))
                if killed < most:
                    killed += 1
                    await self._kill(self.random.choice(victims), running)
                for role, process in running.items():
                    if process.returncode:  # not 0: a writer ends when there is enough
                        running[role] = await self.begin(*roles[role])
        finally:
            for process in running.values():
                if process.returncode is None:
                    process.terminate()
                await process.wait()

    async def _kill(self, victim: str, running: dict[str, asyncio.subprocess.Process]) -> None:
        self.kills[victim.partition("-")[0]] += 1
        if victim in running:
            if running[victim].returncode is None:
                running[victim].kill()
            await running[victim].wait()
            return
        if victim == "postgres":
            self.postgres.kill()
            await asyncio.to_thread(self.postgres.start)
        else:
            self.server.kill()
            await asyncio.to_thread(self.server.restart)

    async def queued(self) -> int:
        """How many messages are in the queue."""
        async with raw(self.server) as (_, jetstream):
            return (await jetstream.stream_info(await _stream(jetstream))).state.messages


async def tell(story: Story, transactions: int, kills: int) -> dict[str, Any]:
    """Run the parts and check them; returns what was seen."""
    with psycopg.connect(story.postgres.conninfo) as connection:
        connection.execute(SCHEMA)
    database = create_engine(story.postgres.url)
    outbox.create(database)
    database.dispose()
    story.ask(KEEP_SENT)
    me = "tests.faults.outbox_kills"
    writer, relaying = [me, "--write", str(transactions)], ["holdfast", "relay", f"{me}:relay"]
    relays = {"relay-1": relaying, "relay-2": relaying}

    async def relayed() -> bool:
        written, waiting = story.ask(
            "SELECT (SELECT count(*) FROM written), (SELECT count(*) FROM holdfast_outbox)"
        )[0]
        return bool(written >= transactions and not waiting)

    await story.kill_until(relayed, {"writer-1": writer, "writer-2": writer, **relays}, kills)
    rows = story.ask("SELECT number, key FROM written ORDER BY number")
    queue = await _queue(story)
    assert sorted(queue) == [number for number, _ in rows], "each committed row once in the queue"
    keys = dict(rows)
    for key in {key for _, key in rows}:
        own = [number for number in queue if keys[number] == key]
        assert own == sorted(own), f"the rows of {key} in their order"
    working = ["holdfast", "worker", f"{me}:app"]

    workers = {"worker-1": working, "worker-2": working}

    async def executed() -> bool:
        return await relayed() and await story.queued() == 0

    await story.kill_until(executed, workers, kills)
    effects = story.ask("SELECT number, run, times FROM effects ORDER BY number")
    assert [row[0] for row in effects] == [row[0] for row in rows], "one effect for each commit"
    story.ask(PUT_BACK)
    await story.kill_until(executed, {**relays, **workers}, kills // 4)
    again = story.ask("SELECT number, run, times FROM effects ORDER BY number")
    assert again == effects, "no run that has ended runs again"
    seen = {"committed": len(rows), "queued": len(queue), "effects": len(effects)}
    return seen | {"sent again": len(again)} | story.kills


async def _queue(story: Story) -> list[int]:
    """The payloads in the queue, in the order of the stream."""
    found = []
    async with raw(story.server) as (_, jetstream):
        name = await _stream(jetstream)
        state = (await jetstream.stream_info(name)).state
        for sequence in range(state.first_seq, state.last_seq + 1):
            message = await jetstream.get_msg(name, sequence)
            found.append(int(message.data or b"0"))
    return found


async def _stream(jetstream: JetStreamContext) -> str:
    infos = await jetstream.streams_info()
    return next(i.config.name for i in infos if (i.config.name or "").endswith("JOBS"))  # type: ignore[return-value]


async def _main(transactions: int, kills: int, seed: int, minutes: float) -> None:
    postgres = Postgres()
    postgres.start()
    try:
        with Server() as server:
            began = time.monotonic()
            story = Story(server, "kills", postgres, seed=seed, minutes=minutes)
            seen = {"seed": seed} | await tell(story, transactions, kills)
            seen["seconds"] = round(time.monotonic() - began)
            sys.stdout.write(f"{json.dumps(seen)}\n")
    finally:
        postgres.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=10_000)
    parser.add_argument("--write", type=int, default=0, help="be a writer, until there are so many")
    parser.add_argument("--kills", type=int, default=150, help="in each of the first two parts")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--minutes", type=float, default=30, help="deadline of each part")
    given = parser.parse_args()
    if given.write:
        write(given.write)
    else:
        asyncio.run(_main(given.transactions, given.kills, given.seed, given.minutes))
