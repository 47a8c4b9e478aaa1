"""A run that has ended, once more: run again, edited, or copied as something that sends it."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from holdfast import Backoff, Context, Holdfast
from holdfast.errors import DuplicateRun, InvalidPayload, RunError
from holdfast.status.actions import retry_run
from holdfast.status.copies import copies_of
from holdfast.status.operators import Operator
from holdfast.status.runs import Runs
from tests.integration.cli_support import environment, holdfast, run_command
from tests.integration.support import Seen, client_of, dead_letter, until, working


class Order(BaseModel):
    id: int
    note: str = ""


@pytest.fixture
def shop(app: Holdfast, seen: Seen) -> Holdfast:
    @app.job(key="id")
    async def charge(ctx: Context, order: Order) -> int:
        seen.append((ctx.run, order.id, order.note))
        return order.id

    @app.job(key=lambda page, lang: f"{page}:{lang}")
    async def ocr(ctx: Context, page: int, lang: str = "en") -> str:
        seen.append((ctx.run, page, lang))
        return lang

    @app.job(retry=Backoff.never())
    async def mail(ctx: Context, to: str, text: str = "it's", password: str = "") -> str:
        seen.append((to, text, ctx.headers.get("Trace", "")))
        if to == "nobody":
            raise ValueError("no such person")
        return to

    return app


async def operator(app: Holdfast) -> Operator:
    client = await client_of(app)
    return Operator(client, "ada")


async def ended(app: Holdfast, job: str, *args: Any, **kwargs: Any) -> str:
    run = await app.jobs[job].enqueue(*args, **kwargs)
    await run.result(60)
    return run.id


async def test_run_of_a_job_that_computes_its_key_runs_again(
    app: Holdfast, shop: Holdfast, seen: Seen
) -> None:
    """Its key would recognise a new run as a repeat, so it is replaced under its own id."""
    async with app, working(app):
        by = await operator(app)
        for run in (await ended(app, "charge", Order(id=7)), await ended(app, "ocr", 1)):
            said = await retry_run(by, run)
            assert said == "its payload was sent again, under the same id"
            await until(lambda run=run: [s[0] for s in seen].count(run) == 2, 30, run)
            assert await app.run(run).result(60) in (7, "en")


async def test_edited_payload_never_replaces_another_run(
    app: Holdfast, shop: Holdfast, seen: Seen
) -> None:
    """The same key replaces the run, a new one makes a run, another run's is refused."""
    async with app, working(app):
        by = await operator(app)
        run = await ended(app, "charge", Order(id=7))
        await ended(app, "charge", Order(id=8))
        same = await retry_run(by, run, b'{"id": 7, "note": "again"}')
        assert same == "the edited payload was sent, under the same id"
        await until(lambda: ("charge/7", 7, "again") in seen, 30, "replaced")
        assert await app.run(run).result(60) == 7
        assert "as run charge/9" in await retry_run(by, run, b'{"id": 9}')
        with pytest.raises(DuplicateRun, match="charge/8 exists already"):
            await retry_run(by, run, b'{"id": 8}')
        with pytest.raises(InvalidPayload, match="'id' is missing"):
            await retry_run(by, run, b'{"note": "x"}')
        by_code = await ended(app, "ocr", 1)
        assert "drops the run if that key is known" in await retry_run(by, by_code, b'{"page": 2}')
        await until(lambda: ("ocr/2=3Aen", 2, "en") in seen, 30, "keyed by its worker")
    assert [s for s in seen if s[0] == "charge/8"] == [("charge/8", 8, "")]


async def test_dead_run_is_sent_again_with_another_payload(
    app: Holdfast, shop: Holdfast, seen: Seen
) -> None:
    """Under its own id; a run that has not ended is left alone."""
    async with app, working(app):
        by = await operator(app)
        run = await app.jobs["mail"].enqueue("nobody")
        await dead_letter(app, 30)
        said = await retry_run(by, run.id, b'{"to": "ada"}')
        assert said.endswith("was sent again with the edited payload")
        assert await run.result(60) == "ada"
        waiting = await app.jobs["mail"].options(delay="1h").enqueue("bob")
        with pytest.raises(RunError, match="has not ended"):
            await retry_run(by, waiting.id, b'{"to": "eve"}')


async def test_copies_send_the_run(
    app: Holdfast, shop: Holdfast, seen: Seen, tmp_path: Path
) -> None:
    """The command and the program work as printed, quotes included; curl's request is valid."""
    async with app, working(app):
        sender = app.jobs["mail"].options(headers={"Trace": "a b"})
        run = await sender.enqueue("ada", "don't; rm -rf 'x'")
        await run.result(60)
        command = (await holdfast(app, "runs", "copy", run.id)).out
        again = await run_command(*shlex.split(command)[1:], "--wait", env=environment(app))
        assert (again.code, again.out) == (0, '"ada"\n'), again.err
        program = (await holdfast(app, "runs", "copy", run.id, "--as", "python")).out
        await _executed(app, program, tmp_path)
        await until(lambda: len(seen) == 3, 30, "all three")
        curl = shlex.split((await holdfast(app, "runs", "copy", run.id, "--as", "curl")).out)
        body = json.loads(curl[curl.index("-d") + 1])
        payload = (await holdfast(app, "runs", "copy", run.id, "--as", "payload")).out
    assert seen == [("ada", "don't; rm -rf 'x'", "a b")] * 3
    assert curl[3] == "http://127.0.0.1:8080/api/v1/runs"
    assert body == {"job": "mail", "payload": json.loads(payload), "headers": {"Trace": "a b"}}


async def _executed(app: Holdfast, program: str, folder: Path) -> None:
    """Run a copied program beside a module that has the app."""
    (folder / "shop.py").write_text(
        "from holdfast import Holdfast\n"
        "app = Holdfast('shop')\n"
        "@app.job\n"
        "async def mail(to: str, text: str = '', password: str = '') -> str: ...\n"
    )
    (folder / "again.py").write_text(program.replace("YOUR_MODULE", "shop"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "again.py", cwd=folder, env=environment(app), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert out.split()[-1] == b"ada"


async def test_copies_of_a_job_that_computes_its_key_replace_its_run(
    app: Holdfast, shop: Holdfast, seen: Seen
) -> None:
    """Otherwise each of them would be dropped as a repeat."""
    async with app, working(app):
        run = await ended(app, "charge", Order(id=7))
        by = await operator(app)
        copied = await copies_of(by.client, await Runs(by.client).find(run))
        again = await run_command(*shlex.split(copied.cli)[1:], "--wait", env=environment(app))
        assert (again.code, again.out) == (0, "7\n"), again.err
    assert len(seen) == 2
    assert ".options(on_duplicate='replace')" in copied.python
    assert '"on_duplicate": "replace"' in copied.curl


async def test_runs_edit_opens_the_editor_and_sends(
    app: Holdfast, shop: Holdfast, seen: Seen, tmp_path: Path
) -> None:
    """What was saved is checked and sent; unchanged, or with a mistake, nothing is."""
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i "$EDIT" "$1"\n')
    editor.chmod(0o700)

    async def edit(run: str, sed: str) -> Any:
        env = environment(app) | {"VISUAL": str(editor), "EDIT": sed}
        return await run_command("runs", "edit", run, env=env)

    async with app, working(app):
        run = await ended(app, "mail", "ada")
        changed = await edit(run, "s/ada/bob/")
        assert changed.code == 0, changed.err
        await until(lambda: ("bob", "it's", "") in seen, 30, "the edited run")
        same = await edit(run, "s/nothing/else/")
        wrong = await edit(run, 's/"to"/"too"/')
        given = await holdfast(app, "runs", "edit", run, "--payload", '{"to": "eve"}')
        await until(lambda: len(seen) == 3, 30, "the given payload")
    assert (same.code, wrong.code, given.code) == (1, 1, 0)
    assert "nothing was changed, and nothing was sent" in same.err
    assert "did you mean 'to'?" in wrong.err
    assert seen[-1][0] == "eve"


async def test_enqueue_knows_the_keys_that_jobs_compute(
    app: Holdfast, shop: Holdfast, seen: Seen
) -> None:
    """From outside, too: a bare value, a replacement; code that only workers have is named."""
    async with app, working(app):
        await ended(app, "charge", Order(id=7))
        told = await holdfast(app, "enqueue", "charge", '{"id": 7}')
        assert (told.code, told.out) == (0, "charge/7\n")
        anew = await holdfast(app, "enqueue", "charge", '{"id": 7}', "--on-duplicate", "replace")
        assert (anew.code, anew.out) == (0, "charge/7\n"), anew.err
        await until(lambda: len(seen) == 2, 30, "replaced")
        keyless = await holdfast(app, "enqueue", "mail", '"x"', "--on-duplicate", "replace")
        code = await holdfast(app, "enqueue", "ocr", '{"page": 5}', "--wait")
        misspelt = await holdfast(app, "enqueue", "chrage", '{"id": 7}')
    assert (keyless.code, code.code, misspelt.code) == (1, 1, 0)
    assert "needs a key" in keyless.err
    assert "pass --key" in code.err
    assert "did you mean 'charge'?" in misspelt.err
    assert len(seen) == 2


async def test_key_without_its_job_is_told_how_to_write_it(app: Holdfast, shop: Holdfast) -> None:
    """A bare key may belong to any job."""
    async with app, working(app):
        ended = await holdfast(app, "runs", "show", "d2:ocr")
    assert ended.code == 1
    assert "named by its job and key: JOB/d2:ocr" in ended.err
