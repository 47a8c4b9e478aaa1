"""A rollout, drilled on one machine as Kubernetes does it: start new, wait ready, SIGTERM old.

Every role in turn, while runs and slots keep coming. Effects are written outside the system, one
line for each attempt, so that what was lost, missed or repeated can be counted.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from holdfast import Holdfast
from holdfast.names import parse_slot_run
from holdfast.server import Server
from tests.integration.command import Command, ask, free_port, ready
from tests.support import until

ROUNDS = 10 if os.environ.get("HOLDFAST_SOAK") else 1
PACE_SECONDS = 0.05
READY_SECONDS = 90

APP = """
import asyncio
import os
from pathlib import Path

from holdfast import Context, Holdfast

app = Holdfast("rolled")
effects = Path(os.environ["EFFECTS"])


def write(name: str, ctx: Context) -> None:
    with (effects / f"{name}.txt").open("a") as file:
        file.write(f"{ctx.run} {ctx.attempt}\\n")


@app.job
async def work(number: int, ctx: Context) -> None:
    await asyncio.sleep(0.3)
    write("work", ctx)


@app.every("1s", overlap="allow")
async def tick(ctx: Context) -> None:
    write("tick", ctx)
"""

ROLES = {
    "control": ["control", "rolled:app"],
    "worker": ["worker", "rolled:app", "--concurrency", "20", "--grace", "20s"],
    "web": ["web", "--host", "127.0.0.1", "--port", "0"],
    "agent": ["agent", "--id", "host"],
}


class Role:
    """The pods of one role: as many as there are, each with its health port."""

    def __init__(self, name: str, folder: Path, env: dict[str, str], stack: AsyncExitStack) -> None:
        self.name = name
        self._folder = folder
        self._env = env
        self._stack = stack
        self.running: list[tuple[Command, int]] = []

    async def start(self) -> None:
        """One more, ready."""
        port = free_port()
        words = [*ROLES[self.name], "--health-port", str(port)]
        new = Command(*words, folder=self._folder, cwd=self._folder, env=self._env)
        self._stack.enter_context(new)
        self.running.append((new, port))
        try:
            await ready(port, READY_SECONDS)
        except AssertionError:
            raise AssertionError(f"{self.name} is not ready:\n{new.text}") from None

    async def stop_oldest(self) -> None:
        """SIGTERM to the oldest; it ends well, and by itself."""
        old, _ = self.running.pop(0)
        old.signal(signal.SIGTERM)
        assert await old.ended() == 0, old.text

    async def replace(self) -> None:
        """Replace every pod by a new one, without a gap.

        Two agents of one id cannot run side by side: a DaemonSet stops the old one first.
        """
        for _ in range(len(self.running)):
            if self.name == "agent":
                await self.stop_oldest()
                await self.start()
            else:
                await self.start()
                await self.stop_oldest()
                status, _ = await ask(self.running[-1][1], "/health/ready")
                assert status == 200


def effects(folder: Path, name: str) -> list[tuple[str, int]]:
    """Run and attempt of each effect."""
    path = folder / f"{name}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(run, int(attempt)) for run, attempt in (line.split() for line in lines)]


async def send(app: Holdfast, sent: list[str], stop: asyncio.Event) -> None:
    """Runs without an end."""
    while not stop.is_set():
        run = await app.jobs["work"].enqueue(len(sent))
        sent.append(run.id)
        await asyncio.sleep(PACE_SECONDS)


async def test_rollout_of_every_role_misses_nothing(
    nats: Server, namespace: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """Under load: 0 missed slots, 0 lost runs, 0 extra attempts, and every old process exits 0."""
    (tmp_path / "rolled.py").write_text(APP)
    env = {
        "HOLDFAST_NATS_URL": nats.url,
        "HOLDFAST_NAMESPACE": namespace,
        "EFFECTS": str(tmp_path),
    }
    app = Holdfast("rolled", nats_url=nats.url, namespace=namespace)

    @app.job
    async def work(number: int) -> None: ...

    sent: list[str] = []
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        roles = [Role(name, tmp_path, env, stack) for name in ROLES]
        async with asyncio.TaskGroup() as starting:
            for role in roles:
                starting.create_task(role.start())
        async with app:
            await until(lambda: effects(tmp_path, "tick"), what="the first slot")
            sending = asyncio.create_task(send(app, sent, stop))
            for _ in range(ROUNDS):
                for role in roles:
                    await role.replace()
            stop.set()
            await sending
            await until(lambda: len(effects(tmp_path, "work")) >= len(sent), what="every run")
            last = len(effects(tmp_path, "tick"))
            await until(lambda: len(effects(tmp_path, "tick")) >= last + 2, what="two more slots")
        fleet = Command("fleet", "run", "host", "ping", folder=tmp_path, cwd=tmp_path, env=env)
        with fleet:
            assert await fleet.ended() == 0, fleet.text
    done, slots = effects(tmp_path, "work"), effects(tmp_path, "tick")
    assert Counter(run for run, _ in done) == Counter(sent), "lost or repeated runs"
    assert {attempt for _, attempt in done + slots} == {1}, "extra attempts"
    fired = sorted(found[1] for run, _ in slots if (found := parse_slot_run(run)))
    assert len(fired) == len(set(fired)) == len(slots), "repeated slots"
    assert _missing(fired) == [], "missed slots"
    report(f"{ROUNDS} rollouts of {len(roles)} roles: {len(sent)} runs, {len(slots)} slots")


def _missing(fired: list[str]) -> list[int]:
    """Seconds between the first and the last slot that have none."""
    from datetime import UTC, datetime

    seconds = [
        int(datetime.strptime(text, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp())
        for text in fired
    ]
    return sorted(set(range(seconds[0], seconds[-1] + 1)) - set(seconds))
