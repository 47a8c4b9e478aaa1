"""Cancelling a run in any state, wherever it is.

A run that a worker holds is cancelled by that worker, on request. Any other is ended by a
compare-and-swap on its record, and its parked messages are removed. A flow that nobody holds is
called once more by a worker, to undo what it has done.
"""

from __future__ import annotations

import base64
import contextlib
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast import errors
from holdfast.broker import Bucket
from holdfast.broker.wire import Headers, parse_headers
from holdfast.client.run import Request
from holdfast.model import node as nodes
from holdfast.model import run as runs
from holdfast.model.run import RunRecord
from holdfast.names import (
    GRANTED,
    H_MSG_ID,
    H_PARENT,
    H_SCHEDULE,
    H_SCHEDULE_TARGET,
    check_run,
)

if TYPE_CHECKING:
    from holdfast.client.client import Client

CANCEL_SECONDS: Final = 10.0
"""Longer than a stream's election (4 to 8 s), during which nothing can be written."""
_AWAY = (errors.NotConnected, errors.Unavailable, errors.OutcomeUnknown)


async def cancel(
    client: Client, run: str, group: str, job: str, payload: bytes | None = None
) -> bool:
    """Cancel a run in any state; each step is a compare-and-swap, repeated on a conflict.

    `payload`: kept in the history of a run that was never started.
    """
    check_run(run)
    deadline = client.broker.clock.monotonic() + CANCEL_SECONDS
    while True:
        entry = await client.runs.get(run)
        record = runs.decode(entry.value) if entry else None
        if record and record.terminal:
            return record.state == "cancelled"
        if record and record.state == "running" and await _ask_holder(client, run):
            return await _ended_cancelled(client, run)
        if record and record.flow and entry is not None:
            await stop_flow(client, run, record, entry.revision)
            return await _ended_cancelled(client, run)
        if client.broker.clock.monotonic() > deadline:
            raise errors.RunError(
                f"run {run} could not be cancelled: its holder does not answer", run=run
            )
        revision = entry.revision if entry else 0
        held = record and record.state == "running" and await _alive(client, record.node)
        if not held and await write_cancelled(
            client, run, record, revision, group, job, payload=payload
        ):
            return True
        await client.broker.clock.sleep(0.1)


async def stop_flow(
    client: Client, run: str, record: RunRecord, revision: int, why: str = ""
) -> None:
    """Ask a flow that nobody holds to stop: a worker has to call it once more to undo it."""
    await client.journals.stop(run, why or "cancelled")
    await client.journals.wake(record.group, record.job, run, f"x{revision}")


async def cancel_child(client: Client, request: Request) -> None:
    """Ask a flow's child to stop; its flow gets its end."""
    run, group, job = request.run, request.group, request.spec.name
    entry = await client.runs.get(run)
    record = runs.decode(entry.value) if entry else None
    if record is not None and record.terminal:
        await client.history.tell(run, record)
    elif entry is not None and record is not None and record.flow:
        if record.state != "running" or not await _ask_holder(client, run):
            await stop_flow(client, run, record, entry.revision)
    elif record is not None and record.state == "running":
        if not await _ask_holder(client, run):
            await cancel(client, run, group, job)
    elif not await write_cancelled(
        client, run, record, entry.revision if entry else 0, group, job, parent=request.headers
    ):
        await cancel_child(client, request)


async def write_cancelled(
    client: Client,
    run: str,
    record: RunRecord | None,
    revision: int,
    group: str,
    job: str,
    why: str = "cancelled",
    payload: bytes | None = None,
    parent: Headers | None = None,
) -> bool:
    ended = runs.cancelled(record, run, group, job, now=client.broker.server_now(), why=why)
    if record is None:
        told = parent or await _waiting_headers(client, run, group, job)
        ended = msgspec.structs.replace(ended, parent=told.get(H_PARENT, ""))
    try:
        await client.runs.put(
            run, runs.encode(ended), expected=revision, ttl=client.records.keyed_ttl_seconds
        )
    except errors.Conflict:
        return False
    await client.history.try_append(run, ended, payload)
    # Remove only what is parked for this record: an operator may have sent the run again by now.
    names = client.broker.names
    for message in (ended.message, ended.message + 1):
        parked = names.later(group, job, run, message)
        if record is not None and record.state == "failed":
            await _free_place(client, parked)
        await client.topology.purge(names.jobs, parked)
    await client.topology.purge(names.jobs, names.line("*", "*", run))
    return True


async def _free_place(client: Client, parked: str) -> None:
    """If a cancelled run keeps its place in an ordered limit, send its next message at once: the
    worker that receives it drops it and frees the place."""
    get = f"STREAM.MSG.GET.{client.broker.names.jobs}"
    try:
        found = (await client.broker.api(get, {"last_by_subj": parked}))["message"]
    except errors.NotFound:
        return
    headers = parse_headers(base64.b64decode(found.get("hdrs", "")))
    target = headers.get(H_SCHEDULE_TARGET, "")
    if client.broker.names.parse_queue(target) != GRANTED:
        return
    own = {k: v for k, v in headers.items() if k not in (H_SCHEDULE, H_SCHEDULE_TARGET)}
    own[H_MSG_ID] = f"{own.get(H_MSG_ID, '')}-cancelled"
    await client.store_surely(target, base64.b64decode(found.get("data", "")), own)


async def _waiting_headers(client: Client, run: str, group: str, job: str) -> Headers:
    """The headers of a run's message that waits for its time or its place and is about to be
    purged.

    A queued message is not purged: whoever receives it finds the run ended.
    """
    names = client.broker.names
    for subject in (names.later(group, job, run, "*"), names.line("*", "*", run)):
        with contextlib.suppress(errors.NotFound):
            answer = await client.broker.api(
                f"STREAM.MSG.GET.{names.jobs}", {"last_by_subj": subject}
            )
            return parse_headers(base64.b64decode(answer["message"].get("hdrs", "")))
    return {}


async def _ask_holder(client: Client, run: str) -> bool:
    try:
        answer = await client.broker.ask(client.broker.names.cancel(run), timeout=1)
    except _AWAY:
        return False
    return answer.body == b"cancelling"


async def _ended_cancelled(client: Client, run: str) -> bool:
    try:
        record = await client.wait(run, 0, CANCEL_SECONDS)
    except TimeoutError:
        raise errors.RunError(
            f"run {run} was asked to stop but is still running: check again with status()",
            run=run,
        ) from None
    return record.state == "cancelled"


async def _alive(client: Client, node: str) -> bool:
    bucket = Bucket(client.broker, client.broker.names.nodes)
    entry = await bucket.get(node)
    if entry is None:
        return False
    record = bucket.read(nodes.decode, entry)
    return record is None or record.alive  # an unreadable node keeps what it holds
