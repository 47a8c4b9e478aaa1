"""Figures that only the server knows: lag, streams, storage, nodes; for metrics and autoscaling.

The lag of a job is the number of runs that wait or are in flight, in its queue and its
subscriptions: `num_pending + num_ack_pending` of its consumers, which is also what KEDA's scaler
reads from the server's monitor. Delayed runs and long retries are scheduled messages and are not
counted, so a job whose runs are all due tomorrow scales to zero.

`Figures.answer` serves it over HTTP, counted per request; `Figures.run` updates the gauges. An
unreachable server is an error: an autoscaler must not mistake silence for "nothing to do".
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from typing import Any

import msgspec

from holdfast.client import Client
from holdfast.errors import NotFound, PermissionDenied
from holdfast.names import kv_stream, parse_consumer
from holdfast.retrying import repeating
from holdfast.status.messages import subject_counts
from holdfast.status.nodes import Nodes
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.figures")

PATH = "/lag/"
EVERY_SECONDS = 10.0
"""Shorter than a usual scrape interval."""


class JobLag(msgspec.Struct, frozen=True):
    """The lag of one job."""

    group: str
    job: str
    waiting: int = 0
    in_flight: int = 0
    redelivered: int = 0
    paused: int = 0
    """How many of the waiting runs are paused: a worker for them would be idle."""

    @property
    def lag(self) -> int:
        return self.waiting + self.in_flight

    def plus(self, info: dict[str, Any]) -> JobLag:
        """Add one of its consumers, as the server describes it."""
        waiting = int(info.get("num_pending", 0))
        return JobLag(
            self.group,
            self.job,
            self.waiting + waiting,
            self.in_flight + int(info.get("num_ack_pending", 0)),
            self.redelivered + int(info.get("num_redelivered", 0)),
            self.paused + (waiting if info.get("paused") else 0),
        )


async def lags(client: Client) -> list[JobLag]:
    """The lag of every job; for one never served by a worker, what was sent to it."""
    names = client.broker.names
    found: dict[tuple[str, str], JobLag] = {}
    served = set()
    for stream in (names.jobs, names.events):
        for info in await client.topology.consumers(stream):
            if where := parse_consumer(info.get("name", "")):
                found[where] = found.get(where, JobLag(*where)).plus(info)
                served.add(info["config"].get("filter_subject", ""))
    counts = await subject_counts(client.broker, names.jobs, *names.queues())
    for subject, count in counts.items():
        where = names.parse_job(subject)
        if where and subject not in served:
            found[where] = found.get(where, JobLag(*where)).plus({"num_pending": count})
    return [found[where] for where in sorted(found)]


class Figures:
    """Sets one process's gauges and answers autoscalers."""

    def __init__(self, client: Client, telemetry: Telemetry) -> None:
        self._client = client
        self._telemetry = telemetry

    async def answer(self, path: str) -> dict[str, Any] | None:
        """`/lag/<group>` and `/lag/<group>/<job>,<job>`: the sum over these jobs.

        `lag` is the work that a worker could do now, without paused runs.
        """
        if not path.startswith(PATH):
            return None
        group, _, named = path.removeprefix(PATH).partition("/")
        jobs = set(filter(None, named.split(",")))
        meant = [
            one
            for one in await lags(self._client)
            if one.group == group and (not jobs or one.job in jobs)
        ]
        if not meant:
            return None
        return {
            "group": group,
            "jobs": [one.job for one in meant],
            "waiting": sum(one.waiting for one in meant),
            "in_flight": sum(one.in_flight for one in meant),
            "paused": sum(one.paused for one in meant),
            "lag": sum(one.lag - one.paused for one in meant),
        }

    async def run(self) -> None:
        """Update the gauges until cancelled; a gauge that cannot be read keeps its old value."""
        await repeating(
            self.renew,
            clock=self._client.broker.clock,
            every=EVERY_SECONDS,
            what="renewing the figures",
            at_once=True,
        )

    async def renew(self) -> None:
        """Query once and set every gauge."""
        await self._jobs()
        await self._streams()
        await self._nodes()

    async def _jobs(self) -> None:
        telemetry = self._telemetry
        found = await lags(self._client)
        for gauge in (telemetry.lag, telemetry.in_flight, telemetry.redelivered):
            gauge.clear()
        for one in found:
            telemetry.lag.labels(one.group, one.job).set(one.lag)
            telemetry.in_flight.labels(one.group, one.job).set(one.in_flight)
            telemetry.redelivered.labels(one.group, one.job).set(one.redelivered)

    async def _streams(self) -> None:
        broker, names = self._client.broker, self._client.broker.names
        streams = [names.jobs, names.events, names.dead, names.ledger, names.run_logs]
        streams += [names.history, names.history_index, names.flows]
        streams += [kv_stream(b) for b in (names.runs, names.schedules, names.slots, names.nodes)]
        for stream in streams:
            with contextlib.suppress(NotFound, PermissionDenied):  # an earlier version's login
                state = (await broker.api(f"STREAM.INFO.{stream}"))["state"]
                self._telemetry.stream_messages.labels(stream).set(state["messages"])
                self._telemetry.stream_bytes.labels(stream).set(state["bytes"])
        account = await broker.api("INFO")
        limit = int(account.get("limits", {}).get("max_storage", -1))
        self._telemetry.storage.set(account.get("storage", 0))
        self._telemetry.storage_limit.set(max(0, limit))

    async def _nodes(self) -> None:
        alive = Counter((n.role, n.group, n.state) for n in await Nodes(self._client).list())
        self._telemetry.nodes.clear()
        for where, count in alive.items():
            self._telemetry.nodes.labels(*where).set(count)
