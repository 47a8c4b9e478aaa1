"""Taskiq apps under rollouts, kills and wrong clocks: what was due is sent once, nothing is lost.

A short round runs with every build. `HOLDFAST_SOAK=1` runs ten minutes of schedulers and 10,000
tasks.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.broker import Broker
from holdfast.broker.wire import parse_headers
from holdfast.errors import BrokerError
from holdfast.integrations.taskiq import ResilientPullBroker
from holdfast.names import H_MSG_ID
from holdfast.server import Server
from tests.faults.scheduling import rounds
from tests.faults.taskiq_processes import TaskiqProcess, children
from tests.faults.taskiq_soak_app import SECONDS
from tests.faults.test_scheduler_clock import LIBRARIES
from tests.integration.taskiq_support import dead_letters, outside
from tests.support import until

Report = Callable[[str], None]
Slot = tuple[str, int]
AHEAD_SECONDS = 0.3
EPOCH = re.compile(r"leads \S+, epoch (\d+)")


class Fleet:
    """The two schedulers of one app; the clock of the second is ahead."""

    def __init__(self, app: str, prefer: str, url: str, namespace: str, root: Path, daily: str):
        self.app = app
        self._numbers = itertools.count()
        self._made = (url, namespace, root)
        self._env = {"TASKIQ_APP": app, "TASKIQ_PREFER": prefer, "TASKIQ_DAILY": daily}
        self.running = [self._start(ahead=False), self._start(ahead=True)]

    def _start(self, *, ahead: bool) -> TaskiqProcess:
        url, namespace, root = self._made
        library = next(path for path in LIBRARIES if Path(path).exists())
        faked = {
            "LD_PRELOAD": library,
            "FAKETIME": f"+{AHEAD_SECONDS}",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        env = self._env | (faked if ahead else {})
        log = root / f"{self.app}-{next(self._numbers)}.log"
        command = ["scheduler", "tests.faults.taskiq_soak_app:scheduler", "--log-level", "INFO"]
        return TaskiqProcess(command, url, namespace, log, **env)

    async def rollout(self) -> None:
        """Replace both, the new one first, as Kubernetes does."""
        for place, old in enumerate(self.running):
            new = self._start(ahead=place == 1)
            await new.ready()
            self.running[place] = new
            old.signal(signal.SIGTERM)
            assert await old.stopped() == 0, old.text()

    async def kill(self, dice: random.Random) -> None:
        """Kill the leader and start another in its place."""
        place = self._leader()
        await asyncio.sleep(dice.uniform(0, 1))
        self.running[place].kill()
        self.running[place] = self._start(ahead=place == 1)
        await self.running[place].ready()

    def _leader(self) -> int:
        """The one that said last that it leads."""
        epochs = [int("0" + "".join(EPOCH.findall(p.text())[-1:])) for p in self.running]
        return epochs.index(max(epochs))

    def close(self) -> None:
        for process in self.running:
            process.close()


async def slots(broker: Broker, stream: str) -> Counter[Slot]:
    """How often each slot is in a stream: rule, and window since 1970."""
    found: Counter[Slot] = Counter()
    start = 1
    while True:
        request = {"seq": start, "next_by_subj": f"{stream}_tasks"}
        try:
            message = (await broker.api(f"STREAM.MSG.GET.{stream}", request))["message"]
        except BrokerError:
            return found
        start = message["seq"] + 1
        rule = msgspec.json.decode(base64.b64decode(message["data"]))["args"][0]
        id = parse_headers(base64.b64decode(message["hdrs"]))[H_MSG_ID]
        found[rule, int(id.rpartition("x")[2])] += 1


def crons(begin: float, minutes: int) -> list[tuple[str, int]]:
    """A daily rule for each of the next minutes, and its minute since 1970."""
    first = datetime.fromtimestamp(begin, UTC).replace(second=0) + timedelta(minutes=1)
    made = [first + timedelta(minutes=n) for n in range(minutes)]
    return [(f"{at.minute} {at.hour} * * *", int(at.timestamp()) // 60) for at in made]


@pytest.mark.timeout(1800)
async def test_two_apps_send_each_slot_once(
    nats: Server, namespace: str, tmp_path: Path, report: Report
) -> None:
    """Rollouts and kills in turn, two apps on one NATS, clocks 300 ms apart."""
    dice, turns, pause = random.Random(17), rounds(1, 20), rounds(0, 12)
    daily = crons(time.time(), rounds(0, 10))  # the next minute is too far for a short round
    rule_names = ",".join(cron for cron, _ in daily)
    with ExitStack() as stack:
        made = (nats.url, namespace, tmp_path, rule_names)
        fleets = [Fleet("one", "duplicate", *made), Fleet("two", "gap", *made)]
        for fleet in fleets:
            stack.callback(fleet.close)
        for fleet in fleets:
            for process in fleet.running:
                await process.ready()
        began = time.time() + 2
        for turn in range(turns):
            fleet = fleets[turn % 2]
            await asyncio.sleep(pause)
            await fleet.rollout()
            await asyncio.sleep(pause)
            await fleets[(turn + 1) % 2].kill(dice)
        ended = int(max([time.time(), *(window * 60 + 2 for _, window in daily)]))
        wanted: set[Slot] = {
            (f"s{n}", window) for n in range(SECONDS) for window in range(int(began) + 1, ended)
        }
        wanted |= {(cron, window) for cron, window in daily if window * 60 > began}
        async with outside(nats.url, namespace) as broker:
            for fleet in fleets:

                async def complete(app: str = fleet.app) -> bool:
                    found = await slots(broker, f"{namespace}_{app}")
                    return max(window for rule, window in found if rule == "s0") > ended

                await until(complete, 120, "the end")
            stored = {f.app: await slots(broker, f"{namespace}_{f.app}") for f in fleets}
    for app, found in stored.items():
        missed = sorted(wanted - set(found))
        doubled = sorted(slot for slot, count in found.items() if count > 1)
        report(
            f"app {app}: {len(wanted)} slots ({len(daily)} daily), {len(missed)} missed, "
            f"{len(doubled)} doubled; {turns} rollouts and {turns} kills in both apps, "
            f"{ended - began:.0f} s"
        )
        assert not doubled, (app, doubled[:5])
        assert not missed, (app, missed[:5])


# ---- tasks


class Workers:
    """Two `taskiq worker`, each with one child that executes."""

    def __init__(self, url: str, namespace: str, root: Path) -> None:
        self._numbers = itertools.count()
        self._made = (url, namespace, root)
        self.effects = root / "effects"
        self.effects.mkdir()
        self.running = [self._start() for _ in range(2)]

    def _start(self) -> TaskiqProcess:
        url, namespace, root = self._made
        command = ["worker", "tests.faults.taskiq_soak_app:broker", "--workers", "1"]
        command += ["--ack-type", "when_saved", "--max-async-tasks", "20", "--log-level", "ERROR"]
        log = root / f"worker-{next(self._numbers)}.log"
        return TaskiqProcess(command, url, namespace, log, EFFECTS=str(self.effects))

    def kill(self, dice: random.Random) -> bool:
        """kill -9 of one that executes; its parent starts another."""
        process = dice.choice(self.running)
        found = [pid for pid in children(process.pid) if _is_receiver(pid)]
        if found:
            os.kill(found[0], signal.SIGKILL)
        return bool(found)

    async def rollout(self) -> None:
        """Replace both gently, the new one first."""
        for place, old in enumerate(self.running):
            new = self._start()
            await new.ready()
            self.running[place] = new
            old.signal(signal.SIGTERM)
            await old.stopped(60)

    def counts(self, name: str) -> Counter[int]:
        path = self.effects / name
        return (
            Counter(int(line) for line in path.read_text().split()) if path.exists() else Counter()
        )

    def close(self) -> None:
        for process in self.running:
            for child in children(process.pid):
                os.kill(child, signal.SIGKILL)
            process.close()


def _is_receiver(pid: int) -> bool:
    try:
        return b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.timeout(1800)
async def test_tasks_survive_kills_rollouts_and_a_server_kill(
    namespace: str, tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is lost, and none is given up without three attempts that were started."""
    count, kills, rollouts = rounds(300, 10_000), rounds(2, 12), rounds(1, 3)
    dice = random.Random(23)
    failing = set(range(0, count, 50))
    with Server(fast=True) as server, ExitStack() as stack:
        monkeypatch.setenv("TASKIQ_URL", server.url)
        workers = Workers(server.url, namespace, tmp_path)
        stack.callback(workers.close)
        for process in workers.running:
            await process.ready()
        sender = await _sender(server.url, namespace)
        try:
            await _send(sender, range(count // 2))
            events: list[Any] = ["kill"] * kills + ["rollout"] * rollouts + ["server"]
            dice.shuffle(events)
            sending = asyncio.create_task(_send(sender, range(count // 2, count), slowly=True))
            for event in events:
                await asyncio.sleep(dice.uniform(0.5, 1.5) * rounds(1, 4))
                if event == "kill":
                    await until(lambda: workers.kill(dice), 30, "somebody to kill")
                elif event == "rollout":
                    await workers.rollout()
                else:
                    server.kill()
                    await asyncio.to_thread(server.restart)
            await sending
            good = set(range(count)) - failing
            await until(lambda: good <= set(workers.counts("done")), 400, "all that succeed")

            async def given_up() -> bool:
                return len(await dead_letters(server.url, namespace)) >= len(failing)

            await until(given_up, 200, "all that fail")
            letters = await dead_letters(server.url, namespace)
        finally:
            await sender.shutdown()
        done, started = workers.counts("done"), workers.counts("started")
    dead = [msgspec.json.decode(letter.body)["args"][0] for letter in letters]
    early = [number for number in dead if started[number] < 3]
    again = sum(1 for n in done.values() if n > 1)
    report(
        f"{count} tasks, {kills} worker kills, {rollouts} rollouts, a NATS kill: {len(done)} done, "
        f"{len(set(dead))} dead as planned, 0 lost, {len(early)} dead before three starts, "
        f"{again} done more than once"
    )
    assert set(dead) == failing
    assert not early, early[:5]


async def _sender(url: str, namespace: str) -> Any:
    made = ResilientPullBroker(
        url, f"{namespace}_app_tasks", f"{namespace}_app", namespace=namespace
    )
    await made.startup()
    return made


async def _send(sender: Any, numbers: range, *, slowly: bool = False) -> None:
    async def step(number: int) -> None: ...

    task = sender.find_task("step") or sender.register_task(step, task_name="step")
    for begin in range(0, len(numbers), 50):
        for number in numbers[begin : begin + 50]:
            while True:
                try:
                    await task.kiq(number)
                    break
                except Exception:  # noqa: BLE001 - the server is away: a sender tries again
                    await asyncio.sleep(0.5)
        await asyncio.sleep(0.05 if slowly else 0)
