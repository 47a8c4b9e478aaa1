"""What operators can do: each action is defined here once, for the CLI, the API and the pages.

An action is a function under the decorator `action`. Its docstring is the sentence that help texts
and the API show; its role says who may do it on the web; its preview says what it would do, for a
confirmation. Calling an action performs it and then writes one line to the audit.

Guaranteed: an action that had an effect writes one line, even when interrupted halfway; one that
was refused, or changed nothing, writes none. Not guaranteed: that the line is stored (see `audit`).

Nothing heavy is imported at the top, because every start of the CLI reads its help from here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, Literal, ParamSpec, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.client import Client
    from holdfast.client.backfill import Backfilled
    from holdfast.client.run import Enqueued, Request
    from holdfast.client.schedules import Schedules, Synced
    from holdfast.model.fleet import FleetRequest, FleetRun
    from holdfast.model.schedule import Schedule
    from holdfast.settings.plan import Plan
    from holdfast.settings.publisher import Publisher
    from holdfast.settings.tree import Tree
    from holdfast.status.audit import Audit
    from holdfast.status.dead import DeadLetter, DeadLetters, Replayed, Selection
    from holdfast.status.fleet import Agents, FleetStatus
    from holdfast.status.jobs import JobInfo, Jobs, Purged, Which
    from holdfast.status.nodes import Nodes
    from holdfast.status.runs import Runs
    from holdfast.status.stranded import Case, Stranded
    from holdfast.status.unreadable import UnreadableRecords

    Fixed = tuple[list[str], dict[str, str]]

P = ParamSpec("P")
R = TypeVar("R")

Role = Literal["operator", "admin"]
"""Who may do it on the web; only an admin may do what cannot be undone. On the command line the
NATS login decides."""

Line = dict[str, Any]
"""What an action reports to the audit: members of `audit.AuditLine`. Empty: nothing changed."""

SELECT_MOST: Final = 100_000
"""Most dead letters for one action: their list is kept in memory."""

NAMED: Final = 8
"""Objects that a confirmation lists by name; more do not fit into a dialog."""


class Operator:
    """An operator who acts through a client, and the services they act on."""

    def __init__(self, client: Client, who: str = "") -> None:
        self.client = client
        self.who = who
        """Their name in the audit; empty: the operating-system user."""

    @cached_property
    def audit(self) -> Audit:
        from holdfast.status.audit import Audit

        return Audit(self.client, self.who)

    @cached_property
    def runs(self) -> Runs:
        from holdfast.status.runs import Runs

        return Runs(self.client)

    @cached_property
    def dead(self) -> DeadLetters:
        from holdfast.status.dead import DeadLetters

        return DeadLetters(self.client)

    @cached_property
    def jobs(self) -> Jobs:
        from holdfast.status.jobs import Jobs

        return Jobs(self.client)

    @cached_property
    def schedules(self) -> Schedules:
        from holdfast.client.schedules import Schedules

        return Schedules(self.client)

    @cached_property
    def nodes(self) -> Nodes:
        from holdfast.status.nodes import Nodes

        return Nodes(self.client)

    @cached_property
    def agents(self) -> Agents:
        from holdfast.status.fleet import Agents

        return Agents(self.client)

    @cached_property
    def fleet(self) -> FleetStatus:
        from holdfast.status.fleet import FleetStatus

        return FleetStatus(self.client)

    @cached_property
    def unreadable(self) -> UnreadableRecords:
        from holdfast.status.unreadable import UnreadableRecords

        return UnreadableRecords(self.client)


class Preview:
    """What an action would do, shown for confirmation."""

    def __init__(self, title: str, *effects: str, listed: Sequence[str] = ()) -> None:
        self.title = title
        self.effects = effects
        self.listed = shortlist(listed)


class Action(Generic[P, R]):
    """One thing that an operator can do: `await pause_job(operator, job, group)`."""

    def __init__(
        self,
        noun: str,
        verb: str,
        role: Role,
        button: str,
        danger: bool,
        call: Callable[Concatenate[Operator, Line, P], Awaitable[R]],
    ) -> None:
        self.noun = noun
        self.verb = verb
        self.role = role
        self.button = button
        """The label of the confirmation's button."""
        self.danger = danger
        """Whether it cannot be undone."""
        self.doc = " ".join((call.__doc__ or "").split())
        """What it does, in one or two sentences."""
        self._call = call
        self._preview: Callable[Concatenate[Operator, P], Awaitable[Preview]] | None = None

    async def __call__(self, by: Operator, *args: P.args, **kwargs: P.kwargs) -> R:
        """Perform the action and write it to the audit."""
        line: Line = {}
        try:
            return await self._call(by, line, *args, **kwargs)
        finally:
            if line:
                await by.audit.write(self.verb, noun=self.noun, **line)

    def previewed(
        self, preview: Callable[Concatenate[Operator, P], Awaitable[Preview]]
    ) -> Callable[Concatenate[Operator, P], Awaitable[Preview]]:
        """Decorate the function that says what this action would do."""
        self._preview = preview
        return preview

    async def preview(self, by: Operator, *args: P.args, **kwargs: P.kwargs) -> Preview:
        """Describe what the action would do, without doing it."""
        if self._preview is None:
            return Preview(f"{self.button}?", self.doc)
        return await self._preview(by, *args, **kwargs)


ACTIONS: Final[dict[tuple[str, str], Action[..., Any]]] = {}
"""Every action by noun and verb, as the CLI names them."""


def action(
    noun: str, verb: str, role: Role, button: str, *, danger: bool = False
) -> Callable[[Callable[Concatenate[Operator, Line, P], Awaitable[R]]], Action[P, R]]:
    """Register a function in the table of actions."""

    def enter(call: Callable[Concatenate[Operator, Line, P], Awaitable[R]]) -> Action[P, R]:
        made = Action(noun, verb, role, button, danger, call)
        ACTIONS[noun, verb] = made
        return made

    return enter


def many(count: int, noun: str) -> str:
    """A count with its noun: `1 run`, `3 runs`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shortlist(names: Sequence[str]) -> list[str]:
    """The first `NAMED` names, then how many more there are."""
    more = len(names) - NAMED
    return [*names[:NAMED], *([f"… and {more} more"] if more > 0 else [])]


def sentence(text: str) -> str:
    """Capitalize a text and end it with a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


# ---- runs


@action("runs", "enqueue", "operator", "Send the run")
async def enqueue(by: Operator, line: Line, request: Request) -> Enqueued:
    """Send a run of a job; it is stored when this returns."""
    enqueued = await by.client.enqueue(request)
    if not enqueued.duplicate:
        line.update(runs=[enqueued.run], group=request.group, job=request.spec.name)
    return enqueued


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
async def retry_run(by: Operator, line: Line, run: str) -> str:
    """Send a dead or lost run again, or start the next attempt of a failed one now."""
    found = await by.runs.find(run)
    done = await by.runs.retry(found)
    line.update(runs=[run], group=found.group, job=found.job, detail=done)
    return done


@retry_run.previewed
async def _(by: Operator, run: str) -> Preview:
    detail = await by.runs.show(run)
    return Preview(
        "Run it again?",
        f"It is {detail.info.state} now. {sentence(detail.where)}",
        "Its next attempt starts now instead of at its time."
        if detail.info.state == "failed"
        else "Its dead letter is sent again under the same run id, and its attempts are counted "
        "from zero.",
        listed=[run],
    )


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
) -> list[Replayed]:
    """Send dead letters again; each becomes one run, however often and by whomever it is asked."""
    done: list[Replayed] = []
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
    """Stop deliveries of a job or group, events included; what is running continues."""
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
    """Remove runs that have not started, for good; what is in flight, and events, stay."""
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
        "What is in flight is left alone, and so are events.",
    )


# ---- schedules


@action("schedules", "add", "admin", "Add it")
async def add_schedule(
    by: Operator, line: Line, schedule: Schedule, *, replace: bool = False
) -> Schedule:
    """Add a schedule at run time, or replace one that was added so."""
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
        "Runs that were sent already continue.",
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
    following = f"its next slot is {rfc3339(slot)}" if slot else "it has no further slot"
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


# ---- nodes


@action("nodes", "drain", "admin", "Drain it", danger=True)
async def drain_node(by: Operator, line: Line, node: str) -> None:
    """Ask a node to finish what it runs and end, as SIGTERM would."""
    await by.nodes.drain(node)
    line.update(detail=node)


@drain_node.previewed
async def _(by: Operator, node: str) -> Preview:
    from holdfast.errors import NotFound
    from holdfast.model.lifecycle import ALIVE

    info, _ = await by.nodes.show(node)
    if info is None or info.state not in ALIVE:
        raise NotFound(f"node {node!r} has ended: there is nothing to drain")
    return Preview(
        f"Drain {node}?",
        "Its process takes nothing new, finishes what it runs within its grace period, and ends, "
        "as after SIGTERM.",
        f"{many(info.running, 'run')} in flight there now; what does not finish starts elsewhere.",
        "An orchestrator may start it again; Holdfast does not.",
    )


# ---- agents and their fleet


@action("agents", "forget", "admin", "Forget it", danger=True)
async def forget_agent(by: Operator, line: Line, agent: str) -> None:
    """Forget an agent that will not come back: targets no longer match it."""
    await by.agents.forget(agent)
    line.update(detail=agent)


@forget_agent.previewed
async def _(by: Operator, agent: str) -> Preview:
    await by.agents.show(agent)
    return Preview(
        f"Forget {agent}?", "Targets no longer match it. If it comes back, it is known again."
    )


@action("fleet", "command", "admin", "Send the command", danger=True)
async def command_fleet(by: Operator, line: Line, request: FleetRequest) -> FleetRun:
    """Run a function on every agent that a target matches; it is dispatched when this returns."""
    record = await by.fleet.fleet.start(request)
    detail = f"{request.function} on {request.target}"
    line.update(runs=[record.run], count=len(record.targets), detail=detail)
    return record


@command_fleet.previewed
async def _(by: Operator, request: FleetRequest) -> Preview:
    matched = await by.fleet.fleet.resolve(request.target)
    words = " ".join([request.function, *map(str, request.args)])
    return Preview(
        f"Run {request.function} on {request.target}?",
        f"{words} runs on {many(len(matched), 'agent')}, as you.",
        "Each agent runs it once. What it has done cannot be undone from here.",
        listed=matched or ["no agent matches: none would run it"],
    )


@action("fleet", "cancel", "operator", "Cancel it", danger=True)
async def cancel_fleet(by: Operator, line: Line, run: str) -> FleetRun:
    """Cancel a fan-out run: no further agent is sent to, and those that run it stop."""
    record = await by.fleet.cancel(run, by.audit.who)
    if not record.over or record.cancelled_by:
        line.update(runs=[run], detail="fleet")
    return record


@cancel_fleet.previewed
async def _(by: Operator, run: str) -> Preview:
    record, returns = await by.fleet.show(run)
    left = len(record.targets) - len(returns)
    return Preview(
        f"Cancel {record.request.function}?",
        "No further agent is sent to, and those that run it stop.",
        f"{many(left, 'agent')} of {len(record.targets)} have not answered yet; what the others "
        "did stays done.",
    )


# ---- upkeep


@action("unreadable", "remove", "admin", "Remove it", danger=True)
async def remove_unreadable(by: Operator, line: Line, bucket: str, key: str) -> None:
    """Remove one record that cannot be read."""
    await by.unreadable.remove(bucket, key)
    line.update(detail=f"{bucket}/{key}")


@remove_unreadable.previewed
async def _(by: Operator, bucket: str, key: str) -> Preview:
    return Preview(f"Remove the record {key} from {bucket}?", "It cannot be brought back.")


@action("settings", "push", "admin", "Publish them")
async def push_settings(
    by: Operator,
    line: Line,
    publisher: Publisher,
    folder: Path,
    *,
    agents: Sequence[str] = (),
    allow_empty: bool = False,
    force: bool = False,
) -> tuple[Tree, Plan]:
    """Publish a folder of settings: all of it at once, or nothing."""
    tree, plan = await publisher.push(folder, agents=agents, empty=allow_empty, force=force)
    if not plan.empty and plan.revision:
        line.update(count=len(plan.changes), detail=f"revision {plan.revision.number}")
    return tree, plan


@action("secrets", "rotate", "admin", "Rotate the keys")
async def rotate_secrets(
    by: Operator, line: Line, publisher: Publisher, *, finish: bool = False, force: bool = False
) -> Plan:
    """Begin to use a new generation of keys beside the old one, or finish with the new one."""
    plan = await publisher.rotate(finish=finish, force=force)
    line.update(detail=f"generation {' and '.join(map(str, plan.generations))}")
    return plan


@action("doctor", "fix", "admin", "Fix them")
async def fix(by: Operator, line: Line, stranded: Stranded, cases: list[Case]) -> Fixed:
    """Correct streams whose configuration has drifted, and repair stranded runs."""
    from holdfast.status.checks import fix as fix_streams
    from holdfast.status.stranded import repair_all

    streams = await fix_streams(by.client.topology)
    repaired = await repair_all(stranded, cases)
    if streams or repaired:
        line.update(runs=list(repaired), count=len(repaired), detail=", ".join(streams))
    return streams, repaired


@action("backup", "restore", "admin", "Restore it")
async def restore(
    by: Operator, line: Line, streams: Sequence[str], load: Callable[[str], Awaitable[int]]
) -> dict[str, int]:
    """Recreate the streams and buckets of a backup on a server that does not have them."""
    made: dict[str, int] = {}
    try:
        for stream in streams:
            made[stream] = await load(stream)
    finally:
        if made:
            line.update(count=len(made), detail=", ".join(made))
    return made
