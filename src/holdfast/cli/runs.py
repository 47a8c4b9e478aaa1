"""`holdfast runs`: list, show and trace runs, and read what they logged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from holdfast.cli import out
from holdfast.cli.command import command, operating, with_options
from holdfast.cli.options import (
    RUN_FILTERS,
    LimitOption,
    RunArgument,
    given,
    option,
)
from holdfast.cli.typed import run_filter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from holdfast.client import Client
    from holdfast.model.runlog import LogLine
    from holdfast.status.runs import RunDetail
    from holdfast.status.trace import Step, Trace

LOOKS = {"warning": (27, "yellow"), "error": (27, "red"), "critical": (27, "red")}
"""Colours of the time and level of a log line."""


@command("runs list")
@with_options("filters", RUN_FILTERS)
async def list_runs(
    filters: dict[str, Any],
    node: Annotated[str, option("Only runs on this node.", "ID")] = "",
    limit: LimitOption = 50,
) -> None:
    """List runs, the newest change first, and count them by state."""
    from dataclasses import replace

    from holdfast.status.listing import first_runs

    async with operating() as by:
        wanted = run_filter(by.client, **filters)
        found = await first_runs(by.client, replace(wanted, node=node), limit)
        counts = "" if given().json else await _counts(by.client, wanted.job, wanted.group)
    out.listing(
        found,
        "run",
        "state",
        "group",
        "job",
        "attempts",
        ("changed (UTC)", lambda run: out.clock_time(run.updated)),
        "node",
        ("error", lambda run: out.shortened(run.error, 50)),
        empty="no runs found",
    )
    if counts:
        out.note(counts)


async def _counts(client: Client, job: str, group: str) -> str:
    """How many runs (of the job, of the group, or all) are in each state; of ended ones, the last
    day's."""
    from holdfast.durations import DAY
    from holdfast.errors import BrokerError
    from holdfast.status.jobs import Jobs
    from holdfast.status.totals import counted

    try:
        jobs = await Jobs(client).list(job, group)
        periods = (await counted(client, DAY, job, group)).periods
    except BrokerError:
        return ""  # the counts are only an extra to the list
    open_ = {
        "queued": sum(one.waiting for one in jobs),
        "in flight": sum(one.in_flight for one in jobs),
        "delayed": sum(one.parked for one in jobs),
    }
    ended: dict[str, int] = {}
    for period in periods:
        for name, count in period.ended.items():
            ended[name] = ended.get(name, 0) + count
    told = [f"{count:,} {name}" for name, count in open_.items() if count]
    if ended:
        told.append("last 24 h: " + ", ".join(f"{n:,} {s}" for s, n in sorted(ended.items())))
    return " · ".join(told)


@command("runs show")
async def show(run: RunArgument) -> None:
    """Show a run: its record and where it is."""
    async with operating() as by:
        detail = await by.runs.show(run)
    if not out.as_json(detail):
        _print_detail(detail)


def _print_detail(detail: RunDetail) -> None:
    info, record = detail.info, detail.record
    progress = record.progress if record else None
    out.pairs(
        [
            ("run", info.run),
            ("state", info.state),
            ("where", detail.where),
            ("job", info.job),
            ("group", info.group),
            ("accepted", out.clock_time(info.created)),
            ("started", out.clock_time(info.started)),
            ("ended", out.clock_time(info.ended)),
            ("next attempt", out.clock_time(info.due)),
            ("attempts", info.attempts),
            ("failures", info.failures),
            ("crashes", info.crashes),
            ("progress", f"{progress.fraction or 0:.0%} {progress.note}" if progress else ""),
            ("caused by", info.cause),
            ("error", info.error),
            ("result", _result(detail)),
        ]
    )


def _result(detail: RunDetail) -> str:
    record = detail.record
    if record is None or record.state != "done":
        return ""
    if record.result_object:
        return f"in the object store as {record.result_object}"
    return out.shortened(bytes(record.result).decode(), 2_000)


@command("runs logs")
async def logs(
    run: RunArgument,
    follow: Annotated[
        bool, option("Show new lines until the run has ended.", None, "--follow", "-f")
    ] = False,
    level: Annotated[str, option("Only lines of this level and above.", "LEVEL")] = "debug",
) -> None:
    """Show what a run has logged and printed in all its attempts. Only the newest lines are
    kept."""
    from holdfast.errors import InvalidInput, RunNotFound
    from holdfast.model.runlog import LEVELS

    if level not in LEVELS:
        raise InvalidInput(f"--level is one of {', '.join(LEVELS)}, not {level!r}")
    found = False
    async with operating() as by:
        try:
            run = (await by.runs.find(run)).run
        except RunNotFound:  # its log lines may outlive its record
            if not await by.client.logs(run):
                raise
            follow = False
        lines = by.client.follow(run) if follow else _each(await by.client.logs(run))
        async for line in lines:
            if LEVELS.get(line.level, 0) >= LEVELS[level]:
                _print_line(line)
                found = True
    if not found:
        out.note(
            f"no log lines of {run} are kept: workers keep lines from level run_log (info) on, for "
            "run_log_days"
        )


async def _each(lines: list[LogLine]) -> AsyncIterator[LogLine]:
    for line in lines:
        yield line


def _print_line(line: LogLine) -> None:
    if given().json:
        out.emit_line(line)
        return
    fields = "".join(f" {name}={value}" for name, value in line.extra.items())
    first, *rest = line.text.split("\n")
    where = f"[attempt {line.attempt} on {line.node}]"
    when = f"{out.clock_time(line.at)} {line.level.upper():<7}"
    out.say(f"{when} {line.logger}: {first}{fields}  {where}", colour=LOOKS.get(line.level))
    for text in rest:  # indented, so that no text in it can look like a log line
        out.say(f"    {text}")


@command("runs trace")
async def trace(run: RunArgument) -> None:
    """Show a run's history: every attempt, how it ended, and what it caused."""
    from holdfast.status.trace import trace as trace_run

    async with operating() as by:
        found = await trace_run(by.client, run)
    if not out.as_json(found):
        _print_trace(found)


def _print_trace(found: Trace) -> None:
    out.say(f"{found.run}: {found.job} of group {found.group}, {found.state}")
    if found.cause:
        out.say(f"caused by {found.cause}")
    start = found.steps[0].at if found.steps else 0.0
    out.table(
        ("time (UTC)", "after", "what", "details"),
        [(out.clock_time(s.at), f"{s.at - start:+.3f}s", s.what, _details(s)) for s in found.steps],
        empty="its history has expired",
    )


def _details(step: Step) -> str:
    parts = [
        f"attempt {step.attempt}" if step.attempt else "",
        f"on {step.node}" if step.node else "",
        f"epoch {step.epoch}" if step.epoch else "",
        f"until {out.clock_time(step.until)}" if step.until else "",
        step.outcome,
        step.event,
        f"#{step.dead_letter}" if step.dead_letter else "",
        step.run,
        step.detail,
        out.shortened(step.error, 120),
    ]
    return ", ".join(part for part in parts if part)
