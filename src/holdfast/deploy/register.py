"""Registering an app before any worker runs: its streams, its consumers, its schedules.

An autoscaler that counts a consumer's messages needs the consumer, and a subscription counts events
from the moment it exists. Registering is harmless to repeat, changes no consumer that is there, and
never replaces the schedules of a higher release.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.app import Holdfast
from holdfast.client import Client
from holdfast.client.schedules import Schedules
from holdfast.config import WorkerConfig
from holdfast.names import consumer


@dataclass(frozen=True, slots=True)
class Registered:
    """What is there now."""

    consumers: tuple[str, ...]
    schedules: tuple[str, ...]
    newer: str = ""
    """The higher release whose schedules were left alone."""


async def register(
    client: Client, app: Holdfast, worker: WorkerConfig, *, release: str = ""
) -> Registered:
    """Make what is missing; everything is there when this returns."""
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
