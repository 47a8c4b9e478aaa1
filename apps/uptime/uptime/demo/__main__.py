"""`make demo`: see that nothing is missed. Ctrl-C stops everything.

    python -m uptime.demo [--seconds N] [--kill-every N]

A few sites come and go, the monitor looks at each of them every two seconds, and one of its
processes is killed now and then. Each line says what happened; every few seconds an audit compares
what had to be checked with what was. Exit codes: 0, or 1 when the audit found something missing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from holdfast.process import handle_signals, run_loop
from uptime.app import app, states
from uptime.config import load
from uptime.demo.audit import Audit, Report
from uptime.demo.sites import Mood, Receiver, Site
from uptime.demo.stage import Stage
from uptime.record import DAY_SECONDS, Day, State
from uptime.service import Service

INTERVAL = 2
KILL_SECONDS = 15.0
SHOW_SECONDS = 5.0
SETTLE_SECONDS = 40.0
SITES: dict[str, tuple[str, list[Mood]]] = {
    "shop": ("Shop", ["up"]),
    "api": ("API", ["up", "broken"]),
    "search": ("Search", ["up", "slow"]),
    "mail": ("Mail gateway", ["up", "away"]),
}


def say(text: str) -> None:
    """One line, at once, also into a file."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
    sys.stdout.flush()


class Demo:
    """One showing."""

    def __init__(self, stage: Stage, seconds: float, kill_every: float) -> None:
        self._stage = stage
        self._seconds = seconds
        self._kill_every = kill_every
        self._stop = asyncio.Event()
        self._dice = random.Random()
        self._sites = {id: Site() for id in SITES}
        self._receiver = Receiver()
        self._audit = Audit(self._receiver)

    async def run(self) -> int:
        """From the first process to the last; returns the exit code."""
        handle_signals(self._stop.set)
        say("starting a NATS server, two schedulers, two workers and the pages")
        async with contextlib.AsyncExitStack() as stack:
            for site in (*self._sites.values(), self._receiver):
                await stack.enter_async_context(site)
            await stack.enter_async_context(self._stage)
            if not await self._or_stopped(self._stage.ready()):
                return 0
            async with app:
                await self._set_up()
                await self._play()
                return await self._end()

    async def _or_stopped(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Do something unless told to stop; whether it was done."""
        stop, doing = asyncio.create_task(self._stop.wait()), asyncio.create_task(work)
        done, _ = await asyncio.wait([stop, doing], return_when=asyncio.FIRST_COMPLETED)
        for task in (stop, doing):
            if task not in done:
                task.cancel()
        await asyncio.gather(stop, doing, return_exceptions=True)
        if doing in done:
            doing.result()
        return doing in done

    async def _set_up(self) -> None:
        service = Service(load())
        await service.set_channel({"id": "demo", "kind": "webhook", "target": self._receiver.url})
        for id, (name, _) in SITES.items():
            await states.put(id, State(days=made_up_days(random.Random(id))), expected=0)
            site = self._sites[id]
            await service.add(
                {
                    "id": id,
                    "name": name,
                    "target": f"127.0.0.1:{site.port}" if id == "mail" else site.url,
                    "kind": "tcp" if id == "mail" else "http",
                    "interval": INTERVAL,
                    "timeout": 1.5,
                    "slow_ms": 400,
                }
            )
        say(f"status page:  {self._stage.status_url}")
        if self._stage.dashboard_url:
            say(f"dashboard:    {self._stage.dashboard_url}")
        say(f"NATS:         {self._stage.server.url}")
        say(f"{len(SITES)} sites are checked every {INTERVAL} s; the days before today are made up")

    async def _play(self) -> None:
        tasks = [self._change_sites(), self._kill(), self._show(), self._tell()]
        running = [asyncio.create_task(task) for task in tasks]
        stop = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait(
                [stop, *running],
                timeout=self._seconds or None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                task.result()
        finally:
            for task in (stop, *running):
                task.cancel()
            await asyncio.gather(stop, *running, return_exceptions=True)

    # ---- what happens

    async def _change_sites(self) -> None:
        while True:
            await asyncio.sleep(self._dice.uniform(4, 8))
            id = self._dice.choice([id for id, (_, moods) in SITES.items() if len(moods) > 1])
            name, moods = SITES[id]
            site = self._sites[id]
            await site.become(moods[1] if site.mood == "up" else "up")
            say(f"{name} is {site.mood} now")

    async def _kill(self) -> None:
        if not self._kill_every:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(self._kill_every)
            if killed := self._stage.kill_one(self._dice):
                say(f"kill -9 {killed}")

    async def _tell(self) -> None:
        """Say what the monitor has told."""
        seen = 0
        while True:
            for told in self._receiver.told[seen:]:
                say(f"alert: {told.body['text']}")
            seen = len(self._receiver.told)
            await asyncio.sleep(0.2)

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(SHOW_SECONDS)
            say(str(await self._audit.look()))

    # ---- the end

    async def _end(self) -> int:
        """Let what is under way come to its end, and count."""
        if self._stop.is_set():
            return self._conclude(await self._audit.look())
        until, deadline = time.time(), time.monotonic() + SETTLE_SECONDS
        report = await self._audit.look(until)
        while not report.clean and time.monotonic() < deadline and not self._stop.is_set():
            await asyncio.sleep(0.5)
            report = await self._audit.look(until)
        return self._conclude(report)

    def _conclude(self, report: Report) -> int:
        kills = len(self._stage.kills)
        say(f"killed {kills} processes; {report}")
        for what in (*report.missed, *report.untold, *report.unknown_repeats):
            say(f"MISSING or repeated: {what}")
        return 0 if report.clean else 1


def made_up_days(dice: random.Random) -> tuple[Day, ...]:
    """Eighty-nine days of a site that is mostly well, so that the picture is not empty."""
    today = int(time.time()) // DAY_SECONDS
    days = []
    for day in range(today - 89, today):
        failed = dice.choice([0] * 24 + [3, 40, 90]) if dice.random() < 0.6 else 0
        days.append(Day(day, 1440 - failed, 0, failed))
    return tuple(days)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m uptime.demo", description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so many; 0: never")
    parser.add_argument(
        "--kill-every", type=float, default=KILL_SECONDS, help="seconds between kills; 0: none"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        stage = Stage(Path(folder), fixed_ports=True)
        return run_loop(Demo(stage, given.seconds, given.kill_every).run())


if __name__ == "__main__":
    sys.exit(main())
