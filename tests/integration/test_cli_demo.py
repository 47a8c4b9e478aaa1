"""`holdfast demo`: it shows faults, loses nothing, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import re
import signal
import urllib.request
from pathlib import Path

import pytest

from holdfast import Holdfast
from holdfast.cli.demo import Tally
from holdfast.client import Client
from tests.integration.command import Command, gone, watched
from tests.support import until

TOTALS = re.compile(r"^accepted (\d+), ended (\d+), .* killed (\d+), lost: 0$", re.MULTILINE)
LIMIT = 150.0
"""Ten processes start at once, on a machine that other tests use too."""


def start(folder: Path, *arguments: str) -> Command:
    return Command("demo", *arguments, folder=folder, env={"TMPDIR": str(folder)})


async def test_demo_shows_faults_and_loses_nothing(short_path: Path) -> None:
    """Its first line is where the pages are; workers are killed, agents answer, no run is lost."""
    with start(short_path, "--kill-every", "3") as demo:
        await demo.says("Ctrl-C stops everything.", limit=LIMIT)
        found = re.match(r"pages: +(http://\S+)", demo.text)
        assert found, demo.text
        await until(lambda: _answers(found[1]), LIMIT, "the pages")
        for line in ("kill -9 worker", "fleet: ping '*' returned by 2 agents", "lost: 0"):
            await demo.says(line, limit=LIMIT)
        with watched(*await demo.children()) as children:
            assert len(children) >= 6
            demo.signal(signal.SIGINT)
            assert await demo.ended(LIMIT) == 0, demo.text
            await gone(children)
    totals = TOTALS.search(demo.text)
    assert totals, demo.text
    assert min(map(int, totals.groups())) >= 1
    assert "Traceback" not in demo.text
    assert not list(short_path.glob("holdfast-*")), "its temporary files are deleted"


async def test_run_of_which_nothing_is_left_counts_as_lost(app: Holdfast) -> None:
    """At the end, a run with a message or a record is under way, and any other is lost."""

    @app.job
    async def charge(order: int) -> None: ...

    async with app:
        client = await app.backend()
        assert isinstance(client, Client)
        tally = Tally(app, client, lambda _: None)
        for order in (1, 2, 1):
            sent = await client.enqueue(charge.options(key=f"{order}").request(order))
            tally.accept(sent.run, "charge", sent.sequence)
        await client.drop_stored(client.broker.names.jobs, sent.sequence)
        await tally.conclude()
    assert (tally.under_way, tally.lost) == (1, 1)
    assert tally.summary.startswith("accepted 2, ended 0, under way 1 (done 0, retries 0, dead 0")


async def _answers(url: str) -> bool:
    try:
        with await asyncio.to_thread(urllib.request.urlopen, url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.parametrize("arguments", [("--seconds", "4"), ()])
async def test_demo_stops_cleanly(short_path: Path, arguments: tuple[str, ...]) -> None:
    """After --seconds and after SIGTERM, early ones too, no process and no file is left."""
    with start(short_path, *arguments) as demo:
        await demo.says("Ctrl-C stops everything.", limit=LIMIT)
        with watched(*await demo.children()) as children:
            if not arguments:
                demo.signal(signal.SIGTERM)
            assert await demo.ended(LIMIT) == 0, demo.text
            await gone(children)
    assert TOTALS.search(demo.text), demo.text
    assert "Traceback" not in demo.text
    assert not list(short_path.glob("holdfast-*"))
