"""Alert rules, made from the catalogue of metrics.

Each says what it means and where the runbook is. What must not be missed is asked of the control
plane, which always runs, and not of workers, which may be gone before anybody has scraped them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.deploy.manifests import pods
from holdfast.deploy.project import Project
from holdfast.deploy.promql import foreign, own


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule."""

    name: str
    expression: str
    wait: str
    severity: str
    summary: str
    runbook: str

    def rule(self) -> dict[str, Any]:
        """As Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.wait,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook": f"docs/{self.runbook}"},
        }


def _lag(series: str) -> str:
    job = own("lag")
    return f"max by ({', '.join(job.labels)}) ({series})"


def scheduler_alerts() -> list[Alert]:
    """Schedules."""
    overdue, leading = own("slot_overdue").name, own("leading").name
    return [
        Alert(
            "HoldfastSchedulerSilent",
            f"max({overdue}) > 10",
            "30s",
            "critical",
            "A slot is due for {{ $value | humanizeDuration }} and no scheduler has fired it.",
            "operations/scheduler.md#a-slot-is-due-and-nobody-fires-it",
        ),
        Alert(
            "HoldfastNobodyLeads",
            f'absent({leading}{{role="scheduler"}} == 1)',
            "1m",
            "critical",
            "No scheduler leads: nothing is fired.",
            "operations/scheduler.md#a-slot-is-due-and-nobody-fires-it",
        ),
        Alert(
            "HoldfastSlotsLate",
            f"{own('slot_delay').quantile(0.99, window='10m')} > 2",
            "5m",
            "warning",
            "One slot in a hundred is sent more than {{ $value | humanizeDuration }} late.",
            "operations/scheduler.md#slots-are-late",
        ),
        Alert(
            "HoldfastClockOff",
            f"max by (instance) (abs({own('clock_offset').name})) > 0.5",
            "5m",
            "warning",
            "The clock of {{ $labels.instance }} is off; beyond a second it fires nothing.",
            "operations/scheduler.md#a-clock-is-wrong",
        ),
    ]


def job_alerts() -> list[Alert]:
    """Jobs and their runs."""
    lag = own("lag").name
    labels = ", ".join(own("lag").labels)
    ended = own("ended")
    failed = ended.name + '{outcome=~"failed|timeout"}'
    return [
        Alert(
            "HoldfastLagGrowing",
            f"{_lag(f'deriv({lag}[15m])')} > 0 and on ({labels}) {_lag(lag)} > 100",
            "15m",
            "warning",
            "More runs come than are done: {{ $labels.group }}/{{ $labels.exported_job }}.",
            "operations.md#a-stuck-queue",
        ),
        Alert(
            "HoldfastDeadLetters",
            f'max by (stream) (delta({own("stream_messages").name}{{stream=~".+_DEAD"}}[10m])) > 0',
            "0m",
            "warning",
            "{{ $value | humanize }} runs were given up within ten minutes.",
            "operations.md#dead-letters",
        ),
        Alert(
            "HoldfastAttemptsFail",
            f"sum by (group, exported_job) (rate({failed}[15m])) "
            f"/ {ended.rate('group', 'exported_job', window='15m')} > 0.2",
            "15m",
            "warning",
            "{{ $value | humanizePercentage }} of the attempts at {{ $labels.exported_job }} fail.",
            "operations.md#dead-letters",
        ),
        Alert(
            "HoldfastWorkerDeaf",
            f"max by (instance) ({own('canary').name}) > 30",
            "1m",
            "critical",
            "No message has travelled to {{ $labels.instance }} for a while.",
            "operations.md#nats-was-restarted",
        ),
        Alert(
            "HoldfastThreadsStuck",
            f"{own('stuck_threads').max('instance')} > 0",
            "15m",
            "warning",
            "Handlers on {{ $labels.instance }} go on long after their timeout.",
            "operations.md#a-stuck-queue",
        ),
    ]


def cluster_alerts() -> list[Alert]:
    """Nodes and ownership."""
    return [
        Alert(
            "HoldfastNodesLost",
            own("lost_nodes").risen("role"),
            "0m",
            "warning",
            "A {{ $labels.role }} died, froze or was cut off.",
            "operations.md#a-node-was-lost",
        ),
        Alert(
            "HoldfastFencedWrites",
            own("fenced").risen("what"),
            "0m",
            "warning",
            "A process that had been replaced woke up and was refused: {{ $labels.what }}.",
            "operations.md#a-node-was-lost",
        ),
        Alert(
            "HoldfastAgentsOffline",
            f'max({own("agents").name}{{state="offline"}}) > 0',
            "5m",
            "warning",
            "{{ $value | humanize }} agents are not there.",
            "operations.md#a-node-was-lost",
        ),
        Alert(
            "HoldfastTakeovers",
            f"sum (increase({own('takeovers').name}[1h])) > 10",
            "0m",
            "warning",
            "{{ $value | humanize }} runs were taken over from lost workers within an hour.",
            "operations.md#a-node-was-lost",
        ),
        Alert(
            "HoldfastFlapping",
            f"sum by (instance) (increase({own('reconnects').name}[15m])) > 3",
            "0m",
            "warning",
            "{{ $labels.instance }} keeps losing its connection to NATS.",
            "operations/nats.md#a-server-is-lost",
        ),
        Alert(
            "HoldfastControlDown",
            f'sum({foreign("up").name}{{job="control"}}) < 2',
            "2m",
            "critical",
            "Fewer than two control processes answer: the next loss is a gap.",
            "operations/replicas.md#remove-a-replica",
        ),
    ]


def storage_alerts() -> list[Alert]:
    """NATS and what it stores."""
    used, limit = own("storage").name, own("storage_limit").name
    stored, most = (
        foreign("nats_server_total_message_bytes").name,
        foreign("nats_server_max_storage").name,
    )
    return [
        Alert(
            "HoldfastStorageFull",
            f"max({used}) / max({limit} > 0) > 0.9 "
            f"or max by (server_name) ({stored} / ({most} > 0)) > 0.9",
            "5m",
            "critical",
            "{{ $value | humanizePercentage }} of the storage is used.",
            "operations/nats.md#the-disk-is-full",
        ),
        Alert(
            "HoldfastStorageFillsSoon",
            f"max(predict_linear({used}[6h], 86400)) > max({limit} > 0) "
            f"or max by (server_name) (predict_linear({stored}[6h], 86400) > ({most} > 0))",
            "30m",
            "warning",
            "At this pace the storage is full within a day.",
            "operations/nats.md#the-disk-is-full",
        ),
        Alert(
            "HoldfastNatsDown",
            f'{foreign("up").name}{{job="nats-headless"}} == 0 '
            f"or {foreign('nats_healthz_status').name} > 0",
            "1m",
            "critical",
            "A nats-server does not answer, or is not healthy.",
            "operations/nats.md#a-server-is-lost",
        ),
        Alert(
            "HoldfastScalerErrors",
            foreign("keda_scaler_detail_errors_total").risen("scaledObject"),
            "5m",
            "warning",
            "KEDA cannot read the lag of {{ $labels.scaledObject }}: it runs on its fallback.",
            "operations/scaling.md#keda-cannot-read-the-lag",
        ),
    ]


def groups() -> list[dict[str, Any]]:
    """All rules, in groups."""
    parts = {
        "schedules": scheduler_alerts(),
        "jobs": job_alerts(),
        "cluster": cluster_alerts(),
        "storage": storage_alerts(),
    }
    return [
        {"name": f"holdfast-{name}", "rules": [alert.rule() for alert in alerts]}
        for name, alerts in parts.items()
    ]


def manifest(project: Project) -> dict[str, Any]:
    """The rules as the Prometheus operator takes them."""
    found = pods.resource(
        project, "monitoring.coreos.com/v1", "PrometheusRule", "holdfast", spec={"groups": groups()}
    )
    found["metadata"]["labels"]["release"] = project.config.monitoring_release
    return found
