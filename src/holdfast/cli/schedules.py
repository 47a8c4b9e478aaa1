"""`holdfast schedules …`: look at schedules, change them, and ask why a slot did or did not run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import Cli, confirm, connected, emit, given, note, pairs, say, table

if TYPE_CHECKING:
    from holdfast.model.schedule import Schedule
    from holdfast.status.schedules import Why

Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule.")]
Text = str | None


def register(app: Cli) -> None:
    """Add `holdfast schedules`."""
    noun = app.noun("schedules", help="Schedules and their slots.")
    noun.command("list")(list_)
    for function in (show, add, remove, pause, resume, trigger, backfill, why, sync):
        noun.command(function.__name__)(function)
    noun.command("next")(next_)


async def list_(
    app: Annotated[str, typer.Option("--app", metavar="NAME", help="Of one app only.")] = "",
) -> None:
    """Show every schedule."""
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
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job that it sends.")],
    cron: Annotated[Text, typer.Option("--cron", help="5 or 6 fields, or @hourly.")] = None,
    every: Annotated[Text, typer.Option("--every", help="An interval: 30s, 5m.")] = None,
    at: Annotated[Text, typer.Option("--at", help="Once: 2026-11-16T09:00:00+01:00.")] = None,
    tz: Annotated[str, typer.Option("--tz", help="Time zone of --cron.")] = "UTC",
    group: Annotated[str, typer.Option("--group", help="Group of the job.")] = "default",
    payload: Annotated[str, typer.Option("--payload", help="JSON for the job.")] = "",
    header: Annotated[
        list[str] | None, typer.Option("--header", help="NAME=VALUE, as often as needed.")
    ] = None,
    jitter: Annotated[str, typer.Option("--jitter", help="Spread over so long.")] = "0",
    start: Annotated[Text, typer.Option("--start", help="Not before this time.")] = None,
    end: Annotated[Text, typer.Option("--end", help="Not after this time.")] = None,
    catch_up: Annotated[str, typer.Option("--catch-up", help="all, last or none.")] = "all",
    limit: Annotated[int, typer.Option("--limit", help="Most slots to make up for.")] = 100,
    overlap: Annotated[
        str, typer.Option("--overlap", help="allow, skip, queue or cancel.")
    ] = "allow",
    run_on_start: Annotated[
        bool, typer.Option("--run-on-start", help="One slot more, right now.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace one that exists.")] = False,
) -> None:
    """Add a schedule at run time."""
    from holdfast.client.schedules import Schedules
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
        headers=_headers(header or []),
        jitter=jitter,
        start=start,
        end=end,
        catch_up=catch_up,
        limit=limit,
        overlap=overlap,
        run_on_start=run_on_start,
    )
    async with connected(create=True) as client:
        _print(await Schedules(client).add(schedule, replace=replace))


def _headers(given_ones: list[str]) -> dict[str, str]:
    from holdfast.errors import InvalidInput

    found = {}
    for text in given_ones:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidInput(f"--header takes NAME=VALUE, not {text!r}")
        found[name.strip()] = value.strip()
    return found


async def remove(
    name: Name, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False
) -> None:
    """Remove a schedule; slots that are planned already are still sent."""
    from holdfast.client.schedules import Schedules
    from holdfast.errors import Unreadable

    async with connected() as client:
        schedules = Schedules(client)
        try:
            schedule = await schedules.show(name)
            rule, app = schedule.rule, schedule.app if schedule.source == "code" else ""
        except Unreadable:
            rule, app = "it cannot be read", ""
        if app:
            note(f"app {app!r} defines it in its code and will add it again when it starts")
        if not yes:
            confirm(f"Remove schedule {name} ({rule})?")
        await schedules.remove(name)
    say(f"{name} is removed")


async def pause(name: Name) -> None:
    """Let a schedule fire no more; what it misses meanwhile is not made up for."""
    from holdfast.client.schedules import Schedules

    async with connected() as client:
        _print(await Schedules(client).pause(name))


async def resume(name: Name) -> None:
    """Let a paused schedule fire again, from now on."""
    from holdfast.client.schedules import Schedules

    async with connected() as client:
        _print(await Schedules(client).resume(name))


async def trigger(name: Name) -> None:
    """Send one run of a schedule now, beside its slots; prints the run's id."""
    from holdfast.client.schedules import Schedules

    async with connected() as client:
        run = await Schedules(client).trigger(name)
    if given().json:
        emit({"run": run})
    else:
        say(run)


async def backfill(
    name: Name,
    start: Annotated[str, typer.Option("--from", help="2026-11-16T00:00:00Z.")],
    end: Annotated[str, typer.Option("--to", help="Included; in the past.")],
) -> None:
    """Fire the slots of a past time that did not run. Those that did are left alone."""
    from holdfast.client.backfill import backfill as fill
    from holdfast.durations import instant

    async with connected() as client:
        done = await fill(client, name, instant(start, "--from"), instant(end, "--to"))
    if given().json:
        emit(done)
        return
    say(f"{len(done.sent)} slots sent, {len(done.known)} had been sent before")


async def next_(
    name: Name,
    count: Annotated[int, typer.Option("--count", "-n", help="How many.")] = 10,
) -> None:
    """Show the next instants of a schedule."""
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
        note("it has no instant to come")


async def why(
    name: Name,
    time: Annotated[
        Text, typer.Argument(metavar="[TIME]", help="2026-11-16T09:00:00Z; else the newest.")
    ] = None,
) -> None:
    """Explain what became of a slot, also of one that did not run."""
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
    release: Annotated[Text, typer.Option("--release", metavar="N", help="41, 1.10.2.")] = None,
    allow_empty: Annotated[
        bool, typer.Option("--allow-empty", help="An app without schedules retires all of its.")
    ] = False,
) -> None:
    """Register the schedules of an app's code, without running anything."""
    from holdfast.cli.loading import load_app
    from holdfast.client.schedules import Schedules
    from holdfast.config import SchedulerConfig, load

    loaded = load_app(app)
    config = load(SchedulerConfig, release=release)
    async with connected(create=True) as client:
        done = await Schedules(client).sync(
            loaded.name, loaded.schedules, release=config.release, allow_empty=allow_empty
        )
    if given().json:
        emit(done)
    elif done.newer:
        note(f"nothing changed: release {done.newer} of app {loaded.name} is registered")
    else:
        say(
            f"{len(done.added)} added, {len(done.changed)} changed, "
            f"{len(done.retired)} retired, {len(done.kept)} as they were"
        )
