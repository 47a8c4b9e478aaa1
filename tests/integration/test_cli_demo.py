"""`holdfast demo`: it shows crashes, loses nothing, and leaves nothing behind."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.integration.command import Command, gone, watched


def temporary(folder: Path) -> dict[str, str]:
    return {"TMPDIR": str(folder)}


async def test_demo_survives_kills_and_ends_by_itself(tmp_path: Path) -> None:
    """Workers are killed, their runs go on, and every accepted run is accounted for."""
    arguments = ("demo", "--seconds", "10", "--kill-every", "3")
    with Command(*arguments, folder=tmp_path, env=temporary(tmp_path)) as demo:
        await demo.says("kill -9 worker")
        assert await demo.ended(60) == 0
    last = demo.text.splitlines()[-2 if "keeps it" in demo.text.splitlines()[-1] else -1]
    found = re.fullmatch(
        r"accepted (\d+), ended (\d+), under way \d+, workers killed (\d+), lost: 0", last
    )
    assert found, demo.text
    assert int(found[1]) > 20
    assert int(found[2]) > 10
    assert int(found[3]) >= 1
    assert "Traceback" not in demo.text
    assert not list(tmp_path.glob("holdfast-*")), "its temporary files are gone"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_demo_stops_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    """A signal stops traffic, workers and server; no process and no file is left."""
    with Command("demo", folder=tmp_path, env=temporary(tmp_path)) as demo:
        await demo.says("lost: 0", count=2)
        with watched(*await demo.children()) as children:
            assert len(children) >= 2
            demo.signal(number)
            assert await demo.ended() == 0
            await gone(children)
    assert "Traceback" not in demo.text
    assert not list(tmp_path.glob("holdfast-*"))
