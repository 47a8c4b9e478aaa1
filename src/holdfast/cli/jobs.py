"""`holdfast jobs`: what waits for each job; pause, resume and purge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from holdfast.cli import out
from holdfast.cli.command import command, operating
from holdfast.cli.options import YesOption, argument, option
from holdfast.status import actions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.status.jobs import JobInfo

JobArgument = Annotated[
    str, argument("The job; with --group alone, every job of the group.", "JOB", "jobs")
]
GroupOption = Annotated[str, option("The job's group.", "NAME")]


@command("jobs list")
async def list_jobs(job: JobArgument = "", group: GroupOption = "") -> None:
    """List jobs with what is waiting, in flight, delayed and dead."""
    async with operating() as by:
        _print(await by.jobs.list(job, group))


def _print(found: Sequence[JobInfo]) -> None:
    out.listing(
        found,
        "group",
        "job",
        ("state", lambda info: "paused" if info.paused else "" if info.served else "never served"),
        "waiting",
        "in_flight",
        "parked",
        "dead",
        ("oldest", lambda info: out.age(info.oldest_seconds)),
        ("on", lambda info: ", ".join(event.event for event in info.events)),
        empty="no job is known yet: start a worker",
    )


@command("jobs pause", help=actions.pause_job.doc)
async def pause(job: JobArgument = "", group: GroupOption = "") -> None:
    async with operating() as by:
        _print(await actions.pause_job(by, job, group))


@command("jobs resume", help=actions.resume_job.doc)
async def resume(job: JobArgument = "", group: GroupOption = "") -> None:
    async with operating() as by:
        _print(await actions.resume_job(by, job, group))


@command("jobs purge", help=actions.purge_job.doc)
async def purge(
    job: JobArgument = "",
    group: GroupOption = "",
    which: Annotated[
        Literal["waiting", "parked", "all"], option("Remove waiting runs, parked ones, or all.")
    ] = "all",
    yes: YesOption = False,
) -> None:
    async with operating() as by:
        if not yes:
            await out.confirm_action(actions.purge_job, by, job, group, which)
        purged = await actions.purge_job(by, job, group, which)
    if out.as_json(purged):
        return
    for one in purged:
        out.say(
            f"{one.group}/{one.job}: {one.waiting} waiting and {one.parked} parked runs removed"
        )
    if not purged:
        out.note("nothing to purge")
