"""The Holdfast app: its jobs, and what is stored.

`holdfast worker uptime.app:app` probes and notifies; `holdfast control uptime.app:app` fires.

`probe` is one slot of one check. It probes the target, stores the result under the slot's instant,
moves the state by compare-and-swap, and sends the state's notices: each notice to each channel is a
run of `notify` keyed by the notice's id, so it is one run however often it is sent.

`reconcile` runs each minute and makes the schedules match the checks, which repairs what a process
that died between storing a check and its schedule left undone.
"""

from __future__ import annotations

import time
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from holdfast import Backoff, Bucket, Context, Holdfast, Schedules
from uptime import notices, record
from uptime.check import PREFIX, Check, Id
from uptime.config import load
from uptime.guard import Guard
from uptime.probes import look, trust
from uptime.record import Incident, Notice, Result, Rules, State

INCIDENT_DAYS = 90

app = Holdfast("uptime")


class Channel(BaseModel):
    """Somebody who is told of incidents."""

    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)

    id: Id
    kind: Literal["webhook", "email"]
    target: Annotated[str, StringConstraints(min_length=3, max_length=2_000), Field()]
    """A URL, or an address."""


checks: Bucket[Check] = app.bucket("uptime-checks", Check)
states: Bucket[State] = app.bucket("uptime-states", State)
results: Bucket[Result] = app.bucket("uptime-results", Result)
incidents: Bucket[Incident] = app.bucket("uptime-incidents", Incident)
channels: Bucket[Channel] = app.bucket("uptime-channels", Channel)


@app.job(
    name="uptime-probe",
    retry=Backoff.exponential(first="1s", last="10s", attempts=8),
    timeout="90s",
)
async def probe(ctx: Context, check: str) -> str | None:
    """Probe a target once, and store the outcome."""
    found = await checks.get(check)
    if found is None or found.value.paused:
        return None
    definition, config = found.value, load()
    at = int(ctx.slot.timestamp()) if ctx.slot else int(time.time())
    outcome = await look(definition, Guard(config.allow_private), trust(config.ca_file))
    kept = Result(
        at, outcome.verdict, outcome.ms, outcome.detail, outcome.code, ctx.node, ctx.attempt
    )
    await results.put(f"{check}.{at}", kept, ttl=config.results_kept)
    rules = Rules(check, definition.name, definition.failures, definition.recoveries)
    state = await states.change(check, lambda old: record.apply(old or State(), at, outcome, rules))
    await tell(check, state)
    return outcome.verdict


async def tell(check: str, state: State) -> None:
    """Send the state's notices; what a crash left unsent, the next probe sends."""
    if not state.outbox:
        return
    known = [entry.value async for entry in channels.entries()]
    for notice in state.outbox:
        await _write_down(notice.incident)
        for channel in known if not notice.quiet else ():
            key = f"{notice.id}.{channel.id}"
            await notify.options(key=key).enqueue(channel.id, notice)
    done = state.outbox
    await states.change(check, lambda now: record.sent(now or State(), done))


async def _write_down(incident: Incident) -> None:
    """Store an incident; a slow writer does not reopen one that has ended."""

    def write(old: Incident | None) -> Incident:
        return old if old is not None and old.ended else incident

    await incidents.change(incident.id, write, ttl=f"{INCIDENT_DAYS}d")


@app.job(
    name="uptime-notify",
    retry=Backoff.exponential(first="2s", last="5m", attempts=15),
    timeout="45s",
)
async def notify(ctx: Context, channel: str, notice: Notice) -> str | None:
    """Send one notice to one channel."""
    found = await channels.get(channel)
    if found is None:
        return None
    config = load()
    if found.value.kind == "webhook":
        await notices.webhook(found.value.target, notice, ctx.attempt, config)
    else:
        await notices.mail(found.value.target, notice, config)
    return notice.id


@app.every("1m", name="uptime-reconcile", catch_up="last", overlap="skip")
async def reconcile() -> int:
    """Make the schedules match the checks; returns how many were changed."""
    schedules = await Schedules.of(app)
    wanted = {entry.value.schedule: entry.value async for entry in checks.entries()}
    found = await schedules.list()
    there = {s.name: s for s in found if s.name.startswith(PREFIX) and s.job == probe.name}
    changed = 0
    for name, check in wanted.items():
        old = there.get(name)
        if old is None or (old.every, bool(old.paused)) != (check.interval, check.paused):
            await set_schedule(schedules, check)
            changed += 1
    for name in there.keys() - wanted.keys():
        if await checks.get(name.removeprefix(PREFIX)) is None:  # it may have been added meanwhile
            await schedules.remove(name)
            changed += 1
    return changed + await _clear_states({check.id for check in wanted.values()})


async def _clear_states(known: set[str]) -> int:
    """Remove states without a check: left by a probe that ran while its check was removed."""
    left = [entry.key async for entry in states.entries() if entry.key not in known]
    gone = [id for id in left if await checks.get(id) is None]
    for id in gone:
        await rest(id)
        await states.delete(id)
    return len(gone)


async def rest(check: str) -> None:
    """Reset the state of a check that is paused or removed; its incident ends quietly."""
    now = int(time.time())
    state = await states.change(check, lambda old: record.reset(old or State(), now))
    await tell(check, state)


async def set_schedule(schedules: Schedules, check: Check) -> None:
    """Make a check's schedule match the check."""
    rule = probe.schedule(
        check.schedule,
        every=check.interval,
        start=check.phase,
        payload={"check": check.id},
        catch_up="last",
    )
    await schedules.add(rule, replace=True)
    await (schedules.pause if check.paused else schedules.resume)(check.schedule)
