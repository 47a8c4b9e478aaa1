"""`holdfast dev`: the app as it is on the disk, on a server of its own, until Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

from holdfast import Holdfast
from holdfast.cli.dev import Changes
from tests.integration.command import Command, free_port, gone, watched
from tests.support import until

APP = """
from holdfast import Holdfast

app = Holdfast("shop", nats_url="nats://192.0.2.1:4222")  # not the one that dev runs

@app.job
async def answer() -> int:
    return {answer}

@app.job(group="other")
async def elsewhere() -> None: ...
"""


def write(folder: Path, text: str) -> None:
    """Write the app anew, as an editor does."""
    draft = folder / "draft"
    draft.write_text(text)
    draft.replace(folder / "shop.py")


def sender(url: str) -> tuple[Holdfast, Any]:
    app = Holdfast("sender", nats_url=url)

    @app.job
    async def answer() -> int:
        return 0

    return app, answer


def shows(url: str, words: str) -> bool:
    """Whether the jobs that the pages list are there."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/jobs", timeout=5) as found:
            return words in found.read().decode()
    except OSError:
        return False


async def test_dev_runs_what_is_on_the_disk(tmp_path: Path) -> None:
    """A change restarts the app; a broken one is shown and waited out; runs survive all of it."""
    write(tmp_path, APP.format(answer=1))
    url = f"nats://127.0.0.1:{(port := free_port())}"
    app, answer = sender(url)
    with Command("dev", "shop:app", "--port", str(port), folder=tmp_path, cwd=tmp_path) as dev:
        text = await dev.says("holdfast enqueue answer")
        assert f"export HOLDFAST_NATS_URL={url}" in text
        async with app:
            assert await (await answer.enqueue()).result(30) == 1
            await dev.says("group other")
            page = re.search(r"Pages: (http://127\.0\.0\.1:\d+)/", dev.text)
            assert page
            await until(lambda: shows(page[1], '"job":"answer"'), 40)
            write(tmp_path, APP.format(answer=2))
            await dev.says("shop.py changed: restarting")
            run = await answer.enqueue()
            assert await run.result(30) == 2
            write(tmp_path, "def broken(:\n")
            await dev.says("waiting for a change")
            waiting = await answer.enqueue()
            write(tmp_path, APP.format(answer=3))
            assert await waiting.result(30) == 3
        assert "SyntaxError: " in dev.text
        with watched(*await dev.children()) as children:
            dev.signal(signal.SIGINT)
            assert await dev.ended() == 0
            await gone(children)
    assert (tmp_path / ".holdfast" / "dev" / "jetstream").is_dir()
    assert (tmp_path / ".holdfast" / "dev" / ".gitignore").read_text() == "*\n"


async def test_dev_keeps_runs_over_its_own_end(tmp_path: Path) -> None:
    """What was accepted while the app was broken runs after the next `holdfast dev`."""
    write(tmp_path, "raise RuntimeError('not yet')")
    port = str(free_port())
    app, answer = sender(f"nats://127.0.0.1:{port}")
    with Command("dev", "shop:app", "--port", port, folder=tmp_path, cwd=tmp_path) as dev:
        await dev.says("waiting for a change")
        async with app:
            run = await answer.enqueue()
        dev.signal(signal.SIGTERM)
        assert await dev.ended() == 0
    write(tmp_path, APP.format(answer=4))
    arguments = ("dev", "shop:app", "--port", port, "--no-reload")
    with Command(*arguments, folder=tmp_path, cwd=tmp_path) as dev:
        app, _ = sender(f"nats://127.0.0.1:{port}")
        await dev.says("runs on nats://")
        async with app:
            backend = await app.backend()
            record = await backend.wait(run.id, 0, 30)
        assert bytes(record.result) == b"4"
        dev.signal(signal.SIGTERM)
        assert await dev.ended() == 0


async def test_dev_without_reload_ends_when_the_app_cannot_be_loaded(tmp_path: Path) -> None:
    """With nothing to wait for, the error is the end."""
    arguments = ("dev", "nowhere:app", "--port", "0", "--no-reload")
    with Command(*arguments, folder=tmp_path, cwd=tmp_path) as dev:
        assert await dev.ended() == 1
    assert "there is no module 'nowhere'" in dev.text


async def test_dev_ends_when_its_server_dies(tmp_path: Path) -> None:
    """Nothing works without it: exit code 1, with its last words."""
    write(tmp_path, APP.format(answer=1))
    arguments = ("dev", "shop:app", "--port", "0")
    with Command(*arguments, folder=tmp_path, cwd=tmp_path) as dev:
        await dev.says("group default")
        pids = await dev.children()
        (server,) = [p for p in pids if b"nats-server" in Path(f"/proc/{p}/cmdline").read_bytes()]
        os.kill(server, signal.SIGKILL)
        assert await dev.ended() == 1
    assert "the nats-server ended; its log ends with" in dev.text


async def test_changes_are_noticed_in_python_files_only(tmp_path: Path) -> None:
    """Virtual environments, hidden directories and other files do not restart anything."""
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    for folder in (".git", "node_modules", "env", "package"):
        (tmp_path / folder).mkdir(exist_ok=True)
    changes = Changes([tmp_path])
    for name in ("notes.txt", ".git/hook.py", "node_modules/x.py", "env/site.py"):
        (tmp_path / name).touch()
    (tmp_path / "package" / "new.py").touch()
    assert await changes.wait() == [tmp_path / "package" / "new.py"]
    (tmp_path / "package" / "new.py").unlink()
    assert await changes.wait() == [tmp_path / "package" / "new.py"]
