"""`holdfast schedules …`: list and change schedules, and explain why a slot did or did not run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from holdfast.cli import out
from holdfast.cli.command import command, operating
from holdfast.cli.options import (
    AppArgument,
    HeaderOption,
    ReleaseOption,
    YesOption,
    argument,
    option,
)
from holdfast.cli.typed import headers_of
from holdfast.status import schedule_actions as actions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.model.schedule import Schedule

Name = Annotated[str, argument("The schedule.", "NAME", "schedules")]
Text = str | None


@command("schedules list")
async def list_(app: Annotated[str, option("Only schedules of this app.", "NAME")] = "") -> None:
    """List every schedule."""
    async with operating() as by:
        found = await by.schedules.list(app=app)
    out.listing(
        found,
        "name",
        "rule",
        "job",
        "group",
        ("state", _state),
        "app",
        "overlap",
        "catch_up",
        empty="no schedules: define one with @app.cron, or 'holdfast schedules add'",
    )


def _state(schedule: Schedule) -> str:
    return "paused" if schedule.paused else "active"


@command("schedules show")
async def show(name: Name) -> None:
    """Show one schedule and its newest slots."""
    from holdfast.status.schedules import SlotHistory

    async with operating() as by:
        schedule = await by.schedules.show(name)
        history = SlotHistory(by.client)
        recent = await history.recent(name, 10)
        coming = [moment for moment, _ in await history.next(name, 3)]
    if out.as_json({"schedule": schedule, "slots": recent, "next": coming}):
        return
    _print(schedule, coming)
    if recent:
        out.say("")
        out.listing(
            recent,
            ("slot", lambda one: _time(one[0])),
            ("state", lambda one: f"{one[1].state} {one[1].reason}".strip()),
            ("sent", lambda one: _time(one[1].dispatched)),
            ("by", lambda one: one[1].sender or one[1].node),
        )


def _time(at: float) -> str:
    from holdfast.clock import rfc3339

    return rfc3339(at) if at else ""


def _print(schedule: Schedule, coming: Sequence[float] = ()) -> None:
    from holdfast import durations

    if out.as_json(schedule):
        return
    out.pairs(
        [
            ("name", schedule.name),
            ("rule", schedule.rule),
            ("job", f"{schedule.group}/{schedule.job}"),
            ("state", _state(schedule)),
            ("jitter", durations.text(schedule.jitter) if schedule.jitter else ""),
            ("from", _time(schedule.start)),
            ("until", _time(schedule.end)),
            ("payload", bytes(schedule.payload).decode()),
            ("headers", schedule.headers),
            ("catch up", f"{schedule.catch_up}, at most {schedule.limit}"),
            ("overlap", schedule.overlap),
            ("ran on start", _time(schedule.first)),
            ("app", schedule.app),
            ("release", schedule.release),
            ("counts since", _time(schedule.since)),
            ("next", ", ".join(map(_time, coming))),
        ]
    )


@command("schedules add", help=actions.add_schedule.doc)
async def add(
    name: Name,
    job: Annotated[str, argument("The job to run.", "JOB")],
    cron: Annotated[Text, option("Cron rule: 5 or 6 fields, or @hourly.", "RULE")] = None,
    every: Annotated[Text, option("Interval, e.g. 30s or 5m.", "TIME")] = None,
    at: Annotated[Text, option("Once, e.g. 2026-11-16T09:00:00+01:00.", "TIME")] = None,
    tz: Annotated[str, option("Time zone of --cron.", "ZONE")] = "UTC",
    group: Annotated[str, option("Group of the job.", "NAME")] = "default",
    payload: Annotated[str, option("Payload of each run.", "JSON")] = "",
    header: HeaderOption = None,
    jitter: Annotated[str, option("Delay each slot by up to TIME.", "TIME")] = "0",
    start: Annotated[Text, option("No slot before this time.", "TIME")] = None,
    end: Annotated[Text, option("No slot after this time.", "TIME")] = None,
    catch_up: Annotated[str, option("Missed slots to catch up: all, last or none.", "HOW")] = "all",
    limit: Annotated[int, option("Catch up at most N slots.", "N")] = 100,
    overlap: Annotated[
        str, option("When the previous run has not ended: allow, skip, queue or cancel.", "HOW")
    ] = "allow",
    run_on_start: Annotated[bool, option("Also run it once, right now.")] = False,
    replace: Annotated[bool, option("Replace an existing schedule.")] = False,
) -> None:
    from holdfast.model.schedule import define

    schedule = define(
        name,
        job,
        cron=cron,
        every=every,
        at=at,
        tz=tz,
        group=group,
        body=payload.encode(),
        headers=headers_of(header),
        jitter=jitter,
        start=start,
        end=end,
        catch_up=catch_up,
        limit=limit,
        overlap=overlap,
        run_on_start=run_on_start,
    )
    async with operating(create=True) as by:
        _print(await actions.add_schedule(by, schedule, replace=replace))


@command("schedules remove", help=actions.remove_schedule.doc)
async def remove(name: Name, yes: YesOption = False) -> None:
    async with operating() as by:
        if not yes:
            await out.confirm_action(actions.remove_schedule, by, name)
        await actions.remove_schedule(by, name)
    out.result({"schedule": name, "removed": True}, f"{name} is removed")


@command("schedules pause", help=actions.pause_schedule.doc)
async def pause(name: Name) -> None:
    async with operating() as by:
        _print(await actions.pause_schedule(by, name))


@command("schedules resume", help=actions.resume_schedule.doc)
async def resume(name: Name) -> None:
    async with operating() as by:
        _print(await actions.resume_schedule(by, name))


@command("schedules trigger", help=actions.trigger_schedule.doc)
async def trigger(name: Name) -> None:
    async with operating() as by:
        run = await actions.trigger_schedule(by, name)
    out.result({"run": run}, run)


@command("schedules backfill", help=actions.backfill_schedule.doc)
async def backfill(
    name: Name,
    start: Annotated[str, option("First slot, e.g. 2026-11-16T00:00:00Z.", "TIME", "--from")],
    end: Annotated[str, option("Last slot; in the past.", "TIME", "--to")],
) -> None:
    from holdfast.durations import instant

    async with operating() as by:
        done = await actions.backfill_schedule(
            by, name, instant(start, "--from"), instant(end, "--to")
        )
    out.result(done, f"{len(done.sent)} slots sent, {len(done.known)} had been sent before")


@command("schedules next")
async def next_(
    name: Name, count: Annotated[int, option("Show at most N.", "N", "--count", "-n")] = 10
) -> None:
    """Show the next slots of a schedule."""
    from holdfast.status.schedules import SlotHistory

    async with operating() as by:
        found = await SlotHistory(by.client).next(name, count)
    if out.as_json([{"slot": _time(moment), "due": _time(due)} for moment, due in found]):
        return
    for moment, due in found:
        out.say(_time(moment) + (f"  sent at {_time(due)}" if due != moment else ""))
    if not found:
        out.note("it has no more slots")


@command("schedules why")
async def why(
    name: Name,
    time: Annotated[
        Text,
        argument("Time of the slot, e.g. 2026-11-16T09:00:00Z; default: the newest.", "[TIME]"),
    ] = None,
) -> None:
    """Explain why a slot did or did not run."""
    from holdfast.durations import instant
    from holdfast.status.schedules import SlotHistory

    async with operating() as by:
        at = instant(time, "TIME") if time is not None else None
        found = await SlotHistory(by.client).why(name, at)
    if out.as_json(found):
        return
    out.pairs(
        [
            ("schedule", found.schedule),
            ("slot", found.time),
            ("state", found.verdict),
            ("why", found.explanation),
            ("run", found.run),
            ("run is", found.run_state),
        ]
    )


@command("schedules sync", help=actions.sync_schedules.doc)
async def sync(
    app: AppArgument,
    release: ReleaseOption = None,
    allow_empty: Annotated[
        bool, option("Allow an app without schedules, which removes all that it had.")
    ] = False,
) -> None:
    from holdfast.cli.loading import load_app
    from holdfast.config import SchedulerConfig, load

    loaded = load_app(app)
    config = load(SchedulerConfig, release=release)
    async with operating(create=True) as by:
        done = await actions.sync_schedules(
            by, loaded.name, loaded.schedules, release=config.release, allow_empty=allow_empty
        )
    if out.as_json(done):
        return
    if done.newer:
        out.note(f"nothing changed: release {done.newer} of app {loaded.name} is registered")
    else:
        out.say(
            f"{len(done.added)} added, {len(done.changed)} changed, "
            f"{len(done.retired)} removed, {len(done.kept)} unchanged"
        )
