"""Registers an app before any worker runs, and removes deleted jobs.

An autoscaler that reads a consumer's lag needs the consumer, and a subscription counts events from
its creation. Registering is idempotent, changes no existing consumer, and never replaces the
schedules of a higher release.

Unregistering removes the schedules and the consumers of deleted jobs, but refuses while runs wait
for one of them, now or later: they would be stored forever and never run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.app import Holdfast
from holdfast.broker import Broker
from holdfast.broker.kv import direct_page
from holdfast.broker.streams import APP_LABEL
from holdfast.client import Client
from holdfast.client.schedules import Schedules
from holdfast.config import WorkerConfig
from holdfast.errors import InvalidInput
from holdfast.names import GRANTED, H_SEQUENCE, H_SUBJECT, consumer, parse_consumer
from holdfast.payload.published import LABEL, published
from holdfast.status.figures import lags
from holdfast.status.messages import subject_counts


@dataclass(frozen=True, slots=True)
class Registered:
    """What exists after registering."""

    consumers: tuple[str, ...]
    schedules: tuple[str, ...]
    newer: str = ""
    """The higher release whose schedules were kept."""
    left: tuple[tuple[str, str], ...] = ()
    """Group and job of each consumer of this app whose job is no longer in its code."""


async def register(
    client: Client, app: Holdfast, worker: WorkerConfig, *, release: str = ""
) -> Registered:
    """Create what is missing; everything exists when this returns."""
    topology, names = client.topology, client.broker.names
    await topology.ensure()
    made = []
    for job in app.jobs.values():
        spec = job.spec
        wanted = [(names.jobs, names.job(spec.group, spec.name), "", "")]
        wanted += [(names.events, names.event(event), event, "") for event in spec.on]
        if spec.ordered:
            granted = names.job(spec.group, spec.name, GRANTED)
            wanted.append((names.jobs, granted, "", GRANTED))
        for stream, subject, event, queue in wanted:
            name = consumer(spec.group, spec.name, event, queue)
            labels = {APP_LABEL: app.name} | (
                {} if event or queue else {LABEL: published(job.signature, job.key, job.spec)}
            )
            await topology.ensure_consumer(
                stream,
                name,
                subject,
                worker.ack_wait_seconds,
                new=bool(event),
                labels=labels,
                in_order=spec.ordered and not queue,
            )
            made.append(name)
    synced = await Schedules(client).sync(
        app.name, app.schedules, release=release, allow_empty=True
    )
    left = await _left(client, app)
    return Registered(tuple(made), tuple(sorted(app.schedules)), synced.newer, left)


async def _left(client: Client, app: Holdfast) -> tuple[tuple[str, str], ...]:
    names, found = client.broker.names, set()
    has = {(job.spec.group, job.spec.name) for job in app.jobs.values()}
    for stream in (names.jobs, names.events):
        for info in await client.topology.consumers(stream):
            where = parse_consumer(info.get("name", ""))
            label = (info["config"].get("metadata") or {}).get(APP_LABEL)
            if where and label == app.name and where not in has:
                found.add(where)
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class Unregistered:
    """What was removed."""

    consumers: tuple[str, ...]
    schedules: tuple[str, ...]


async def unregister(
    client: Client,
    group: str,
    jobs: Sequence[str],
    *,
    discard: bool = False,
    dry_run: bool = False,
) -> Unregistered:
    """Remove schedules and consumers of jobs; with `discard` even while runs wait for them.

    With `dry_run` nothing is removed; it returns what would be.
    """
    if not discard:
        await _check_nothing_waits(client, group, jobs)
    schedules, removed = Schedules(client), []
    for one in await schedules.list():  # the schedules first, so that nothing more is sent
        if one.group == group and one.job in jobs:
            if not dry_run:
                await schedules.remove(one.name)
            removed.append(one.name)
    names, consumers = client.broker.names, []
    for stream in (names.jobs, names.events):
        for info in await client.topology.consumers(stream):
            found = parse_consumer(info.get("name", ""))
            if found and found[0] == group and found[1] in jobs:
                if not dry_run:
                    await client.broker.api(f"CONSUMER.DELETE.{stream}.{info['name']}")
                consumers.append(info["name"])
    return Unregistered(tuple(consumers), tuple(removed))


async def _check_nothing_waits(client: Client, group: str, jobs: Sequence[str]) -> None:
    """Raise an error if runs wait: for a worker, for their time, or for a place in a limit."""
    broker, names = client.broker, client.broker.names
    waiting = Counter(
        {one.job: one.lag for one in await lags(client) if one.group == group and one.lag}
    )
    later = await subject_counts(broker, names.jobs, names.later(group, "*", "*", "*"))
    for subject, count in later.items():
        if parked := names.parse_later(subject):
            waiting[parked[1]] += count
    waiting += await _in_line(broker, group)
    if busy := [job for job in jobs if waiting[job]]:
        told = ", ".join(f"{waiting[job]} of {group}/{job}" for job in busy)
        raise InvalidInput(
            f"runs wait ({told}), so nothing was removed: let them end, or pass --discard to leave "
            "them without a worker"
        )


async def _in_line(broker: Broker, group: str) -> Counter[str]:
    """How many runs of each job of a group wait for a place in a limit."""
    names, found, start = broker.names, Counter[str](), 1
    while True:
        page = await direct_page(broker, names.jobs, names.line("*", "*", "*"), start)
        for message in page.messages:
            where = names.parse_job(message.headers.get(H_SUBJECT, ""))
            if where and where[0] == group:
                found[where[1]] += 1
        if not page.messages or not page.left:
            return found
        start = int(page.messages[-1].headers[H_SEQUENCE]) + 1
