"""The delivery mode of a job changes between releases, while its runs wait for an attempt."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import Backoff, Holdfast
from holdfast.server import Server
from holdfast.status.dead import DeadFilter, DeadLetters
from tests.integration.support import (
    Seen,
    all_records,
    client_of,
    dead_letters,
    parked,
    queue_empty,
    until,
    working,
)


def _release(nats: Server, namespace: str, delivery: Any, seen: Seen, fails: bool) -> Holdfast:
    """One release of an app; its handler fails, or does not."""
    app = Holdfast("shop", nats_url=nats.url, namespace=namespace)
    retry = None if delivery == "at_most_once" else Backoff.list(["1s", "1s"])

    @app.job(delivery=delivery, retry=retry)
    async def work(n: int) -> None:
        seen.append((delivery, n))
        if fails:
            raise ValueError("not yet")

    return app


async def _parked_by(old: Holdfast, seen: Seen) -> None:
    """Three runs have failed once and wait; their worker is gone before they are due."""
    async with working(old, short_wait_seconds=0):
        await old.jobs["work"].enqueue_many(range(3))
        await seen.wait(3)
        await until(lambda: _parked(old, 3), 10, "three parked messages")


async def _parked(app: Holdfast, count: int) -> bool:
    return len(await parked(app)) == count


RECORDED = ["effectively_once", "at_least_once"]


@pytest.mark.parametrize("before", RECORDED)
async def test_run_that_has_begun_does_not_begin_again_at_most_once(
    nats: Server, namespace: str, seen: Seen, before: str
) -> None:
    """It is a dead letter that says why, and an operator may replay it."""
    await _parked_by(_release(nats, namespace, before, seen, fails=True), seen)
    new = _release(nats, namespace, "at_most_once", seen, fails=False)
    async with new, working(new):
        await until(lambda: _letters(new, 3), 20, "three dead letters")
        await until(lambda: queue_empty(new), 10, "an empty queue")
        assert len(seen) == 3, "each was started once, by the old release"
        assert {r.state for r in (await all_records(new)).values()} == {"dead"}
        assert all("may not start again" in d.headers["Hf-Error"] for d in await dead_letters(new))
        client = await client_of(new)
        await DeadLetters(client).replay(DeadFilter(job="work"))
        await seen.wait(6)
        await until(lambda: _all_done(new), 10, "their records")


@pytest.mark.parametrize("before", RECORDED)
@pytest.mark.parametrize("after", RECORDED)
async def test_waiting_run_goes_on_and_its_record_tells(
    nats: Server, namespace: str, seen: Seen, before: str, after: str
) -> None:
    """Each is started once more; no record is left that says it waits."""
    await _parked_by(_release(nats, namespace, before, seen, fails=True), seen)
    new = _release(nats, namespace, after, seen, fails=False)
    async with new, working(new):
        await seen.wait(6, 20)
        await until(lambda: queue_empty(new), 10, "an empty queue")
        await until(lambda: _all_done(new), 10, "records that are done, or none")
        assert sorted(seen[3:]) == [(after, n) for n in range(3)]
        assert len(await all_records(new)) == (0 if before == after == "at_least_once" else 3)
        assert not await dead_letters(new)


async def _letters(app: Holdfast, count: int) -> bool:
    return len(await dead_letters(app)) == count


async def _all_done(app: Holdfast) -> bool:
    return {r.state for r in (await all_records(app)).values()} <= {"done"}
