"""`holdfast enqueue`: what is sent, what is printed, what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from holdfast import Backoff, Context, Discard, Holdfast
from holdfast.cli import build
from holdfast.cli.command import run_cli
from holdfast.cli.enqueue import tell_failures
from holdfast.cli.typed import read_payload
from holdfast.errors import InvalidInput, InvalidPayload
from holdfast.status.messages import oldest
from tests.integration.cli_support import holdfast
from tests.integration.support import Seen, client_of, working
from tests.support import until


@pytest.fixture
def shop(app: Holdfast, seen: Seen) -> Holdfast:
    @app.job(retry=Backoff.never())
    async def echo(ctx: Context, data: Any) -> Any:
        seen.append(data)
        if data == "bad":
            raise ValueError("no good")
        if data == "drop":
            raise Discard("not wanted")
        if data == "slow":
            await asyncio.sleep(60)
        return {"got": data}

    return app


async def queued(app: Holdfast) -> list[tuple[str, bytes, dict[str, str]]]:
    """What waits in the jobs stream: run, bytes, the user's headers."""
    client = await client_of(app)
    names = client.broker.names
    return [
        (kept.run, kept.body, kept.user_headers)
        async for kept in oldest(client.broker, names.jobs, f"{names.namespace}.job.>")
    ]


async def test_enqueue_sends_the_bytes_as_given(app: Holdfast, tmp_path: Path) -> None:
    """Argument, file and standard input arrive byte by byte; the run id is printed."""
    body = b'{ "id" :  42.50, "name": "\xc3\xa9" }'
    file = tmp_path / "payload.json"
    file.write_bytes(body)
    async with app:
        by_file = await holdfast(app, "enqueue", "echo", f"@{file}", "--header", "Trace=a=b")
        by_input = await holdfast(app, "enqueue", "echo", "-", stdin=body)
        empty = await holdfast(app, "enqueue", "echo", "--json")
        found = await queued(app)
    assert by_file.code == by_input.code == empty.code == 0
    assert found == [
        (by_file.out.strip(), body, {"Trace": "a=b"}),
        (by_input.out.strip(), body, {}),
        (empty.json["run"], b"", {}),
    ]
    assert "no worker has ever served job echo of group default" in by_file.err


async def test_enqueue_with_a_key_is_one_run(app: Holdfast, shop: Holdfast) -> None:
    """The same key again sends nothing new and says so; the id is the same."""
    async with app, working(app):
        first = await holdfast(app, "enqueue", "echo", "1", "--key", "a b")
        second = await holdfast(app, "enqueue", "echo", "1", "--key", "a b", "--json")
    assert first.out.strip() == "echo/a=20b"
    assert first.err == ""
    assert second.json == {
        "run": "echo/a=20b",
        "job": "echo",
        "group": "default",
        "duplicate": True,
        "state": second.json["state"],
    }
    assert second.json["state"] in ("queued", "running", "done")
    assert "accepted before" in second.err


async def test_enqueue_hints_at_the_group_that_serves_the_job(
    app: Holdfast, shop: Holdfast
) -> None:
    """A run that nobody will take is accepted, with a word about where the job is served."""
    async with app, working(app):
        ended = await holdfast(app, "enqueue", "echo", "1", "--group", "images")
    assert ended.code == 0
    assert "group images (it is served in group default)" in ended.err


@pytest.mark.parametrize(
    ("payload", "code", "out", "err"),
    [
        ('"x"', 0, '{"got":"x"}\n', ""),
        ('"bad"', 3, "", "dead: ValueError: no good"),
        ('"drop"', 4, "", "cancelled: discarded: not wanted"),
        ('"slow"', 124, "", "has not ended in time"),
    ],
)
async def test_enqueue_wait_tells_how_the_run_ended(
    app: Holdfast, shop: Holdfast, payload: str, code: int, out: str, err: str
) -> None:
    """Exit code 0 with the result, 3 failed, 4 cancelled, 124 not in time."""
    limit = "500ms" if "slow" in payload else "20s"
    async with app, working(app, grace_seconds=0.1):
        ended = await holdfast(app, "enqueue", "echo", payload, "--wait", "--timeout", limit)
    assert (ended.code, ended.out) == (code, out)
    assert err in ended.err


async def test_enqueue_wait_says_why_the_end_is_far_off(
    app: Holdfast, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that waits an hour for its second attempt does not keep a silent terminal open."""

    @app.job(retry=Backoff.list(["1h"]))
    async def flaky() -> None:
        raise ValueError("no good")

    said = ""

    async def told() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "an attempt failed: ValueError: no good; the next one starts in 1h" in said or (
            "an attempt failed: ValueError: no good; the next one starts in 59m" in said
        )

    async with app, working(app):
        run = await flaky.enqueue()
        telling = asyncio.create_task(tell_failures(await client_of(app), run.id))
        try:
            await until(told, 60, "a remark about the failed attempt")
        finally:
            telling.cancel()


async def test_enqueue_wait_as_json_carries_the_result(app: Holdfast, shop: Holdfast) -> None:
    """`--wait --json` is one document with state and result."""
    async with app, working(app):
        ended = await holdfast(app, "enqueue", "echo", "[1]", "--wait", "--json")
    assert (ended.json["state"], ended.json["result"]) == ("done", {"got": [1]})


async def test_enqueue_later_by_delay_or_time(app: Holdfast) -> None:
    """`--delay` and `--at` put the run off, `--at` in either form."""
    async with app:
        for when in (("--delay", "1h"), ("--at", "2099-01-01T00:00:00Z"), ("--at", "4000000000")):
            assert (await holdfast(app, "enqueue", "echo", "1", *when)).code == 0
        listed = await holdfast(app, "runs", "list", "--json", "--state", "delayed")
    assert len(listed.json) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a b", "1"), "job 'a b' is not usable"),
        (("a.*", "1"), "is not usable"),
        (("echo", "{"), "is not JSON"),
        (("echo", "\udcff"), "is not JSON"),
        (("echo", "@/no/such/file"), "cannot be read"),
        (("echo", "1", "--header", "Hf-Run=x"), "is reserved"),
        (("echo", "1", "--header", "A=b\r\nc: d"), "line breaks"),
        (("echo", "1", "--header", "plain"), "takes NAME=VALUE"),
        (("echo", "1", "--group", ">"), "group '>' is not usable"),
        (("echo", "1", "--key", ""), "key must be"),
        (("echo", "1", "--at", "2099-01-01T00:00:00"), "needs a time zone"),
        (("echo", "1", "--at", "tomorrow"), "is not a time"),
        (("echo", "1", "--at", "nan"), "since 1970"),
        (("echo", "1", "--delay", "-1"), "between 0 and 100 years"),
        (("echo", "1", "--delay", "1h", "--at", "5"), "not both"),
        (("echo", "1", "--wait", "--timeout", "soon"), "timeout 'soon' is not readable"),
    ],
)
def test_enqueue_refuses_with_one_line_before_it_connects(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad names, headers, times and payloads are told as such; nothing is sent."""
    assert run_cli(build(), ["enqueue", *arguments, "--nats-url", "nats://127.0.0.1:9"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert words in shown.err


async def test_enqueue_refuses_what_the_server_would_not_take(
    app: Holdfast, tmp_path: Path
) -> None:
    """A payload above the server's limit is refused, and says what to do instead."""
    large = tmp_path / "large.json"
    large.write_bytes(b'"' + b"x" * 1_048_576 + b'"')
    async with app:
        ended = await holdfast(app, "enqueue", "echo", f"@{large}")
        assert (ended.code, ended.out) == (1, "")
        assert "the limit is" in ended.err
        assert await queued(app) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NaN",
        "[Infinity]",
        "{'a': 1}",
        "01",
        "1 2",
        "\ufeff1",
        "[" * 100_000,
        '"\ud800"',
        "\x00",
    ],
)
def test_payload_that_is_not_json_is_refused(text: str) -> None:
    """Whatever is not JSON by the letter is refused before anything is sent."""
    with pytest.raises(InvalidPayload):
        read_payload(text)


def test_payload_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A directory, a missing file and an impossible name are told as such."""
    for name in (str(tmp_path), str(tmp_path / "none"), "a\x00b"):
        with pytest.raises(InvalidInput, match="cannot be read"):
            read_payload("@" + name)


async def test_payload_is_checked_against_what_workers_published(app: Holdfast) -> None:
    """A misspelt member is refused before anything is sent; `--no-check` sends it."""

    @app.job
    async def charge(id: int, email: str = "") -> int:
        return id

    async with app, working(app):
        wrong = await holdfast(app, "enqueue", "charge", '{"id": 1, "emial": "x"}')
        assert (wrong.code, wrong.out) == (1, "")
        assert "'emial' is unknown; did you mean 'email'? (job charge)" in wrong.err
        assert (await holdfast(app, "runs", "list")).out == ""
        good = await holdfast(app, "enqueue", "charge", '{"id": 1, "email": "x"}', "--wait")
        assert (good.code, good.out) == (0, "1\n")
        sent = await holdfast(app, "enqueue", "charge", '{"ID": 1}', "--no-check")
        assert sent.code == 0


async def test_forgotten_group_is_refused(app: Holdfast, namespace: str) -> None:
    """The run would wait for a worker that never comes; `--no-check` sends it all the same."""

    @app.job(group="gpu")
    async def render(id: int) -> int:
        return id

    async with app, working(app, group="gpu"):
        wrong = await holdfast(app, "enqueue", "render", "1")
        assert (wrong.code, wrong.out) == (1, "")
        assert "job render is served in group gpu and not in default: name the group" in wrong.err
        good = await holdfast(app, "enqueue", "render", "1", "--group", "gpu", "--wait")
        assert (good.code, good.out) == (0, "1\n")
        sent = await holdfast(app, "enqueue", "render", "1", "--no-check")
        assert (sent.code, "it is served in group gpu" in sent.err) == (0, True)
