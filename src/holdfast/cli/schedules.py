"""`holdfast schedules …`: list and change schedules, and explain why a slot did or did not run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import (
    Cli,
    HeaderOption,
    YesOption,
    confirm_action,
    connected,
    emit,
    given,
    headers_of,
    note,
    operating,
    pairs,
    say,
    table,
)
from holdfast.status import actions

if TYPE_CHECKING:
    from holdfast.model.schedule import Schedule
    from holdfast.status.schedules import Why

Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule.")]
Text = str | None


def register(app: Cli) -> None:
    """Add `holdfast schedules`."""
    noun = app.noun("schedules", help="Schedules and their slots.")
    noun.command("list")(list_)
    noun.command("show")(show)
    for function in (add, remove, pause, resume, trigger, backfill, sync):
        verb = function.__name__
        noun.command(verb, help=actions.ACTIONS["schedules", verb].doc)(function)
    noun.command("why")(why)
    noun.command("next")(next_)


async def list_(
    app: Annotated[
        str, typer.Option("--app", metavar="NAME", help="Only schedules of this app.")
    ] = "",
) -> None:
    """List every schedule."""
    from holdfast.client.schedules import Schedules

    async with connected() as client:
        found = await Schedules(client).list(app=app)
    if given().json:
        emit(found)
        return
    table(
        ["name", "rule", "job", "group", "state", "app", "overlap", "catch up"],
        [[s.name, s.rule, s.job, s.group, _state(s), s.app, s.overlap, s.catch_up] for s in found],
        empty="no schedules: define one with @app.cron, or 'holdfast schedules add'",
    )


def _state(schedule: Schedule) -> str:
    return "paused" if schedule.paused else "active"


async def show(name: Name) -> None:
    """Show one schedule and its newest slots."""
    from holdfast.client.schedules import Schedules
    from holdfast.status.schedules import SlotHistory

    async with connected() as client:
        schedule = await Schedules(client).show(name)
        history = SlotHistory(client)
        recent, coming = await history.recent(name, 10), await history.next(name, 3)
    if given().json:
        emit({"schedule": schedule, "slots": recent, "next": [moment for moment, _ in coming]})
        return
    _print(schedule)
    from holdfast.clock import rfc3339

    pairs([("next", ", ".join(rfc3339(moment) for moment, _ in coming))])
    if recent:
        say("")
        table(
            ["slot", "state", "sent", "by"],
            [
                [
                    rfc3339(moment),
                    f"{slot.state} {slot.reason}".strip(),
                    rfc3339(slot.dispatched) if slot.dispatched else "",
                    slot.sender or slot.node,
                ]
                for moment, slot in recent
            ],
        )


def _print(schedule: Schedule) -> None:
    from holdfast import durations
    from holdfast.clock import rfc3339

    if given().json:
        emit(schedule)
        return
    pairs(
        [
            ("name", schedule.name),
            ("rule", schedule.rule),
            ("job", f"{schedule.group}/{schedule.job}"),
            ("state", _state(schedule)),
            ("jitter", durations.text(schedule.jitter) if schedule.jitter else ""),
            ("from", rfc3339(schedule.start) if schedule.start else ""),
            ("until", rfc3339(schedule.end) if schedule.end else ""),
            ("payload", bytes(schedule.payload).decode()),
            ("headers", schedule.headers),
            ("catch up", f"{schedule.catch_up}, at most {schedule.limit}"),
            ("overlap", schedule.overlap),
            ("ran on start", rfc3339(schedule.first) if schedule.first else ""),
            ("app", schedule.app),
            ("release", schedule.release),
            ("counts since", rfc3339(schedule.since)),
        ]
    )


async def add(
    name: Name,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job to run.")],
    cron: Annotated[
        Text, typer.Option("--cron", metavar="RULE", help="Cron rule: 5 or 6 fields, or @hourly.")
    ] = None,
    every: Annotated[
        Text, typer.Option("--every", metavar="TIME", help="Interval, e.g. 30s or 5m.")
    ] = None,
    at: Annotated[
        Text, typer.Option("--at", metavar="TIME", help="Once, e.g. 2026-11-16T09:00:00+01:00.")
    ] = None,
    tz: Annotated[str, typer.Option("--tz", metavar="ZONE", help="Time zone of --cron.")] = "UTC",
    group: Annotated[
        str, typer.Option("--group", metavar="NAME", help="Group of the job.")
    ] = "default",
    payload: Annotated[
        str, typer.Option("--payload", metavar="JSON", help="Payload of each run.")
    ] = "",
    header: HeaderOption = None,
    jitter: Annotated[
        str, typer.Option("--jitter", metavar="TIME", help="Delay each slot by up to TIME.")
    ] = "0",
    start: Annotated[
        Text, typer.Option("--start", metavar="TIME", help="No slot before this time.")
    ] = None,
    end: Annotated[
        Text, typer.Option("--end", metavar="TIME", help="No slot after this time.")
    ] = None,
    catch_up: Annotated[
        str,
        typer.Option(
            "--catch-up", metavar="HOW", help="Missed slots to catch up: all, last or none."
        ),
    ] = "all",
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", help="Catch up at most N slots.")
    ] = 100,
    overlap: Annotated[
        str,
        typer.Option(
            "--overlap",
            metavar="HOW",
            help="While the last run is not over: allow, skip, queue or cancel.",
        ),
    ] = "allow",
    run_on_start: Annotated[
        bool, typer.Option("--run-on-start", help="Also run it once, right now.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an existing schedule.")
    ] = False,
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


async def remove(name: Name, yes: YesOption = False) -> None:
    async with operating() as by:
        if not yes:
            await confirm_action(actions.remove_schedule, by, name)
        await actions.remove_schedule(by, name)
    say(f"{name} is removed")


async def pause(name: Name) -> None:
    async with operating() as by:
        _print(await actions.pause_schedule(by, name))


async def resume(name: Name) -> None:
    async with operating() as by:
        _print(await actions.resume_schedule(by, name))


async def trigger(name: Name) -> None:
    async with operating() as by:
        run = await actions.trigger_schedule(by, name)
    if given().json:
        emit({"run": run})
    else:
        say(run)


async def backfill(
    name: Name,
    start: Annotated[
        str, typer.Option("--from", metavar="TIME", help="First slot, e.g. 2026-11-16T00:00:00Z.")
    ],
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="Last slot; in the past.")],
) -> None:
    from holdfast.durations import instant

    async with operating() as by:
        done = await actions.backfill_schedule(
            by, name, instant(start, "--from"), instant(end, "--to")
        )
    if given().json:
        emit(done)
        return
    say(f"{len(done.sent)} slots sent, {len(done.known)} had been sent before")


async def next_(
    name: Name,
    count: Annotated[int, typer.Option("--count", "-n", metavar="N", help="Show at most N.")] = 10,
) -> None:
    """Show the next slots of a schedule."""
    from holdfast.clock import rfc3339
    from holdfast.status.schedules import SlotHistory

    async with connected() as client:
        found = await SlotHistory(client).next(name, count)
    if given().json:
        emit([{"slot": rfc3339(moment), "due": rfc3339(due)} for moment, due in found])
        return
    for moment, due in found:
        say(rfc3339(moment) + (f"  sent at {rfc3339(due)}" if due != moment else ""))
    if not found:
        note("it has no further slot")


async def why(
    name: Name,
    time: Annotated[
        Text,
        typer.Argument(
            metavar="[TIME]",
            help="Time of the slot, e.g. 2026-11-16T09:00:00Z; default: the newest.",
        ),
    ] = None,
) -> None:
    """Explain why a slot did or did not run."""
    from holdfast.durations import instant
    from holdfast.status.schedules import SlotHistory

    async with connected() as client:
        at = instant(time, "TIME") if time is not None else None
        found = await SlotHistory(client).why(name, at)
    _print_why(found)


def _print_why(found: Why) -> None:
    if given().json:
        emit(found)
        return
    pairs(
        [
            ("schedule", found.schedule),
            ("slot", found.time),
            ("state", found.verdict),
            ("why", found.explanation),
            ("run", found.run),
            ("run is", found.run_state),
        ]
    )


async def sync(
    app: Annotated[str, typer.Argument(metavar="APP", help="The app, as module:object.")],
    release: Annotated[
        Text, typer.Option("--release", metavar="N", help="Release of the app, e.g. 41 or 1.10.2.")
    ] = None,
    allow_empty: Annotated[
        bool,
        typer.Option("--allow-empty", help="Remove all schedules of an app whose code has none."),
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
    if given().json:
        emit(done)
    elif done.newer:
        note(f"nothing changed: release {done.newer} of app {loaded.name} is registered")
    else:
        say(
            f"{len(done.added)} added, {len(done.changed)} changed, "
            f"{len(done.retired)} removed, {len(done.kept)} unchanged"
        )
