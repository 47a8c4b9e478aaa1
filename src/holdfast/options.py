"""The options of `@app.job`, `@app.flow`, `@app.cron` and `job.schedule`, and their checks.

Type checkers report a misspelt option; at run time it is an error of one sentence with the user's
file, the line and the nearest name.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypedDict

from holdfast.durations import Duration, seconds
from holdfast.errors import DefinitionError, HoldfastError
from holdfast.model import backoff
from holdfast.model.backoff import Backoff
from holdfast.model.debounce import make_debounce
from holdfast.model.job import Delivery, Execution, GroupSpec, JobSpec, Priority, RestartSaid
from holdfast.model.limit import Limit
from holdfast.model.run import Restart
from holdfast.model.schedule import CatchUp, Overlap
from holdfast.names import DEFAULT_GROUP, check_name

_PACKAGE = f"{Path(__file__).parent}{os.sep}"


class JobOptions(TypedDict, total=False):
    """What `@app.job(...)` takes: the job's contract."""

    name: str | None
    """The job's name, instead of the function's."""
    group: str
    """The group whose workers run it."""
    delivery: Delivery
    retry: Backoff | None
    """When a failed attempt is repeated."""
    restart: Restart | None
    """What happens to a run whose worker died."""
    timeout: Duration | None
    """The longest that one attempt may take."""
    run_timeout: Duration | None
    """The longest that all attempts together may take."""
    on: str | Sequence[str]
    """Events, each of which starts a run."""
    execution: Execution
    keep_payload: bool
    """Whether the history of its runs keeps their payloads and headers."""
    key: str | Callable[..., object] | None
    """The key of every run: a parameter, a member of one (`order.id`) or a function of the payload.
    The sender computes it and, for a plain publish or an event, the worker."""
    limits: Sequence[Limit]
    """How many of its runs may run, or start, at the same time over all workers."""
    debounce: Duration | None
    """Run only the last of a burst, once this much time has passed without another."""
    per: str
    """With `debounce`: a member of the payload; each of its values is debounced separately."""
    at_latest: Duration | None
    """With `debounce`: run this long after the first of a burst, even if the burst continues."""
    priority: Priority
    """Which waiting runs a worker starts first: `high`, `normal` or `low`."""


class FlowOptions(TypedDict, total=False):
    """What `@app.flow(...)` takes: steps have their own retries, and no flow its own delivery."""

    name: str | None
    """The flow's name, instead of the function's."""
    group: str
    """The group whose workers run it."""
    timeout: Duration | None
    """The longest that the whole flow may take, with all its waits."""
    on: str | Sequence[str]
    """Events, each of which starts a flow."""
    keep_payload: bool
    """Whether the history keeps payloads and headers."""
    key: str | Callable[..., object] | None
    """The key of every flow: a parameter, a member of one, or a function of the payload."""
    limits: Sequence[Limit]
    """How many of these flows may run at the same time; one that waits does not count."""
    priority: Priority
    """Which waiting runs a worker starts first: `high`, `normal` or `low`."""


class TimingOptions(TypedDict, total=False):
    """Options of a schedule's rule, besides when it fires."""

    tz: str
    jitter: Duration
    """Delay each slot by up to this time."""
    start: datetime | float | str | None
    end: datetime | float | str | None
    headers: dict[str, str] | None
    catch_up: CatchUp
    """Which missed slots fire later."""
    limit: int
    """How many missed slots fire at most."""
    overlap: Overlap
    """What to do when the run of the previous slot has not ended."""
    run_on_start: bool


class RuleOptions(TimingOptions, total=False):
    """What `@app.cron(...)` takes about its schedule."""

    schedule: str | None
    """The schedule's name, instead of the job's."""
    payload: Any


class ScheduleOptions(JobOptions, RuleOptions, total=False):
    """What `@app.cron(...)` and `@app.every(...)` take."""


class ScheduleRule(TimingOptions, total=False):
    """What `job.schedule(...)` takes: one of `cron`, `every` and `at`, and the timing options."""

    cron: str
    every: Duration
    at: datetime | float | str


# ---- checks


def check_options(
    given: Iterable[str], known: Iterable[str], what: str, error: type[HoldfastError]
) -> None:
    """Refuse an option that does not exist, with the nearest name and the user's line."""
    for name in sorted(set(given) - set(known)):
        near = difflib.get_close_matches(name, known, 1)
        advice = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(known))}"
        raise error(f"{users_line()}{what} has no option {name!r}: {advice}")


def users_line() -> str:
    """Where the user's code called into this package: `shop.py:12: `."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}: "


def make_spec(name: str, group: GroupSpec | None, contract: dict[str, Any]) -> JobSpec:
    """A job's contract: what the job says, then what its group says."""
    said: RestartSaid = "job" if contract.get("restart") else ""
    if group is None:
        return dataclasses.replace(_spec(name, **contract), restart_said=said)
    ours = contract.get("delivery", "effectively_once") == "effectively_once"
    if ours and group.restart and not said:
        contract["restart"], said = group.restart, "group"
    spec = _spec(name, **contract)
    return dataclasses.replace(spec, fallback=group.fallback, restart_said=said)


def _spec(
    name: str,
    *,
    group: str = DEFAULT_GROUP,
    delivery: Delivery = "effectively_once",
    retry: Backoff | None = None,
    restart: Restart | None = None,
    timeout: Duration | None = None,
    run_timeout: Duration | None = None,
    on: str | Sequence[str] = (),
    execution: Execution = "worker",
    keep_payload: bool = True,
    limits: tuple[Limit, ...] = (),
    debounce: Duration | None = None,
    per: str = "",
    at_latest: Duration | None = None,
    priority: Priority = "normal",
    flow: bool = False,
) -> JobSpec:
    """A job's contract from the options of `@app.job`."""
    once = delivery == "at_most_once"
    if retry is not None and not isinstance(retry, Backoff):
        raise DefinitionError(f"job {name!r}: retry= takes a Backoff, such as Backoff.linear()")
    return JobSpec(
        name,
        group,
        delivery,
        retry if retry is not None else (Backoff.never() if once else backoff.DEFAULT),
        restart if restart is not None else ("never" if once else "immediately"),
        seconds(timeout, "timeout") if timeout is not None else None,
        seconds(run_timeout, "run_timeout") if run_timeout is not None else None,
        (on,) if isinstance(on, str) else tuple(on),
        execution=execution,
        keep_payload=keep_payload,
        limits=limits,
        debounce=make_debounce(name, debounce, per, at_latest),
        priority=priority,
        flow=flow,
    )


def name_limits(app: str, known: Mapping[str, Limit], job: str, given: Any) -> tuple[Limit, ...]:
    """A job's limits, each with a name, in the order in which they are taken."""
    if isinstance(given, Limit) or not all(isinstance(one, Limit) for one in given):
        raise DefinitionError(f"job {job!r}: limits= takes a list of Limit(...)")
    found: list[Limit] = []
    for limit in given:
        if not limit.name:
            check_name(job, "job")
            number = len([one for one in found if one.name.startswith(job)])
            limit = limit.named(f"{job}-{number + 1}" if number else job)
            taken = limit.name in known
        else:
            taken = known.get(limit.name, limit) != limit
        if limit.ordered and limit.name in known:
            raise DefinitionError(
                f"job {job!r}: limit {limit.name!r} is ordered and another job has it: each "
                "job has its own queue, and nothing orders the runs of two queues"
            )
        if taken or limit in found:
            raise DefinitionError(
                f"job {job!r}: there is another limit {limit.name!r} in app {app!r}: "
                "give one of them another name="
            )
        found.append(limit)
    return tuple(sorted(found, key=lambda one: one.order))


def check_process(func: Callable[..., Any], name: str, is_async: bool) -> None:
    """Refuse a handler that a process of the pool could not import and call."""
    if is_async:
        raise DefinitionError(
            f"job {name!r}: execution='process' is for plain handlers: write `def`, not `async def`"
        )
    where = getattr(func, "__qualname__", "<")
    if "<" in where or not getattr(func, "__module__", ""):
        raise DefinitionError(
            f"job {name!r}: execution='process' needs a function that another process can import: "
            "define it at the top level of a module"
        )
