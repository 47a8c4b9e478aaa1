"""`holdfast enqueue` and `holdfast publish`: send runs and events from the shell; no app needed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from holdfast.cli import out
from holdfast.cli.command import command, operating
from holdfast.cli.options import DataArgument, HeaderOption, argument, option
from holdfast.cli.typed import headers_of, read_payload
from holdfast.errors import BrokerError, HoldfastError, InvalidInput, RunNotFound
from holdfast.names import DEFAULT_GROUP
from holdfast.status import actions

if TYPE_CHECKING:
    from holdfast.client import Client
    from holdfast.client.run import Enqueued, Request
    from holdfast.model.run import RunRecord
    from holdfast.status.jobs import Jobs
    from holdfast.status.operators import Operator

FAILED = 3  # exit codes with --wait; 1 and 2 mean an error and wrong usage
CANCELLED = 4
TIMED_OUT = 124  # as timeout(1)
LOOK_SECONDS = 1.0
"""How often a run that is waited for is looked up: retries that come sooner need no remark."""


@command("enqueue")
async def enqueue(
    job: Annotated[str, argument("The job's name.", "JOB", "jobs")],
    payload: Annotated[
        str | None,
        argument(
            "Payload: JSON, a file, or - for standard input. Default: no arguments.",
            "JSON|@FILE|-",
            show_default=False,
        ),
    ] = None,
    group: Annotated[str, option("Group of the job.", "NAME")] = DEFAULT_GROUP,
    key: Annotated[str | None, option("Deduplication key.", "TEXT")] = None,
    delay: Annotated[
        str | None, option("Start it after a delay, e.g. 90s or 1h30m.", "TIME")
    ] = None,
    at: Annotated[
        str | None,
        option("Start it at a time, e.g. 2026-11-16T01:45:00Z, or seconds since 1970.", "TIME"),
    ] = None,
    header: HeaderOption = None,
    priority: Annotated[
        Literal["high", "normal", "low"] | None, option("Priority, instead of the job's own.")
    ] = None,
    on_duplicate: Annotated[
        Literal["return", "replace", "raise"],
        option("If a run with the key exists: show what became of it, replace it, or fail."),
    ] = "return",
    wait: Annotated[
        bool,
        option(
            "Wait for its end and print the result. "
            "Exit code: 0 done, 3 failed or lost, 4 cancelled, 124 not in time."
        ),
    ] = False,
    timeout: Annotated[str | None, option("Stop waiting after TIME.", "TIME")] = None,
    check: Annotated[
        bool,
        option("Check the payload against the parameters of the job.", None, "--check/--no-check"),
    ] = True,
) -> None:
    """Send a run of JOB; prints its run id once the server has stored it.

    Workers publish the parameters of their jobs. A payload that does not fit is refused before it
    is sent, and so is a job that only other groups serve if --group is missing. --no-check sends
    anyway, for a version of the job that no worker runs yet.
    """
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
        priority=priority,
        on_duplicate=on_duplicate,
        key_follows=True,
    )
    async with operating(create=True) as by:
        if check:
            if group == DEFAULT_GROUP:
                await by.jobs.check_default_group(job)
            for remark in await by.jobs.check(job, group, request.body):
                out.note(remark)
        if wait:
            await _needs_id(by.jobs, request)
        enqueued = await actions.enqueue(by, request)
        await _remark(by, request, enqueued)
        if wait:
            code = await _wait(by.client, request, enqueued, limit)
            raise typer.Exit(code)
        out.result(_facts(request, enqueued), enqueued.run)
        raise typer.Exit(_code(enqueued.state))


async def _needs_id(jobs: Jobs, request: Request) -> None:
    """Refuse to wait for a run whose id its worker will compute: nobody could find it."""
    if await jobs.computes_key(request):
        raise InvalidInput(
            f"job {request.spec.name} computes its key in code that this command does not have, so "
            "there is no id to wait for: pass --key, or leave --wait out; nothing was sent"
        )


def _code(state: str) -> int:
    """The exit code of a run that was sent, or of an earlier one with the same key."""
    return {"dead": FAILED, "lost": FAILED, "cancelled": CANCELLED}.get(state, 0)


def _at(text: str | None) -> float | None:
    if text is None:
        return None
    from holdfast.durations import instant

    try:
        return float(text)
    except ValueError:
        return instant(text, "--at")


async def _remark(by: Operator, request: Request, enqueued: Enqueued) -> None:
    """Print what the sender may not expect."""
    if enqueued.duplicate:
        why = f": {enqueued.error}" if enqueued.error else ""
        advice = "; --on-duplicate replace sends it again" if _code(enqueued.state) else ""
        out.note(
            f"run {enqueued.run} was accepted before and is {enqueued.state}{why}: nothing new was "
            f"sent{advice}"
        )
        return
    if hint := await by.jobs.unserved(request.spec.name, request.group):
        out.note(f"accepted; {hint}")


def _facts(request: Request, enqueued: Enqueued) -> dict[str, Any]:
    return {
        "run": enqueued.run,
        "job": request.spec.name,
        "group": request.group,
        "duplicate": enqueued.duplicate,
        "state": enqueued.state,
    }


async def _wait(client: Client, request: Request, enqueued: Enqueued, limit: float | None) -> int:
    telling = asyncio.create_task(tell_failures(client, enqueued.run), name="tell-failures")
    try:
        record = await client.wait(enqueued.run, enqueued.sequence, limit)
    except TimeoutError:
        out.note(f"run {enqueued.run} has not ended in time; it continues")
        return TIMED_OUT
    except RunNotFound as error:
        raise HoldfastError(
            f"{error}; or its job keeps no records (delivery='at_least_once'), so there is "
            "nothing to wait for"
        ) from None
    finally:
        telling.cancel()
    result = await client.result_bytes(record) if record.state == "done" else b""
    _print_end(request, enqueued, record, result)
    return _code(record.state)


async def tell_failures(client: Client, run: str) -> None:
    """Say why the end is still far off: attempts fail, and the waits in between may be long."""
    from holdfast.durations import text

    told = 0
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        with contextlib.suppress(BrokerError):
            record = await client.read(run)
            if record and record.state == "failed" and record.message > told:
                told = record.message
                pause = text(round(max(0.0, record.due - client.broker.server_now())))
                out.note(f"an attempt failed: {record.error}; the next one starts in {pause}")


def _print_end(request: Request, enqueued: Enqueued, record: RunRecord, result: bytes) -> None:
    import msgspec

    from holdfast.visible import json_text

    end = {"state": record.state, "error": record.error, "result": msgspec.Raw(result or b"null")}
    if out.as_json(_facts(request, enqueued) | end):
        return
    if record.state == "done":
        out.block(json_text(result.decode("utf-8", "replace")))
    else:
        out.note(f"run {enqueued.run} is {record.state}: {record.error}")


@command("publish", help=actions.publish_event.doc)
async def publish(
    event: Annotated[str, argument("The event's name.", "EVENT")],
    data: DataArgument = None,
    id: Annotated[
        str | None, option("Id of the event; another event with it is dropped.", "TEXT")
    ] = None,
) -> None:
    body = read_payload(data) or b"null"
    async with operating(create=True) as by:
        sent = await actions.publish_event(by, event, body, id)
    out.result(sent, sent.id)
    if sent.duplicate:
        out.note(f"an event with the id {id} was sent before: nothing new was sent")
    elif not sent.subscribed:
        out.note(f"no job subscribes to {event}: it is kept for one that will")
