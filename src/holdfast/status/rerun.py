"""Repeats a run that has ended, with its payload or an edited one.

It becomes a new run with its own id, because under the old key it would count as a repeat. If the
job computes its key, the new run would count as one anyway: such a run is replaced under its own
id, as by an operator's replay. An edited payload may have the key of another run; that one is never
replaced, and nothing is sent.

A key that is computed by code is unknown here. A run with an edited payload is then sent without a
key, and its worker decides whether it is a repeat; the answer says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from holdfast.client import Client
from holdfast.client.run import Request, make_request
from holdfast.errors import RunError
from holdfast.model.job import JobSpec
from holdfast.names import is_keyed_by_sender, is_slot_or_trigger
from holdfast.status.finding import Found, payload_of
from holdfast.status.jobs import Jobs


async def run_again(client: Client, found: Found, edited: bytes | None = None) -> str:
    """Send the payload of an ended run, or an edited one; returns a sentence about it."""
    jobs = Jobs(client)
    kept = await payload_of(client, found)
    if kept is None and edited is None:
        raise RunError(
            f"run {found.run} is {found.record.state if found.record else 'gone'}, and its "
            "payload is not kept: enqueue it again",
            run=found.run,
        )
    body, headers = kept or (b"", {})
    if edited is not None:
        await jobs.check(found.job, found.group, edited)
        body = edited
    request = make_request(JobSpec(found.job, found.group), body, headers=headers)
    send = await _keyed(jobs, request, found, edited is not None)
    sent = await client.enqueue(send.request)
    what = "the edited payload" if edited is not None else "its payload"
    name = "under the same id" if sent.run == found.run else f"as run {sent.run}"
    return f"{what} was sent{'' if edited is not None else ' again'}, {name}{send.remark}"


@dataclass(frozen=True, slots=True)
class _Send:
    request: Request
    remark: str = ""


async def _keyed(jobs: Jobs, request: Request, found: Found, edited: bool) -> _Send:
    """The request under the key that its job computes; as it is if the job computes none."""
    known = await jobs.published(found.job, found.group)
    if known is None or not known.key:
        return _Send(request)
    own = is_keyed_by_sender(found.run, found.group, found.job) and not is_slot_or_trigger(
        found.run
    )
    if own and not edited:
        return _Send(_under(request, found.run, replace=True))
    keyed = await jobs.keyed(request)
    if not keyed.keyed:
        remark = "; the job computes its key, and drops the run if that key is known"
        return _Send(request, remark)
    return _Send(_under(request, keyed.run, replace=own and keyed.run == found.run))


def _under(request: Request, run: str, *, replace: bool) -> Request:
    on_duplicate = "replace" if replace else "raise"
    return msgspec.structs.replace(request, run=run, keyed=True, on_duplicate=on_duplicate)
