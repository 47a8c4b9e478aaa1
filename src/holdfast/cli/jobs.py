"""`holdfast jobs`: what waits for each job; pause, resume and purge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import (
    Cli,
    YesOption,
    confirm_action,
    connected,
    emit,
    given,
    note,
    operating,
    say,
    table,
)
from holdfast.status import actions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.status.jobs import JobInfo

JobArgument = Annotated[
    str,
    typer.Argument(metavar="JOB", help="The job; with --group alone, every job of the group."),
]
GroupOption = Annotated[str, typer.Option("--group", metavar="NAME", help="The job's group.")]


def register(app: Cli) -> None:
    """Add `holdfast jobs`."""
    jobs = app.noun("jobs", "Look at jobs and their queues; pause, resume, purge.")
    jobs.command("list")(list_jobs)
    jobs.command("pause", help=actions.pause_job.doc)(pause)
    jobs.command("resume", help=actions.resume_job.doc)(resume)
    jobs.command("purge", help=actions.purge_job.doc)(purge)


async def list_jobs(job: JobArgument = "", group: GroupOption = "") -> None:
    """List jobs with what is waiting, in flight, delayed and dead."""
    from holdfast.status.jobs import Jobs

    async with connected() as client:
        found = await Jobs(client).list(job, group)
    _print(found)


def _print(found: Sequence[JobInfo]) -> None:
    if given().json:
        emit(found)
        return
    table(
        ("group", "job", "state", "waiting", "in flight", "parked", "dead", "oldest", "on"),
        [
            (
                info.group,
                info.job,
                "paused" if info.paused else ("" if info.served else "never served"),
                info.waiting,
                info.in_flight,
                info.parked,
                info.dead,
                _age(info.oldest_seconds),
                ", ".join(e.event for e in info.events),
            )
            for info in found
        ],
        empty="no job is known yet: start a worker",
    )


def _age(seconds: float | None) -> str:
    from holdfast import durations

    return "" if seconds is None else durations.text(round(seconds, 1))


async def pause(job: JobArgument = "", group: GroupOption = "") -> None:
    async with operating() as by:
        _print(await actions.pause_job(by, job, group))


async def resume(job: JobArgument = "", group: GroupOption = "") -> None:
    async with operating() as by:
        _print(await actions.resume_job(by, job, group))


async def purge(
    job: JobArgument = "",
    group: GroupOption = "",
    which: Annotated[
        str,
        typer.Option(
            "--which", metavar="WHICH", help="Remove waiting runs, parked ones (delayed), or all."
        ),
    ] = "all",
    yes: YesOption = False,
) -> None:
    from holdfast.status.jobs import check_which

    kind = check_which(which)
    async with operating() as by:
        if not yes:
            await confirm_action(actions.purge_job, by, job, group, kind)
        purged = await actions.purge_job(by, job, group, kind)
    if given().json:
        emit(purged)
        return
    for one in purged:
        say(f"{one.group}/{one.job}: {one.waiting} waiting and {one.parked} parked runs removed")
    if not purged:
        note("nothing to purge")
