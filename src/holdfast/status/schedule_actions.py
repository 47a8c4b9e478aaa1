"""Actions of operators on schedules.

Each action is defined here once, for the CLI, the API and the pages; see `operators`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.status.operators import Line, Operator, Preview, action, sentence

if TYPE_CHECKING:
    from holdfast.client.backfill import Backfilled
    from holdfast.client.schedules import Synced
    from holdfast.model.schedule import Schedule


@action("schedules", "add", "admin", "Add it")
async def add_schedule(
    by: Operator, line: Line, schedule: Schedule, *, replace: bool = False
) -> Schedule:
    """Add a schedule at run time, or replace one that was added this way."""
    added = await by.schedules.add(schedule, replace=replace)
    line.update(group=added.group, job=added.job, detail=added.name)
    return added


@add_schedule.previewed
async def _(by: Operator, schedule: Schedule, *, replace: bool = False) -> Preview:
    effect = f"{schedule.job} runs by the rule {schedule.rule}. Its next times are below."
    if schedule.at:
        effect = f"{schedule.job} runs once, at the time below."
    hint = await by.jobs.unserved(schedule.job, schedule.group)
    return Preview(f"Add {schedule.name}?", effect, *([sentence(hint)] if hint else []))


@action("schedules", "remove", "admin", "Remove it", danger=True)
async def remove_schedule(by: Operator, line: Line, name: str) -> None:
    """Remove a schedule; slots that are planned already are still sent."""
    await by.schedules.remove(name)
    line.update(detail=name)


@remove_schedule.previewed
async def _(by: Operator, name: str) -> Preview:
    from holdfast.errors import Unreadable

    effects = ["It stops firing. Slots that are planned already are still sent."]
    rule = ""
    try:
        schedule = await by.schedules.show(name)
    except Unreadable as error:
        effects.append(f"It is removed without being read ({error}).")
    else:
        rule = f" ({schedule.rule})"
        if schedule.source == "code":
            app = schedule.app
            effects.append(f"App {app} defines it in its code and adds it again when it starts.")
    return Preview(f"Remove schedule {name}{rule}?", *effects)


@action("schedules", "pause", "operator", "Pause it")
async def pause_schedule(by: Operator, line: Line, name: str) -> Schedule:
    """Pause a schedule; slots that fall due meanwhile are not caught up."""
    paused = await by.schedules.pause(name)
    line.update(detail=name)
    return paused


@pause_schedule.previewed
async def _(by: Operator, name: str) -> Preview:
    await by.schedules.show(name)
    return Preview(
        f"Pause {name}?",
        "It does not fire until it is resumed.",
        "Slots that fall due meanwhile stay missed: they are not caught up.",
        "Runs that have been sent continue.",
    )


@action("schedules", "resume", "operator", "Resume it")
async def resume_schedule(by: Operator, line: Line, name: str) -> Schedule:
    """Resume a paused schedule, from now on."""
    resumed = await by.schedules.resume(name)
    line.update(detail=name)
    return resumed


@resume_schedule.previewed
async def _(by: Operator, name: str) -> Preview:
    import msgspec

    from holdfast.clock import rfc3339
    from holdfast.model.schedule import next_after

    schedule = await by.schedules.show(name)
    active = msgspec.structs.replace(schedule, paused=0.0)
    slot = next_after(active, by.client.broker.server_now())
    following = f"its next slot is {rfc3339(slot)}" if slot else "it has no more slots"
    return Preview(
        f"Resume {name}?", f"It fires again from now on: {following}.", "Missed slots stay missed."
    )


@action("schedules", "trigger", "operator", "Send a run")
async def trigger_schedule(by: Operator, line: Line, name: str) -> str:
    """Send one run of a schedule now, in addition to its slots; returns the run's id."""
    run = await by.schedules.trigger(name)
    line.update(runs=[run], detail=name)
    return run


@trigger_schedule.previewed
async def _(by: Operator, name: str) -> Preview:
    schedule = await by.schedules.show(name)
    return Preview(
        f"Run {name} now?",
        f"One run of {schedule.job} is sent now, with the schedule's payload.",
        "Its slots stay as they are; the overlap policy does not apply to this run.",
    )


@action("schedules", "backfill", "operator", "Fire them")
async def backfill_schedule(
    by: Operator, line: Line, name: str, start: float, end: float
) -> Backfilled:
    """Fire the slots of a past period that did not run; those that did are left alone."""
    from holdfast.client.backfill import backfill

    done = await backfill(by.client, name, start, end)
    line.update(count=len(done.sent), detail=name)
    return done


@action("schedules", "sync", "admin", "Register them")
async def sync_schedules(
    by: Operator,
    line: Line,
    app: str,
    defined: dict[str, Schedule],
    *,
    release: str = "",
    allow_empty: bool = False,
) -> Synced:
    """Register the schedules of an app's code, without running anything."""
    done = await by.schedules.sync(app, defined, release=release, allow_empty=allow_empty)
    changed = len(done.added) + len(done.changed) + len(done.retired)
    if changed:
        line.update(count=changed, detail=app)
    return done
