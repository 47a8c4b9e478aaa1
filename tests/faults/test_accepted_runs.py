"""A job that was accepted runs, whatever dies in between."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.app import Holdfast
from holdfast.client.run import Request
from holdfast.errors import BrokerError
from holdfast.server import Server
from tests.faults.effects import Effects
from tests.faults.processes import WorkerProcess, until, worker_fleet

RUNS = 2_000
DUPLICATES = 200
WINDOW_SECONDS = 8


class Sent(NamedTuple):
    """One accepted enqueue."""

    run: str
    began: float
    answered: float
    duplicate: bool


class Outage(NamedTuple):
    """When the server was killed, and when it was back."""

    began: float
    ended: float


async def _accept(app: Holdfast, request: Request, sent: list[Sent]) -> None:
    """Enqueue as a caller would: again, with the same key, until it is accepted."""
    began = time.monotonic()
    while True:
        try:
            [run] = await app.enqueue_many([request])
        except BrokerError:
            await asyncio.sleep(0.1)
            continue
        sent.append(Sent(run.id, began, time.monotonic(), run.duplicate))
        return


@pytest.mark.timeout(400)
async def test_runs_survive_kills_of_workers_and_server(
    tmp_path: Path,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    report: Callable[[str], None],
) -> None:
    """2,000 runs, 10 % repeated keys, workers and server killed -9: every key exactly once."""
    dice = random.Random(7)
    keys = [f"k{n}" for n in range(RUNS - DUPLICATES)]
    early = dice.sample(keys, DUPLICATES // 2)
    late = dice.sample(keys, DUPLICATES - len(early))
    monkeypatch.setenv("EFFECTS", str(tmp_path / "effects"))
    monkeypatch.setenv("HOLDFAST_RECORD_DEDUP_WINDOW_SECONDS", str(WINDOW_SECONDS))
    monkeypatch.setenv("HOLDFAST_WORKER_CONCURRENCY", "6")
    monkeypatch.setenv("HOLDFAST_WORKER_CRASH_LIMIT", "20")
    effects = Effects(tmp_path / "effects")
    with Server(store=tmp_path / "store") as server:
        app, job = _sender(server.url, namespace)
        with worker_fleet(4, server.url, namespace, tmp_path) as fleet:
            sent: list[Sent] = []
            wanted = [job(k) for k in keys + early]
            kills, outage = await _storm(server, fleet, dice, wanted, sent, app)
            suppressed = sum(s.duplicate for s in sent)
            pairs = _remembered(sent, outage)
            await until(lambda: effects.count() >= len(keys), 120, "every key's effect")
            repeats = await _late_repeats(fleet, app, [job(k) for k in late])
            await app.close()
    starts = effects.starts_per_run()
    extra = sum(starts.values()) - len(starts)
    report(
        f"{RUNS} runs, {kills} workers and the server killed: {effects.count()} effects, "
        f"{extra} extra starts, {suppressed} repeats suppressed at publish, {repeats} at claim"
    )
    assert sorted(e["key"] for e in effects.done()) == sorted(keys)
    assert len(starts) == len(keys)
    assert extra <= kills * 6 + 4 * 6
    assert pairs
    assert all(first.duplicate or second.duplicate for first, second in pairs)
    _check_epochs(effects)


def _remembered(sent: list[Sent], outage: Outage) -> list[tuple[Sent, Sent]]:
    """The repeats that the server had to recognise by their message id.

    It remembers ids for the window only. When it is killed it also forgets those of runs that have
    ended, because their messages are gone; the claim recognises such a repeat. How many there are
    depends on how much was sent before the kill, hence on the machine.
    """
    by_run: dict[str, list[Sent]] = {}
    for one in sent:
        by_run.setdefault(one.run, []).append(one)
    pairs = [(found[0], found[1]) for found in by_run.values() if len(found) == 2]
    return [pair for pair in pairs if _in_one_life(*pair, outage)]


def _in_one_life(first: Sent, second: Sent, outage: Outage) -> bool:
    began = min(first.began, second.began)
    answered = max(first.answered, second.answered)
    undisturbed = answered < outage.began or began > outage.ended
    return undisturbed and answered - began < WINDOW_SECONDS


def _sender(url: str, namespace: str):  # type: ignore[no-untyped-def]
    app = Holdfast("sender", nats_url=url, namespace=namespace)

    @app.job
    async def work(key: str, seconds: float) -> str:
        raise AssertionError("only sent here")

    return app, lambda key: work.options(key=key).request(key=key, seconds=0.03)


async def _storm(
    server: Server,
    fleet: list[WorkerProcess],
    dice: random.Random,
    requests: list[Request],
    sent: list[Sent],
    app: Holdfast,
) -> tuple[int, Outage]:
    """Send everything while workers die every so often and the server dies in the middle."""
    kills = 0
    outage = Outage(0.0, 0.0)
    dice.shuffle(requests)
    for worker in fleet:
        await worker.ready()
    sending = asyncio.create_task(_send_all(app, requests, sent))
    for step in range(12):
        await asyncio.sleep(dice.uniform(0.3, 0.9))
        if step == 6:
            began = time.monotonic()
            server.kill()
            await asyncio.sleep(1.0)
            await asyncio.to_thread(server.restart)
            outage = Outage(began, time.monotonic())
        else:
            dice.choice(fleet).replace()
            kills += 1
    await sending
    return kills, outage


async def _send_all(app: Holdfast, requests: list[Request], sent: list[Sent]) -> None:
    gate = asyncio.Semaphore(20)

    async def one(request: Request) -> None:
        async with gate:
            await _accept(app, request, sent)

    await asyncio.gather(*(one(r) for r in requests))


async def _late_repeats(fleet: list[WorkerProcess], app: Holdfast, requests: list[Request]) -> int:
    """Repeat keys after the server has forgotten their message ids: the claim must know them."""
    for worker in fleet:
        await worker.ready()
    await asyncio.sleep(WINDOW_SECONDS + 1)
    before = _dropped(fleet)
    sent: list[Sent] = []
    await _send_all(app, requests, sent)
    stored = sum(not s.duplicate for s in sent)
    await until(lambda: _dropped(fleet) - before >= stored, 60, "late repeats dropped")
    return _dropped(fleet) - before


def _dropped(fleet: list[WorkerProcess]) -> int:
    return sum(worker.text().count("it has ended: drop the message") for worker in fleet)


def _check_epochs(effects: Effects) -> None:
    """Later starts of a run have higher epochs."""
    last: dict[str, int] = {}
    for start in effects.starts():
        assert start["epoch"] > last.get(start["run"], 0), start
        last[start["run"]] = start["epoch"]
