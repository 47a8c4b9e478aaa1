"""Registers an app before any worker runs, and removes deleted jobs.

An autoscaler that reads a consumer's lag needs the consumer, and a subscription counts events from
its creation. Registering is idempotent, changes no existing consumer, and never replaces the
schedules of a higher release.

Unregistering removes the consumers of deleted jobs, but refuses while runs wait for one of them:
they would be stored forever and never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.app import Holdfast
from holdfast.client import Client
from holdfast.client.schedules import Schedules
from holdfast.config import WorkerConfig
from holdfast.errors import InvalidInput
from holdfast.names import consumer, parse_consumer
from holdfast.status.figures import lags


@dataclass(frozen=True, slots=True)
class Registered:
    """What exists after registering."""

    consumers: tuple[str, ...]
    schedules: tuple[str, ...]
    newer: str = ""
    """The higher release whose schedules were kept."""


async def register(
    client: Client, app: Holdfast, worker: WorkerConfig, *, release: str = ""
) -> Registered:
    """Create what is missing; everything exists when this returns."""
    topology, names = client.topology, client.broker.names
    await topology.ensure()
    made = []
    for job in app.jobs.values():
        spec = job.spec
        wanted = [(names.jobs, names.job(spec.group, spec.name), "")]
        wanted += [(names.events, names.event(event), event) for event in spec.on]
        for stream, subject, event in wanted:
            name = consumer(spec.group, spec.name, event)
            await topology.ensure_consumer(
                stream, name, subject, worker.ack_wait_seconds, new=bool(event), app=app.name
            )
            made.append(name)
    synced = await Schedules(client).sync(
        app.name, app.schedules, release=release, allow_empty=True
    )
    return Registered(tuple(made), tuple(sorted(app.schedules)), synced.newer)


async def unregister(
    client: Client, group: str, jobs: Sequence[str], *, discard: bool = False
) -> list[str]:
    """Remove the consumers of jobs, with `discard` even while runs wait; returns their names."""
    waiting = {one.job: one for one in await lags(client) if one.group == group}
    busy = [waiting[job] for job in jobs if job in waiting and waiting[job].lag]
    if busy and not discard:
        told = ", ".join(f"{one.lag} of {one.group}/{one.job}" for one in busy)
        raise InvalidInput(
            f"runs wait ({told}): nothing was removed; let them end, or pass --discard to leave "
            "them without a worker"
        )
    names, removed = client.broker.names, []
    for stream in (names.jobs, names.events):
        for info in await client.topology.consumers(stream):
            found = parse_consumer(info.get("name", ""))
            if found and found[0] == group and found[1] in jobs:
                await client.broker.api(f"CONSUMER.DELETE.{stream}.{info['name']}")
                removed.append(info["name"])
    return removed
