"""What happens when a run is sent under a key that already has one.

If the run has ended, its record is the answer: nothing is sent, and the sender learns what became
of it. Otherwise the message is sent as always: the server, or the claim, drops a repeat. A sender
that wants an error for a duplicate sends nothing if there is any record.

To **replace** a run, it is cancelled unless it has ended. Then its record starts over, as for an
operator's replay (`model.replay`): first the record moves to `failed` with the next message number,
by compare-and-swap; then the message with the new payload is published under that number. An older
message of the run that is still queued is superseded. A crash between the two steps leaves a record
that waits for a message that does not exist; coordinators end such a run (`status.stranded`), and
sending again replaces it.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Final

from holdfast import errors
from holdfast.client.run import Enqueued, Request
from holdfast.model import run as runs
from holdfast.model.message import RunMessage, next_message
from holdfast.model.replay import MARK, again
from holdfast.model.run import RunRecord
from holdfast.names import Names

if TYPE_CHECKING:
    from holdfast.client.client import Client

TRIES: Final = 20
"""Lost compare-and-swaps before giving up: more than senders replace one key at once."""

log = logging.getLogger("holdfast.client")


def answered(request: Request, record: RunRecord | None) -> Enqueued | None:
    """The answer, if the key's record decides it; None: send the message."""
    if record is None or record.vacant:
        return None
    if not (record.terminal or request.delayed or request.on_duplicate == "raise"):
        return None
    return Enqueued(request.run, 0, duplicate=True, state=record.state, error=record.error)


def beside(record: RunRecord | None, sent: Enqueued) -> Enqueued:
    """The answer once the message was stored; if the run has begun already, the claim drops the
    message."""
    if record is None or record.vacant:
        return sent
    return sent._replace(duplicate=True, state=record.state)


def told(request: Request, found: Enqueued) -> Enqueued:
    """The answer to a duplicate: `DuplicateRun`, or the earlier run, with a line in the log."""
    why = f": {found.error}" if found.error else ""
    text = f"run {found.run} exists already and is {found.state}{why}"
    if request.on_duplicate == "raise":
        raise errors.DuplicateRun(
            f"{text}. Nothing was sent: to send it again, replace it (on_duplicate)", run=found.run
        )
    level = logging.INFO if found.state in ("done", "queued", "delayed") else logging.WARNING
    log.log(level, "not sent: %s", text)
    return found


def replacement(
    names: Names, request: Request, record: RunRecord | None, now: float
) -> tuple[RunRecord, RunMessage]:
    """The record and the message of a request that replaces a run that has ended."""
    group, job, token = request.group, request.spec.name, secrets.token_hex(6)
    base = record or RunRecord("cancelled", group, job, keyed=True)
    number, due = base.message + 1, request.at
    if due is None and request.delayed:
        due = now + request.delay_seconds
    message = next_message(
        names,
        group,
        job,
        request.run,
        request.body,
        request.headers,
        number=number,
        mark=f".{MARK}{token}",
        due=due,
        queue=request.queue,
    )
    return again(base, message=number, token=token, now=now), message


async def replace(client: Client, request: Request) -> Enqueued:
    """Make the request the run of its key, whatever state the key's run is in."""
    broker, run, group, job = client.broker, request.run, request.group, request.spec.name
    for _ in range(TRIES):
        entry = await client.runs.get(run)
        record = runs.decode(entry.value) if entry else None
        if record is not None and not record.terminal:
            await client.cancel(run, group, job)
            continue
        started, message = replacement(broker.names, request, record, broker.server_now())
        try:
            revision = entry.revision if entry else 0
            await client.runs.put(run, runs.encode(started), expected=revision)
        except (errors.Conflict, errors.OutcomeUnknown):
            continue  # an unanswered write that was applied is cancelled and replaced
        await client.topology.purge(broker.names.jobs, broker.names.later(group, job, run, 1))
        stored = await client.store_surely(*message)
        if record is not None:
            log.info("run %s was replaced; it was %s", run, record.state)
        state = "delayed" if request.delayed else "queued"
        return Enqueued(run, 0 if request.delayed else stored.seq, duplicate=False, state=state)
    raise errors.Conflict(f"run {run}: others keep changing it; try again")
