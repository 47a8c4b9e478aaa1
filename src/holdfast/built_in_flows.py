"""`app.batch` and `app.chain`: two flows that every app has without writing them.

They are ordinary flows of the default group, added by `app.built_in_flows()`. A request inside
another one is stored as it would be sent: job, group, payload, headers.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from holdfast.client.run import JobRequest, Request
from holdfast.errors import InvalidInput
from holdfast.flow import Flow
from holdfast.model.job import JobSpec

BATCH: Final = "holdfast-batch"
CHAIN: Final = "holdfast-chain"
"""Names that no function can have."""


class ChainLink(msgspec.Struct, frozen=True):
    """A part of a chain that gets the result before it: what `job.link(...)` returns."""

    spec: JobSpec
    given: dict[str, Any]
    into: str
    """The parameter that gets the result; empty: it has none."""
    alone: bool
    """Whether this is the only parameter, and so the whole payload."""


class Asked(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request inside the payload of another one."""

    job: str
    group: str
    delivery: str = "effectively_once"
    payload: Any = None
    empty: bool = False
    """Whether it has no payload at all."""
    headers: dict[str, str] = {}
    delay: float = 0.0
    into: str = ""
    alone: bool = False


class BatchEnd(msgspec.Struct, frozen=True):
    """How a batch ended: the payload of its `then`, or, without one, its result."""

    total: int
    done: int
    failed: int
    results: list[Any]
    """Results in the order of the requests; None for those that failed."""
    errors: list[str]
    """Errors in the same order; empty for those that are done."""


def asked(one: Request | ChainLink) -> Asked:
    """A request as part of a payload."""
    if isinstance(one, ChainLink):
        spec, given = one.spec, one.given
        return Asked(
            spec.name, spec.group, spec.delivery, given, not given, into=one.into, alone=one.alone
        )
    if not isinstance(one, Request):
        raise InvalidInput(
            f"expected what `job.request(...)` or `job.link(...)` returns, not {type(one).__name__}"
        )
    payload = msgspec.json.decode(one.body) if one.body else None
    spec, delay = one.spec, one.delay_seconds
    return Asked(spec.name, one.group, spec.delivery, payload, not one.body, one.headers, delay)


def request_of(one: Asked, body: bytes) -> JobRequest[Any]:
    """The request again; its run gets its id from the flow that sends it."""
    spec = JobSpec(one.job, one.group, delivery=one.delivery)  # type: ignore[arg-type]
    return JobRequest(spec, one.group, "", body, delay_seconds=one.delay, headers=one.headers)


def _own_body(one: Asked) -> bytes:
    return b"" if one.empty else msgspec.json.encode(one.payload)


def _continued(one: Asked, result: Any) -> bytes:
    """The payload of a link: its own arguments, and the result before it."""
    if not one.into:
        return _own_body(one)
    if one.alone:
        return msgspec.json.encode(result)
    return msgspec.json.encode({**(one.payload or {}), one.into: result})


async def batch(ctx: Flow, requests: list[Asked], then: Asked | None = None) -> Any:
    """Run all requests; then, however they ended, run one more with what became of them."""
    children = (request_of(one, _own_body(one)) for one in requests)
    ends = await ctx.gather(children, settled=True)
    failed = sum(not end.ok for end in ends)
    found = BatchEnd(
        len(ends),
        len(ends) - failed,
        failed,
        [end.result for end in ends],
        ["" if end.ok else end.error or end.state for end in ends],
    )
    if then is None:
        return found
    return await ctx.call(request_of(then, _continued(then, found)))


async def chain(ctx: Flow, requests: list[Asked]) -> Any:
    """Run requests one after the other; a link gets the result of the one before."""
    result: Any = None
    for one in requests:
        result = await ctx.call(request_of(one, _continued(one, result)))
    return result
