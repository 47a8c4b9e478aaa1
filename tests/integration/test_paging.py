"""Runs page by page: every run once, whatever the filter, and no page walks for long."""

from __future__ import annotations

import asyncio

import pytest

from holdfast import Holdfast
from holdfast.config import RecordConfig
from holdfast.errors import InvalidInput
from holdfast.status import messages
from holdfast.status.listing import RunFilter, RunPages
from tests.integration.support import Seen, client_of, until, working


async def walk(pages: RunPages, wanted: RunFilter, limit: int) -> list[list[str]]:
    """The run ids of every page, by following the cursors."""
    found, cursor = [], ""
    while True:
        page = await pages.page(wanted, limit, cursor)
        found.append([info.run for info in page.runs])
        cursor = page.older
        if not cursor:
            return found


async def test_pages_show_every_run_once(app: Holdfast, seen: Seen) -> None:
    """Records, waiting and delayed runs together, newest first, none twice, none left out."""

    @app.job
    async def add(n: int) -> int:
        seen.append(n)
        return n

    @app.job(group="other")
    async def waits(n: int) -> None: ...

    async with working(app):
        done = [(await add.options(key=f"k{n}").enqueue(n)).id for n in range(23)]
        await seen.wait(23)
        queued = [(await waits.options(key=f"q{n}").enqueue(n)).id for n in range(9)]
        delayed = [(await waits.options(key=f"d{n}", delay="1h").enqueue(n)).id for n in range(7)]
        pages = RunPages(await client_of(app))
        await until(lambda: _count(pages, "done", 23), 10, "all runs done")
        found = await walk(pages, RunFilter(), 5)
        assert [len(page) for page in found] == [5] * 7 + [4]
        runs = [run for page in found for run in page]
        assert sorted(runs) == sorted(done + queued + delayed)
        assert [r for r in runs if r in queued] == queued[::-1]
        assert await walk(pages, RunFilter(state="delayed"), 4) == [
            delayed[:2:-1],
            delayed[2::-1],
        ]
        assert await walk(pages, RunFilter(prefix="k7"), 5) == [["add/k7"]]


async def _count(pages: RunPages, state: str, wanted: int) -> bool:
    return len((await pages.page(RunFilter(state=state), 100)).runs) == wanted


async def test_page_looks_a_bounded_way_and_says_how_far(app: Holdfast, seen: Seen) -> None:
    """A filter that matches one old run finds it in parts; each part says where it ended."""

    @app.job
    async def add(n: int) -> int:
        seen.append(n)
        return n

    async with working(app):
        await add.options(key="wanted").enqueue(0)
        await seen.wait(1)
        pages = RunPages(await client_of(app), look=10)
        await until(lambda: _count(pages, "done", 1), 10, "the first run done")
        for n in range(1, 26):
            await add.options(key=f"other{n}").enqueue(n)
        await seen.wait(26)
        first = await pages.page(RunFilter(prefix="wanted"), 5)
        assert first.runs == []
        assert first.looked == 20  # ten records, and ten lines of history
        assert first.back_to > 0
        assert first.older
        assert [p for p in await walk(pages, RunFilter(prefix="wanted"), 5) if p] == [
            ["add/wanted"]
        ]


async def test_page_up_to_an_instant_starts_there(
    app: Holdfast, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What changed later is not read: yesterday's runs are on the first page."""
    monkeypatch.setattr(messages, "MARGIN_SECONDS", 0.0)

    @app.job
    async def add(n: int) -> int:
        seen.append(n)
        return n

    async with working(app, records=RecordConfig(keyless_ttl_seconds=1, dedup_window_seconds=0.5)):
        client = await client_of(app)
        pages = RunPages(client, look=10)
        first = await add.enqueue(0)
        await first.result(timeout=60)
        await until(lambda: _count(pages, "done", 1), 10, "the first run done")
        wanted = RunFilter(until=client.broker.server_now())
        for n in range(1, 40):
            await add.enqueue(n)
        await seen.wait(40)
        page = await pages.page(wanted, 5)
        assert ([info.run for info in page.runs], page.older) == ([first.id], "")


async def test_page_of_running_runs_finds_an_old_one_at_once(app: Holdfast, seen: Seen) -> None:
    """What began long ago is known to its node, however many have ended since."""
    gate = asyncio.Event()

    @app.job
    async def hold() -> None:
        seen.append("held")
        await gate.wait()

    @app.job
    async def add(n: int) -> None:
        seen.append(n)

    async with working(app, concurrency=4):
        run = await hold.options(key="long").enqueue()
        await seen.wait(1)
        for n in range(30):
            await add.enqueue(n)
        await seen.wait(31)
        pages = RunPages(await client_of(app), look=3)

        async def first() -> list[str]:
            return [i.run for i in (await pages.page(RunFilter(state="running"), 5)).runs]

        await until(lambda: _is(first, [run.id]), 15, "the held run on the first page")
        gate.set()


async def _is(first: object, wanted: list[str]) -> bool:
    return await first() == wanted  # type: ignore[operator]


@pytest.mark.parametrize(
    "text", ["x", "1-2", "1-2-3", "1-2-3-4-5", "-1-2-3", "1-2-١", "9" * 30 + "-1-1"]
)
async def test_cursor_that_is_nonsense_is_refused(app: Holdfast, text: str) -> None:
    """A cursor is what a page gave out, or it is refused with what to do."""
    async with app:
        pages = RunPages(await client_of(app))
        with pytest.raises(InvalidInput, match="start from the newest page"):
            await pages.page(RunFilter(), 5, text)
