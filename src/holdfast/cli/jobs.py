"""`holdfast jobs`: what waits for each job; pause, resume and purge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import Cli, confirm, connected, emit, given, note, say, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.status.jobs import JobInfo

JobArgument = Annotated[
    str,
    typer.Argument(metavar="JOB", help="The job; none with --group: all of the group's."),
]
GroupOption = Annotated[str, typer.Option("--group", metavar="NAME", help="The job's group.")]


def register(app: Cli) -> None:
    """Add `holdfast jobs`."""
    jobs = app.noun("jobs", "Look at jobs and their queues; pause, resume, purge.")
    jobs.command("list")(list_jobs)
    jobs.command("pause")(pause)
    jobs.command("resume")(resume)
    jobs.command("purge")(purge)


async def list_jobs(job: JobArgument = "", group: GroupOption = "") -> None:
    """List jobs: waiting, in flight, put off, dead."""
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
    """Stop deliveries of a job or group, events included; what is running goes on."""
    from holdfast.status.jobs import Jobs

    async with connected() as client:
        _print(await Jobs(client).pause(job, group))


async def resume(job: JobArgument = "", group: GroupOption = "") -> None:
    """Let a paused job or group go on."""
    from holdfast.status.jobs import Jobs

    async with connected() as client:
        _print(await Jobs(client).resume(job, group))


async def purge(
    job: JobArgument = "",
    group: GroupOption = "",
    which: Annotated[
        str,
        typer.Option("--which", metavar="WHICH", help="waiting, parked (delayed, retries) or all."),
    ] = "all",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove runs that have not started. It cannot be undone."""
    from holdfast.status.jobs import Jobs, check_which

    kind = check_which(which)
    async with connected() as client:
        jobs = Jobs(client)
        if not yes:
            found = await jobs.targets(job, group)
            confirm(f"Purge {kind} runs of {', '.join(f'{g}/{j}' for g, j in found)}?")
        purged = await jobs.purge(job, group, kind)
    if given().json:
        emit(purged)
        return
    for one in purged:
        say(f"{one.group}/{one.job}: {one.waiting} waiting and {one.parked} parked runs removed")
    if not purged:
        note("nothing to purge")
