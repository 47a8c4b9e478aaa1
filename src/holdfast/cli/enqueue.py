"""`holdfast enqueue`: send a run from the shell; no app is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.common import (
    Cli,
    HeaderOption,
    block,
    emit,
    given,
    headers_of,
    note,
    operating,
    say,
)
from holdfast.errors import (
    BrokerError,
    HoldfastError,
    InvalidInput,
    InvalidPayload,
    RunNotFound,
)
from holdfast.status import actions

if TYPE_CHECKING:
    from holdfast.client import Client
    from holdfast.client.run import Enqueued, Request
    from holdfast.model.run import RunRecord

FAILED = 3
CANCELLED = 4
TIMED_OUT = 124  # as timeout(1)


def register(app: Cli) -> None:
    """Add `holdfast enqueue`."""
    app.command("enqueue")(enqueue)


async def enqueue(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")],
    payload: Annotated[
        str | None,
        typer.Argument(
            metavar="JSON|@FILE|-",
            help="Its payload: JSON, a file, or - for standard input. Default: no arguments.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[
        str, typer.Option("--group", metavar="NAME", help="Group of the job.")
    ] = "default",
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="TEXT", help="Deduplication key."),
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option("--delay", metavar="TIME", help="Start it after a delay, e.g. 90s or 1h30m."),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="TIME",
            help="Start it at a time, e.g. 2026-11-16T01:45:00Z, or an epoch.",
        ),
    ] = None,
    header: HeaderOption = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait for its end and print the result. "
            "Exit code: 0 done, 3 failed or lost, 4 cancelled, 124 not in time.",
        ),
    ] = False,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="Stop waiting after TIME.")
    ] = None,
) -> None:
    """Send a run of JOB; prints its run id once the server has stored it."""
    from holdfast.client.run import make_request
    from holdfast.durations import seconds
    from holdfast.model.job import JobSpec

    limit = seconds(timeout, "timeout") if timeout is not None else None
    request = make_request(
        JobSpec(job, group),
        read_payload(payload),
        key=key,
        delay=delay,
        at=_at(at),
        headers=headers_of(header),
        group=group,
    )
    async with operating(create=True) as by:
        enqueued = await actions.enqueue(by, request)
        await _remark(by.client, request, enqueued)
        if wait:
            code = await _wait(by.client, request, enqueued, limit)
            raise typer.Exit(code)
        _print(request, enqueued)


def read_payload(given_text: str | None) -> bytes:
    """The bytes to send, exactly as given; refused unless they are JSON."""
    if given_text is None:
        return b""
    if given_text == "-":
        body = sys.stdin.buffer.read()
    elif given_text.startswith("@"):
        body = _read_file(given_text[1:])
    else:
        body = _bytes_of(given_text)
    _check_json(body)
    return body


def _bytes_of(text: str) -> bytes:
    """An argument's bytes, even if they are not valid text."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidPayload("the payload is not UTF-8") from None


def _read_file(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInput(f"payload file {name!r} cannot be read: {reason}") from None


def _check_json(body: bytes) -> None:
    import msgspec

    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise InvalidPayload(
            f"the payload is not JSON ({error}): a text needs its own quotes, as in '\"text\"'"
        ) from None


def _at(text: str | None) -> float | None:
    if text is None:
        return None
    from holdfast.durations import instant

    try:
        return float(text)
    except ValueError:
        return instant(text, "--at")


async def _remark(client: Client, request: Request, enqueued: Enqueued) -> None:
    """Print what the sender may not expect."""
    from holdfast.status.jobs import Jobs

    if enqueued.duplicate:
        note(f"run {enqueued.run} was accepted before: nothing new was sent")
        return
    try:
        groups = await Jobs(client).groups_of(request.spec.name)
    except BrokerError:
        return  # the run is accepted: failing to print a remark is no error
    if request.group not in groups:
        hint = f"; it is served in group {', '.join(groups)}: --group" if groups else ""
        note(
            f"accepted; no worker has ever served job {request.spec.name} "
            f"of group {request.group}{hint}"
        )


def _print(request: Request, enqueued: Enqueued) -> None:
    if given().json:
        emit(_facts(request, enqueued))
    else:
        say(enqueued.run)


def _facts(request: Request, enqueued: Enqueued) -> dict[str, Any]:
    return {
        "run": enqueued.run,
        "job": request.spec.name,
        "group": request.group,
        "duplicate": enqueued.duplicate,
    }


async def _wait(client: Client, request: Request, enqueued: Enqueued, limit: float | None) -> int:
    try:
        record = await client.wait(enqueued.run, enqueued.sequence, limit)
    except TimeoutError:
        note(f"run {enqueued.run} has not ended in time; it continues")
        return TIMED_OUT
    except RunNotFound as error:
        raise HoldfastError(
            f"{error}; or its job keeps no records (delivery='at_least_once'), so there is "
            "nothing to wait for"
        ) from None
    result = await client.result_bytes(record) if record.state == "done" else b""
    _print_end(request, enqueued, record, result)
    if record.state == "done":
        return 0
    return CANCELLED if record.state == "cancelled" else FAILED


def _print_end(request: Request, enqueued: Enqueued, record: RunRecord, result: bytes) -> None:
    import msgspec

    from holdfast.visible import json_text

    if given().json:
        end: dict[str, Any] = {"state": record.state, "error": record.error}
        end["result"] = msgspec.Raw(result or b"null")
        emit(_facts(request, enqueued) | end)
    elif record.state == "done":
        block(json_text(result.decode("utf-8", "replace")))
    else:
        note(f"run {enqueued.run} is {record.state}: {record.error}")
