"""What operators do with runs, dead letters, jobs, flows and limits.

Each action is defined here once, for the CLI, the API and the pages; see `operators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from holdfast.status.operators import (
    LONGEST_DETAIL,
    Line,
    Operator,
    Preview,
    action,
    many,
    sentence,
    shortlist,
)

if TYPE_CHECKING:
    from holdfast.client.client import EventSent
    from holdfast.client.run import Enqueued, Request
    from holdfast.model.limit import Rule
    from holdfast.status.dead import DeadLetter, Replayed, Selection
    from holdfast.status.jobs import JobInfo, Purged, Which
    from holdfast.status.runs import RunDetail

SELECT_MOST: Final = 100_000
"""Most dead letters for one action: their list is kept in memory."""


# ---- runs


@action("runs", "enqueue", "operator", "Send the run")
async def enqueue(by: Operator, line: Line, request: Request) -> Enqueued:
    """Send a run of a job; it is stored when this returns."""
    request = await by.jobs.keyed(request)
    enqueued = await by.client.enqueue(request)
    if not enqueued.duplicate:
        line.update(runs=[enqueued.run], group=request.group, job=request.spec.name)
    return enqueued


@action("events", "publish", "operator", "Publish the event")
async def publish_event(
    by: Operator, line: Line, event: str, body: bytes, id: str | None = None
) -> EventSent:
    """Publish an event to the jobs that subscribe to it; it is stored when this returns."""
    sent = await by.client.publish(event, body, id)
    if not sent.duplicate:
        line.update(detail=f"{event}, id {sent.id}")
    return sent


@action("runs", "cancel", "operator", "Cancel the run", danger=True)
async def cancel_run(by: Operator, line: Line, run: str) -> bool:
    """Cancel a run that is queued, delayed, waiting for a retry or running."""
    found = await by.runs.find(run)
    cancelled = await by.runs.cancel(found)
    if cancelled:
        line.update(runs=[run], group=found.group, job=found.job)
    return cancelled


@cancel_run.previewed
async def _(by: Operator, run: str) -> Preview:
    detail = await by.runs.show(run)
    running = detail.info.state == "running"
    return Preview(
        "Cancel this run?",
        f"It is {detail.info.state} now. {sentence(detail.where)}",
        "Its handler is interrupted; what it has done stays done."
        if running
        else "It will not start.",
        "It is not retried, and its payload is not kept: enqueue it again if you need it.",
        listed=[run],
    )


@action("runs", "retry", "operator", "Run it again")
async def retry_run(by: Operator, line: Line, run: str, edited: bytes | None = None) -> str:
    """Send a dead or lost run again, start the next attempt of a failed one now, or repeat one that
    has ended, as a new run with the same payload."""
    found = await by.runs.find(run)
    done = await by.runs.retry(found, edited)
    line.update(runs=[run], group=found.group, job=found.job, detail=done)
    return done


@retry_run.previewed
async def _(by: Operator, run: str, edited: bytes | None = None) -> Preview:
    detail = await by.runs.show(run)
    return Preview(
        "Run it again?" if edited is None else "Run it with this payload?",
        f"It is {detail.info.state} now. {sentence(detail.where)}",
        _retried(detail, edited),
        listed=[run] if edited is None else [edited.decode("utf-8", "replace")],
    )


def _retried(detail: RunDetail, edited: bytes | None) -> str:
    if detail.info.state == "failed" and edited is None:
        return "Its next attempt starts now instead of at its time."
    if detail.dead_letter:
        payload = " with this payload" if edited is not None else ""
        return (
            f"Its dead letter is sent again{payload} under the same run id, and its attempts are "
            "counted from zero."
        )
    what = "Its payload is sent again" if edited is None else "This payload is sent"
    return f"{what}, as a new run; under the same id if its job computes its key."


# ---- dead letters


@action("dead", "replay", "operator", "Send again")
async def replay_dead(
    by: Operator,
    line: Line,
    wanted: Selection,
    *,
    dry_run: bool = False,
    rate: float = 0.0,
    limit: int = SELECT_MOST,
    edited: bytes | None = None,
    done: list[Replayed] | None = None,
) -> list[Replayed]:
    """Send dead letters again; each becomes one run, even if it is replayed twice."""
    done = [] if done is None else done
    try:
        await by.dead.replay(
            wanted, dry_run=dry_run, rate=rate, limit=limit, edited=edited, done=done
        )
    finally:
        detail = "with an edited payload" if edited is not None else ""
        line.update(_letters_line(done, "replayed", wanted, detail))
    return done


@replay_dead.previewed
async def _(
    by: Operator,
    wanted: Selection,
    *,
    dry_run: bool = False,
    rate: float = 0.0,
    limit: int = SELECT_MOST,
    edited: bytes | None = None,
    done: list[Replayed] | None = None,
) -> Preview:
    letters = await by.dead.select(wanted, limit)
    if edited is not None:
        return _edited_preview(letters[0], edited)
    return Preview(
        f"Replay {many(len(letters), 'dead letter')}?",
        f"{many(len(letters), 'run')} of {_jobs_of(letters)} sent again, each under its own id "
        "with its attempts counted from zero.",
        "A letter whose run is sent leaves the list; one that was replayed already is refused.",
        listed=[f"{letter.id}  {letter.run}" for letter in letters],
    )


def _edited_preview(letter: DeadLetter, edited: bytes) -> Preview:
    import msgspec

    effects = [
        f"One run of {letter.job} is sent again under its own id, with the payload below instead "
        "of the one it had.",
        "The letter, with the old payload, leaves the list.",
    ]
    try:
        msgspec.json.decode(edited)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        effects.append("The payload is not JSON: jobs that expect JSON refuse it.")
    title = f"Replay dead letter {letter.id} with another payload?"
    return Preview(title, *effects, listed=[edited.decode("utf-8", "replace")])


@action("dead", "drop", "admin", "Remove for good", danger=True)
async def drop_dead(
    by: Operator, line: Line, wanted: Selection, *, dry_run: bool = False, limit: int = SELECT_MOST
) -> list[Replayed]:
    """Remove dead letters for good."""
    done: list[Replayed] = []
    try:
        await by.dead.drop(wanted, dry_run=dry_run, limit=limit, done=done)
    finally:
        line.update(_letters_line(done, "dropped", wanted))
    return done


@drop_dead.previewed
async def _(
    by: Operator, wanted: Selection, *, dry_run: bool = False, limit: int = SELECT_MOST
) -> Preview:
    letters = await by.dead.select(wanted, limit)
    return Preview(
        f"Drop {many(len(letters), 'dead letter')}?",
        f"{many(len(letters), 'dead letter')} removed for good, with payload and history.",
        "Their runs will not happen, and nothing can bring the letters back.",
        listed=[f"{letter.id}  {letter.run}" for letter in letters],
    )


def _letters_line(
    done: Sequence[Replayed], result: str, wanted: Selection, detail: str = ""
) -> Line:
    runs = [one.run for one in done if one.result == result]
    if not runs:
        return {}
    where = {name: getattr(wanted, name, "") for name in ("group", "job")}
    return {"runs": runs, "detail": detail, **where}


def _jobs_of(letters: Sequence[DeadLetter]) -> str:
    names = sorted({letter.job for letter in letters})
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more jobs" if len(names) > 3 else "")


# ---- jobs


@action("jobs", "pause", "operator", "Pause")
async def pause_job(by: Operator, line: Line, job: str = "", group: str = "") -> Sequence[JobInfo]:
    """Stop deliveries of a job or group, events included; running runs continue."""
    paused = await by.jobs.pause(job, group)
    line.update(job=job, group=group, count=len(paused))
    return paused


@pause_job.previewed
async def _(by: Operator, job: str = "", group: str = "") -> Preview:
    found = await by.jobs.meant(job, group)
    return Preview(
        f"Pause {job or f'group {group}'}?",
        "No worker gets a new run of it, from the queue or from its events.",
        f"{many(sum(one.in_flight for one in found), 'run')} in flight continue to their end.",
        "Runs that are sent meanwhile wait; nothing is lost.",
    )


@action("jobs", "resume", "operator", "Resume")
async def resume_job(by: Operator, line: Line, job: str = "", group: str = "") -> Sequence[JobInfo]:
    """Resume deliveries of a paused job or group."""
    resumed = await by.jobs.resume(job, group)
    line.update(job=job, group=group, count=len(resumed))
    return resumed


@resume_job.previewed
async def _(by: Operator, job: str = "", group: str = "") -> Preview:
    found = await by.jobs.meant(job, group)
    waiting = many(sum(one.waiting for one in found), "run")
    return Preview(
        f"Resume {job or f'group {group}'}?", f"Workers get its runs again; {waiting} waiting."
    )


@action("jobs", "purge", "admin", "Remove for good", danger=True)
async def purge_job(
    by: Operator, line: Line, job: str = "", group: str = "", which: Which = "all"
) -> list[Purged]:
    """Remove runs that have not started, for good; runs in flight and events stay."""
    done: list[Purged] = []
    try:
        await by.jobs.purge(job, group, which, done=done)
    finally:
        if done:
            count = sum(one.waiting + one.parked for one in done)
            line.update(job=job, group=group, count=count, detail=which)
    return done


@purge_job.previewed
async def _(by: Operator, job: str = "", group: str = "", which: Which = "all") -> Preview:
    found = await by.jobs.meant(job, group)
    waiting = sum(one.waiting for one in found) if which != "parked" else 0
    parked = sum(one.parked for one in found) if which != "waiting" else 0
    return Preview(
        f"Purge {', '.join(shortlist([f'{one.group}/{one.job}' for one in found]))}?",
        f"{many(waiting, 'run')} waiting and {many(parked, 'run')} delayed until later are removed "
        "for good: they will not run, and their payloads are gone.",
        "Runs in flight and events stay.",
    )


# ---- flows


@action("flows", "signal", "operator", "Send the event")
async def signal_flow(
    by: Operator, line: Line, event: str, key: str, body: bytes, who: str = ""
) -> EventSent:
    """Send an event to the flows that wait for it with this key, now or later."""
    sent = await by.flows.signal(event, key, body, who or by.who)
    if not sent.duplicate:
        line.update(detail=f"{event}, key {key}"[:LONGEST_DETAIL])
    return sent


@signal_flow.previewed
async def _(by: Operator, event: str, key: str, body: bytes, who: str = "") -> Preview:
    return Preview(
        f"Send event {event}?",
        f"Flows that wait for it with key {key} receive {_first(body)} and continue.",
        "It is kept for flows that wait for it later.",
    )


@action("flows", "cancel", "operator", "Cancel the flow", danger=True)
async def cancel_flow(by: Operator, line: Line, run: str) -> bool:
    """Cancel a flow and its children, and call its compensations."""
    found = (await by.flows.show(run)).info
    cancelled = await by.client.cancel(run, found.group, found.job)
    if cancelled:
        line.update(runs=[run], group=found.group, job=found.job)
    return cancelled


@cancel_flow.previewed
async def _(by: Operator, run: str) -> Preview:
    detail = await by.flows.show(run)
    return Preview(
        "Cancel this flow?",
        f"It is {detail.info.state} now, after {many(len(detail.lines), 'operation')}.",
        "Its children are cancelled, and its compensations (undo) are called.",
        listed=[run],
    )


@action("flows", "resume", "operator", "Resume it")
async def resume_flow(by: Operator, line: Line, run: str) -> None:
    """Call a parked flow now, for example after its code was repaired."""
    record = await by.flows.resume(run)
    line.update(runs=[run], group=record.group, job=record.job)


# ---- limits


@action("limits", "set", "operator", "Change it")
async def set_limit(
    by: Operator,
    line: Line,
    name: str,
    *,
    running: int | None = None,
    starts: str | None = None,
    burst: int | None = None,
) -> Rule:
    """Change a limit until its code changes; without numbers, go back to those of the code."""
    rule = await by.limits.set(name, running=running, starts=starts, burst=burst)
    line.update(detail=f"{name}: {rule.numbers}")
    return rule


@set_limit.previewed
async def _(
    by: Operator,
    name: str,
    *,
    running: int | None = None,
    starts: str | None = None,
    burst: int | None = None,
) -> Preview:
    info = (await by.limits.show(name)).info
    wanted = f"{running:,} running" if running is not None else starts or "what the code says"
    return Preview(
        f"Change limit {name} to {wanted}?",
        f"It applies at once, to all workers and to {many(info.waiting, 'waiting run')}.",
        "A lower number stops nobody: running runs end first. It stays until the code changes.",
    )


@action("limits", "pause", "operator", "Pause it")
async def pause_limit(by: Operator, line: Line, name: str) -> Rule:
    """Pause a limit: running runs continue, and all others wait."""
    rule = await by.limits.pause(name)
    line.update(detail=name)
    return rule


@pause_limit.previewed
async def _(by: Operator, name: str) -> Preview:
    info = (await by.limits.show(name)).info
    return Preview(
        f"Pause limit {name}?",
        f"No run of {', '.join(info.jobs)} starts; {many(info.held, 'run')} continue to their end.",
        "Runs that are sent meanwhile wait in line; nothing is lost.",
    )


@action("limits", "resume", "operator", "Resume it")
async def resume_limit(by: Operator, line: Line, name: str) -> Rule:
    """Resume a paused limit."""
    rule = await by.limits.resume(name)
    line.update(detail=name)
    return rule


@resume_limit.previewed
async def _(by: Operator, name: str) -> Preview:
    info = (await by.limits.show(name)).info
    return Preview(f"Resume limit {name}?", f"{many(info.waiting, 'run')} in line start in turn.")


def _first(body: bytes) -> str:
    """A payload in a sentence."""
    text = body.decode(errors="replace")
    return text if len(text) <= 200 else f"{text[:200]}…"
