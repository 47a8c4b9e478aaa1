"""`holdfast runs`: list, show, cancel, retry and trace runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import (
    Cli,
    GroupOption,
    JobOption,
    LimitOption,
    SinceOption,
    clock_time,
    connected,
    emit,
    given,
    instant,
    note,
    operating,
    pairs,
    say,
    shortened,
    table,
)
from holdfast.status import actions

if TYPE_CHECKING:
    from holdfast.status.runs import RunDetail
    from holdfast.status.trace import Step, Trace

NOT_CANCELLED = 1

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")]


def register(app: Cli) -> None:
    """Add `holdfast runs`."""
    runs = app.noun("runs", "Look at runs, cancel them, send them again.")
    runs.command("list")(list_runs)
    runs.command("show")(show)
    runs.command("cancel", help=actions.cancel_run.doc)(cancel)
    runs.command("retry", help=actions.retry_run.doc)(retry)
    runs.command("trace")(trace)


async def list_runs(
    job: JobOption = "",
    group: GroupOption = "",
    state: Annotated[
        str,
        typer.Option(
            "--state",
            metavar="STATE",
            help="Only this state: queued, delayed, running, failed, done, cancelled, dead, lost.",
        ),
    ] = "",
    node: Annotated[str, typer.Option("--node", metavar="ID", help="Only runs on this node.")] = "",
    prefix: Annotated[
        str,
        typer.Option(
            "--prefix", metavar="TEXT", help="Only runs whose id or key starts with TEXT."
        ),
    ] = "",
    since: SinceOption = None,
    limit: LimitOption = 50,
) -> None:
    """List runs, the newest change first."""
    from holdfast.status.listing import RunFilter
    from holdfast.status.runs import Runs

    async with connected() as client:
        wanted = RunFilter(job, group, state, node, prefix, instant(since, client, "--since"))
        found = await Runs(client).list(wanted, limit)
    if given().json:
        emit(found)
        return
    table(
        ("run", "state", "group", "job", "attempts", "changed (UTC)", "node", "error"),
        [
            (
                run.run,
                run.state,
                run.group,
                run.job,
                run.attempts,
                clock_time(run.updated),
                run.node,
                shortened(run.error, 50),
            )
            for run in found
        ],
        empty="no runs found",
    )


async def show(run: RunArgument) -> None:
    """Show a run: its record and where it is."""
    from holdfast.status.runs import Runs

    async with connected() as client:
        detail = await Runs(client).show(run)
    if given().json:
        emit(detail)
    else:
        _print_detail(detail)


def _print_detail(detail: RunDetail) -> None:
    info, record = detail.info, detail.record
    progress = record.progress if record else None
    pairs(
        [
            ("run", info.run),
            ("state", info.state),
            ("where", detail.where),
            ("job", info.job),
            ("group", info.group),
            ("accepted", clock_time(info.created)),
            ("started", clock_time(info.started)),
            ("ended", clock_time(info.ended)),
            ("next attempt", clock_time(info.due)),
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
    return shortened(bytes(record.result).decode(), 2_000)


async def cancel(run: RunArgument) -> None:
    async with operating() as by:
        cancelled = await actions.cancel_run(by, run)
    if given().json:
        emit({"run": run, "cancelled": cancelled})
    elif cancelled:
        say(f"{run} is cancelled")
    if not cancelled:
        note(f"{run} had ended already")
        raise typer.Exit(NOT_CANCELLED)


async def retry(run: RunArgument) -> None:
    async with operating() as by:
        done = await actions.retry_run(by, run)
    if given().json:
        emit({"run": run, "retried": True, "detail": done})
    else:
        say(f"{run}: {done}")


async def trace(run: RunArgument) -> None:
    """Show a run's history: every attempt, its end, and what it caused."""
    from holdfast.status.trace import trace as trace_run

    async with connected() as client:
        found = await trace_run(client, run)
    if given().json:
        emit(found)
    else:
        _print_trace(found)


def _print_trace(found: Trace) -> None:
    say(f"{found.run}: {found.job} of group {found.group}, {found.state}")
    if found.cause:
        say(f"caused by {found.cause}")
    start = found.steps[0].at if found.steps else 0.0
    table(
        ("time (UTC)", "after", "what", "details"),
        [(clock_time(s.at), f"{s.at - start:+.3f}s", s.what, _details(s)) for s in found.steps],
        empty="its history has expired",
    )


def _details(step: Step) -> str:
    parts = [
        f"attempt {step.attempt}" if step.attempt else "",
        f"on {step.node}" if step.node else "",
        f"epoch {step.epoch}" if step.epoch else "",
        f"until {clock_time(step.until)}" if step.until else "",
        step.outcome,
        step.event,
        f"#{step.dead_letter}" if step.dead_letter else "",
        step.run,
        step.detail,
        shortened(step.error, 120),
    ]
    return ", ".join(part for part in parts if part)
