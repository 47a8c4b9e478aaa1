"""The catalogue of everything that Holdfast counts: its metrics.

Each metric is declared once, in `CATALOGUE`, with its kind, labels and meaning; documentation and
dashboards are generated from it. A `Telemetry` holds one process's values: two in one process
(tests) do not mix.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client import Metric as PrometheusMetric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

log = logging.getLogger("holdfast.events")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: what it is called, what it counts and by which labels."""

    attribute: str
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    doc: str
    labels: tuple[str, ...] = ()


_JOB = ("group", "job")

CATALOGUE: Final[tuple[Metric, ...]] = (
    Metric("started", "holdfast_attempts_started", "counter", "Attempts started.", _JOB),
    Metric(
        "ended",
        "holdfast_attempts_ended",
        "counter",
        "Attempts ended, by outcome: done, failed, timeout, cancelled, snoozed, given_back.",
        (*_JOB, "outcome"),
    ),
    Metric("seconds", "holdfast_attempt_seconds", "histogram", "Duration of attempts.", _JOB),
    Metric(
        "waited",
        "holdfast_start_delay_seconds",
        "histogram",
        "Time from a message being stored to its first attempt, by the server's clock.",
        _JOB,
    ),
    Metric(
        "consuming",
        "holdfast_taskiq_consuming",
        "gauge",
        "1 while messages of a taskiq queue can arrive at this worker.",
        ("stream",),
    ),
    Metric("running", "holdfast_attempts_running", "gauge", "Attempts running now."),
    Metric("held", "holdfast_messages_held", "gauge", "Messages held and not started yet."),
    Metric(
        "claims",
        "holdfast_claims",
        "counter",
        "Attempts to claim, by outcome: won, duplicate, superseded, held, crowded, poison, lost.",
        ("verdict",),
    ),
    Metric(
        "duplicates",
        "holdfast_duplicates_suppressed",
        "counter",
        "Repeats that were recognised: at publish (message id) or at claim (run id).",
        ("where",),
    ),
    Metric("takeovers", "holdfast_takeovers", "counter", "Runs taken over from a lost holder."),
    Metric(
        "fenced",
        "holdfast_fenced_writes",
        "counter",
        "Writes of a holder that had been replaced, refused by the server.",
        ("what",),
    ),
    Metric(
        "retries", "holdfast_retries", "counter", "Retries planned: by nak or parked.", ("how",)
    ),
    Metric(
        "dead", "holdfast_dead_letters", "counter", "Runs given up, by reason.", (*_JOB, "reason")
    ),
    Metric("published", "holdfast_events_published", "counter", "Events published.", ("event",)),
    Metric(
        "unclaimed",
        "holdfast_events_unclaimed",
        "counter",
        "Events published that no job subscribes to.",
        ("event",),
    ),
    Metric("enqueued", "holdfast_runs_enqueued", "counter", "Runs enqueued by this process.", _JOB),
    Metric(
        "unreadable",
        "holdfast_unreadable_records",
        "counter",
        "Records and messages that could not be read and were skipped, by bucket or stream; "
        "'holdfast doctor' lists them.",
        ("bucket",),
    ),
    Metric(
        "log_lines",
        "holdfast_run_log_lines",
        "counter",
        "Log lines of runs, by outcome: sent, or dropped because a run logged too much at once or "
        "NATS was away.",
        ("outcome",),
    ),
    Metric("reconnects", "holdfast_reconnects", "counter", "Reconnects to NATS."),
    Metric("terms", "holdfast_terms", "counter", "Terms won by this process.", ("role",)),
    Metric("leading", "holdfast_leading", "gauge", "1 while this process leads.", ("role",)),
    Metric("schedules", "holdfast_schedules", "gauge", "Schedules that can fire."),
    Metric(
        "slots",
        "holdfast_slots",
        "counter",
        "Slots by outcome: dispatched, caught_up, duplicate, or the reason for skipping them: "
        "catch_up, limit, overlap, or too_large (the server does not accept a message of that "
        "size).",
        ("outcome",),
    ),
    Metric(
        "slot_delay",
        "holdfast_slot_delay_seconds",
        "histogram",
        "Time from a slot being due to its run being stored.",
    ),
    Metric(
        "slot_overdue",
        "holdfast_slot_overdue_seconds",
        "gauge",
        "Dead man's switch: how long the oldest unrecorded slot has been due. Every scheduler "
        "shows it, even one that does not lead; alert on more than a few seconds.",
    ),
    Metric(
        "dispatch_age",
        "holdfast_slot_dispatch_age_seconds",
        "gauge",
        "Time since any scheduler last recorded slots, as far as this one knows.",
    ),
    Metric(
        "clock_offset",
        "holdfast_clock_offset_seconds",
        "gauge",
        "Difference between this machine's clock and the server's; beyond a second a scheduler "
        "fires nothing.",
    ),
    Metric(
        "loop_blocked",
        "holdfast_loop_blocked_seconds",
        "counter",
        "Time for which a worker's event loop did not move, counted from a second on.",
    ),
    Metric(
        "keeper_starts",
        "holdfast_keeper_starts",
        "counter",
        "Keepers that a worker has started: more than one means that one died.",
    ),
    Metric(
        "canary", "holdfast_canary_age_seconds", "gauge", "Age of the last message that arrived."
    ),
    Metric(
        "transitions",
        "holdfast_node_transitions",
        "counter",
        "Transitions of nodes that this coordinator made.",
        ("role", "state"),
    ),
    Metric("lost_nodes", "holdfast_nodes_lost", "counter", "Nodes declared lost.", ("role",)),
    Metric(
        "recovered",
        "holdfast_runs_recovered",
        "counter",
        "Runs of lost nodes that were given back.",
    ),
    Metric(
        "recovery_seconds",
        "holdfast_recovery_seconds",
        "histogram",
        "Time from a node's last sign of life to its runs being given back.",
    ),
    Metric(
        "stuck_threads",
        "holdfast_stuck_threads",
        "gauge",
        "Threads still busy with a synchronous handler after its timeout or cancellation.",
    ),
    Metric(
        "stuck_handlers",
        "holdfast_stuck_handlers",
        "gauge",
        "Async handlers that still run although they were cancelled `cleanup_seconds` ago; the log "
        "names their runs.",
        _JOB,
    ),
    Metric(
        "lag",
        "holdfast_job_lag",
        "gauge",
        "Runs and events that wait for a job or are in flight, by the server's count, without "
        "delayed ones. Every scheduler shows it.",
        _JOB,
    ),
    Metric(
        "in_flight",
        "holdfast_job_in_flight",
        "gauge",
        "The part of the lag that was delivered to a worker and not acknowledged.",
        _JOB,
    ),
    Metric(
        "redelivered",
        "holdfast_job_redelivered",
        "gauge",
        "The part of the lag that was delivered more than once.",
        _JOB,
    ),
    Metric(
        "nodes",
        "holdfast_nodes",
        "gauge",
        "Nodes that have not ended, by role, group and state.",
        ("role", "group", "state"),
    ),
    Metric("stream_messages", "holdfast_stream_messages", "gauge", "Messages stored.", ("stream",)),
    Metric("stream_bytes", "holdfast_stream_bytes", "gauge", "Bytes stored.", ("stream",)),
    Metric("storage", "holdfast_storage_bytes", "gauge", "Bytes that the account stores."),
    Metric(
        "storage_limit",
        "holdfast_storage_limit_bytes",
        "gauge",
        "Bytes that the account may store; 0: not limited.",
    ),
    Metric(
        "settings_revision",
        "holdfast_settings_revision",
        "gauge",
        "The revision of the settings that is in force on this agent; 0: none.",
    ),
    Metric("settings_applied", "holdfast_settings_applied", "counter", "Revisions put into force."),
    Metric(
        "settings_refused",
        "holdfast_settings_refused",
        "counter",
        "Settings that were not put into force, by reason: hash, torn, signature, rollback, "
        "secret, unresolved, template, schedules, unreadable, invalid.",
        ("reason",),
    ),
    Metric(
        "commands",
        "holdfast_commands",
        "counter",
        "Commands that an agent received, by outcome: accepted, known (asked again), stale "
        "(of a dispatcher that was replaced), busy, cancel, refused and why, returned and how; "
        "scheduled are slots of its own schedules.",
        ("verdict",),
    ),
    Metric(
        "fleet_runs",
        "holdfast_fleet_runs",
        "counter",
        "Fan-out runs ended, by status.",
        ("status",),
    ),
    Metric("fleet_seconds", "holdfast_fleet_seconds", "histogram", "Duration of fan-out runs."),
    Metric("fleet_active", "holdfast_fleet_active", "gauge", "Fan-out runs that this one owns."),
    Metric(
        "fleet_adoptions",
        "holdfast_fleet_adoptions",
        "counter",
        "Fan-out runs taken over from another dispatcher: lost, or left.",
        ("why",),
    ),
    Metric(
        "fleet_refused",
        "holdfast_fleet_refused",
        "counter",
        "Acks and returns that were not the agent's own, dropped.",
        ("what",),
    ),
    Metric("agents", "holdfast_agents", "gauge", "Agents, by whether they are online.", ("state",)),
)

TALLIED: Final = frozenset({"started", "ended", "seconds", "waited"})
"""Metrics that change with every attempt: counted as plain numbers, and labelled when they are
read."""

# From a no-op handler to one that runs for an hour.
BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 3600.0)


class Buckets:
    """A histogram as plain numbers."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(BOUNDS, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """The counts as Prometheus wants them: each with all below it."""
        bounds = [*map(str, BOUNDS), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


class Tally:
    """What happened to the attempts of one job in this process."""

    __slots__ = ("ended", "failures", "seconds", "started", "unrecorded", "waited")

    def __init__(self) -> None:
        self.started = 0
        self.ended: dict[str, int] = {}
        self.unrecorded: dict[str, int] = {}
        """How runs without a record ended, by state: no history tells it."""
        self.failures = 0
        """Attempts of these runs that failed."""
        self.seconds = Buckets()
        self.waited = Buckets()

    def finish(self, outcome: str, seconds: float) -> None:
        """An attempt has ended."""
        self.ended[outcome] = self.ended.get(outcome, 0) + 1
        self.seconds.observe(seconds)

    def end(self, state: str, failures: int = 0) -> None:
        """A run without a record has ended."""
        self.unrecorded[state] = self.unrecorded.get(state, 0) + 1
        self.failures += failures


class _Tallies:
    """Turns tallies into metrics when they are read."""

    def __init__(self, tallies: dict[tuple[str, str], Tally]) -> None:
        self._tallies = tallies

    def collect(self) -> Iterator[PrometheusMetric]:
        """Called by the registry."""
        for metric in CATALOGUE:
            if metric.attribute in TALLIED:
                yield self._family(metric)

    def _family(self, metric: Metric) -> PrometheusMetric:
        if metric.kind == "histogram":
            histogram = HistogramMetricFamily(metric.name, metric.doc, labels=metric.labels)
            for where, tally in list(self._tallies.items()):
                buckets: Buckets = getattr(tally, metric.attribute)
                histogram.add_metric(where, buckets.cumulative(), buckets.total)
            return histogram
        counter = CounterMetricFamily(metric.name, metric.doc, labels=metric.labels)
        for where, tally in list(self._tallies.items()):
            if metric.attribute == "started":
                counter.add_metric(where, tally.started)
            for outcome, count in list(tally.ended.items()) if metric.attribute == "ended" else ():
                counter.add_metric((*where, outcome), count)
        return counter


class Telemetry:
    """One process's metrics. `telemetry.dead.labels(group, job, reason).inc()`."""

    consuming: Gauge
    running: Gauge
    held: Gauge
    claims: Counter
    duplicates: Counter
    takeovers: Counter
    fenced: Counter
    retries: Counter
    dead: Counter
    published: Counter
    unclaimed: Counter
    enqueued: Counter
    unreadable: Counter
    log_lines: Counter
    reconnects: Counter
    terms: Counter
    leading: Gauge
    schedules: Gauge
    slots: Counter
    slot_delay: Histogram
    slot_overdue: Gauge
    dispatch_age: Gauge
    clock_offset: Gauge
    loop_blocked: Counter
    keeper_starts: Counter
    canary: Gauge
    transitions: Counter
    lost_nodes: Counter
    recovered: Counter
    recovery_seconds: Histogram
    commands: Counter
    fleet_runs: Counter
    fleet_seconds: Histogram
    fleet_active: Gauge
    fleet_adoptions: Counter
    fleet_refused: Counter
    agents: Gauge
    stuck_threads: Gauge
    stuck_handlers: Gauge
    lag: Gauge
    in_flight: Gauge
    redelivered: Gauge
    nodes: Gauge
    stream_messages: Gauge
    stream_bytes: Gauge
    storage: Gauge
    storage_limit: Gauge
    settings_revision: Gauge
    settings_applied: Counter
    settings_refused: Counter

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._tallies: dict[tuple[str, str], Tally] = {}
        self.registry.register(_Tallies(self._tallies))
        for metric in CATALOGUE:
            if metric.attribute not in TALLIED:
                setattr(self, metric.attribute, self._make(metric))

    def tally(self, group: str, job: str) -> Tally:
        """The counts of one job's attempts."""
        found = self._tallies.get((group, job))
        if found is None:
            found = self._tallies[group, job] = Tally()
        return found

    def _make(self, metric: Metric) -> Counter | Gauge | Histogram:
        if metric.kind == "histogram":
            return Histogram(
                metric.name, metric.doc, metric.labels, registry=self.registry, buckets=BOUNDS
            )
        kind = Counter if metric.kind == "counter" else Gauge
        return kind(metric.name, metric.doc, metric.labels, registry=self.registry)

    def tell_unclaimed(self, event: str) -> None:
        """An event was published that no job subscribes to."""
        self.unclaimed.labels(event).inc()
        log.warning(
            "event %r was published and no job subscribes to it: it is kept in the events stream; "
            "define a job with on=%r",
            event,
            event,
        )

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
