"""Grafana dashboards, made from the catalogue of metrics.

Five of them: jobs, scheduler and slots, cluster and liveness, NATS, KEDA. A panel is a title, a
unit and expressions; where it stands follows from its place in the list.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from holdfast.deploy.manifests import pods
from holdfast.deploy.project import Project
from holdfast.deploy.promql import foreign, own

COLUMNS, WIDTH, HEIGHT = 3, 8, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture: expressions by the text of their legend."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    about: str = ""

    def drawn(self, number: int) -> dict[str, Any]:
        """As Grafana reads it."""
        row, column = divmod(number, COLUMNS)
        place = {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": row * HEIGHT}
        targets = [
            {"refId": chr(65 + n), "expr": expr, "legendFormat": legend, "datasource": SOURCE}
            for n, (legend, expr) in enumerate(self.queries.items())
        ]
        return {
            "id": number + 1,
            "type": self.kind,
            "title": self.title,
            "description": self.about,
            "datasource": SOURCE,
            "gridPos": place,
            "fieldConfig": {"defaults": {"unit": self.unit, "min": 0}, "overrides": []},
            "targets": targets,
        }


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A page of panels."""

    name: str
    title: str
    panels: tuple[Panel, ...]

    def drawn(self) -> dict[str, Any]:
        """As Grafana imports it."""
        return {
            "uid": f"holdfast-{self.name}",
            "title": f"Holdfast / {self.title}",
            "tags": ["holdfast"],
            "schemaVersion": 39,
            "editable": False,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "templating": {
                "list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
            },
            "panels": [panel.drawn(n) for n, panel in enumerate(self.panels)],
        }


_JOB = ("group", "exported_job")
_LEGEND = "{{group}}/{{exported_job}}"


def _dead_letters() -> str:
    return f'max by (stream) ({own("stream_messages").name}{{stream=~".+_DEAD"}})'


def _jobs() -> Dashboard:
    lag, ended, dead = own("lag"), own("ended"), own("dead")
    return Dashboard(
        "jobs",
        "Jobs",
        (
            Panel("Lag", {_LEGEND: lag.max(*_JOB)}, about="Waiting and in flight; not put off."),
            Panel("In flight", {_LEGEND: own("in_flight").max(*_JOB)}),
            Panel("Handed out more than once", {_LEGEND: own("redelivered").max(*_JOB)}),
            Panel(
                "Attempts ended, by outcome",
                {"{{outcome}}": ended.rate("outcome")},
                "ops",
            ),
            Panel("Attempts ended, by job", {_LEGEND: ended.rate(*_JOB)}, "ops"),
            Panel("Enqueued", {_LEGEND: own("enqueued").rate(*_JOB)}, "ops"),
            Panel(
                "Duration of attempts (p50, p99)",
                {
                    f"p50 {_LEGEND}": own("seconds").quantile(0.5, *_JOB),
                    f"p99 {_LEGEND}": own("seconds").quantile(0.99, *_JOB),
                },
                "s",
            ),
            Panel(
                "Wait for a worker (p99)",
                {_LEGEND: own("waited").quantile(0.99, *_JOB)},
                "s",
            ),
            Panel("Retries", {"{{how}}": own("retries").rate("how")}, "ops"),
            Panel(
                "Dead letters kept",
                {"{{stream}}": _dead_letters()},
                kind="stat",
            ),
            Panel(
                "Given up, by reason",
                {"{{exported_job}} {{reason}}": dead.rate("exported_job", "reason")},
                "ops",
            ),
            Panel(
                "Repeats recognised",
                {"{{where}}": own("duplicates").rate("where")},
                "ops",
            ),
            Panel("Events published", {"{{event}}": own("published").rate("event")}, "ops"),
            Panel("Events nobody takes", {"{{event}}": own("unclaimed").rate("event")}, "ops"),
            Panel("Attempts running", {"{{instance}}": own("running").sum("instance")}),
        ),
    )


def _schedules() -> Dashboard:
    delay = own("slot_delay")
    return Dashboard(
        "scheduler",
        "Scheduler and slots",
        (
            Panel(
                "Oldest slot that is due",
                {"{{instance}}": own("slot_overdue").max("instance")},
                "s",
                about="The dead man's switch: every scheduler shows it, also one that stands by.",
            ),
            Panel("Who leads", {"{{instance}} {{role}}": own("leading").max("instance", "role")}),
            Panel("Terms won", {"{{role}}": own("terms").rate("role", window="1h")}),
            Panel(
                "Slots, by what became of them",
                {"{{outcome}}": own("slots").rate("outcome")},
                "ops",
            ),
            Panel(
                "Lateness (p50, p99)",
                {"p50": delay.quantile(0.5), "p99": delay.quantile(0.99)},
                "s",
            ),
            Panel("Schedules", {"schedules": own("schedules").max()}, kind="stat"),
            Panel(
                "Time since slots were recorded",
                {"{{instance}}": own("dispatch_age").max("instance")},
                "s",
            ),
            Panel(
                "Clock against the server's",
                {"{{instance}}": own("clock_offset").max("instance")},
                "s",
            ),
        ),
    )


def _cluster() -> Dashboard:
    return Dashboard(
        "cluster",
        "Cluster and liveness",
        (
            Panel(
                "Nodes",
                {"{{role}} {{group}} {{state}}": own("nodes").max("role", "group", "state")},
            ),
            Panel("Nodes lost", {"{{role}}": own("lost_nodes").rate("role")}, "ops"),
            Panel(
                "Transitions",
                {"{{role}} {{state}}": own("transitions").rate("role", "state")},
                "ops",
            ),
            Panel("Runs given back", {"runs": own("recovered").rate()}, "ops"),
            Panel(
                "From the last sign of life to runs given back (p99)",
                {"p99": own("recovery_seconds").quantile(0.99)},
                "s",
            ),
            Panel("Runs taken over", {"runs": own("takeovers").rate()}, "ops"),
            Panel(
                "Writes refused",
                {"{{what}}": own("fenced").rate("what")},
                "ops",
                about="Of processes that had been replaced: zombies that did no harm.",
            ),
            Panel("Claims, by verdict", {"{{verdict}}": own("claims").rate("verdict")}, "ops"),
            Panel("Reconnects", {"{{instance}}": own("reconnects").rate("instance")}, "ops"),
            Panel("Age of the last message", {"{{instance}}": own("canary").max("instance")}, "s"),
            Panel("Agents", {"{{state}}": own("agents").max("state")}),
            Panel("Fan-out runs ended", {"{{status}}": own("fleet_runs").rate("status")}, "ops"),
            Panel(
                "Commands that agents got", {"{{verdict}}": own("commands").rate("verdict")}, "ops"
            ),
            Panel("Messages held", {"{{instance}}": own("held").sum("instance")}),
            Panel("Threads stuck", {"{{instance}}": own("stuck_threads").max("instance")}),
        ),
    )


def _nats() -> Dashboard:
    def server(name: str, *, rate: bool = False) -> dict[str, str]:
        series = foreign(f"nats_varz_{name}")
        return {"{{server_id}}": series.rate("server_id") if rate else series.max("server_id")}

    def jetstream(name: str) -> dict[str, str]:
        return {"{{server_name}}": foreign(f"nats_server_{name}").max("server_name")}

    stored = foreign("nats_server_total_message_bytes").name
    return Dashboard(
        "nats",
        "NATS",
        (
            Panel(
                "Healthy (0)", {"{{server_id}}": foreign("nats_healthz_status").max("server_id")}
            ),
            Panel("Connections", server("connections")),
            Panel("Slow consumers", server("slow_consumers")),
            Panel("Processor", server("cpu"), "percent"),
            Panel("Memory", server("mem"), "bytes"),
            Panel("Messages in", server("in_msgs", rate=True), "ops"),
            Panel("Messages out", server("out_msgs", rate=True), "ops"),
            Panel("Bytes in", server("in_bytes", rate=True), "Bps"),
            Panel("Bytes out", server("out_bytes", rate=True), "Bps"),
            Panel("Streams", jetstream("total_streams")),
            Panel("Consumers", jetstream("total_consumers")),
            Panel("Messages stored", jetstream("total_messages")),
            Panel(
                "Storage used",
                {
                    "{{server_name}}": f"max by (server_name) ({stored} / "
                    f"({foreign('nats_server_max_storage').name} > 0))"
                },
                "percentunit",
            ),
            Panel("Messages, by stream", {"{{stream}}": own("stream_messages").max("stream")}),
            Panel("Bytes, by stream", {"{{stream}}": own("stream_bytes").max("stream")}, "bytes"),
            Panel(
                "Account",
                {"stored": own("storage").max(), "limit": own("storage_limit").max()},
                "bytes",
            ),
            Panel(
                "Pending, by consumer",
                {
                    "{{consumer_name}}": foreign("nats_consumer_num_pending").max(
                        "stream_name", "consumer_name"
                    )
                },
            ),
        ),
    )


def _keda() -> Dashboard:
    scaled = ("scaledObject",)
    return Dashboard(
        "keda",
        "KEDA",
        (
            Panel(
                "Lag that KEDA sees",
                {
                    "{{scaledObject}} {{scaler}}": foreign("keda_scaler_metrics_value").max(
                        *scaled, "scaler"
                    )
                },
            ),
            Panel("Lag that Holdfast sees", {_LEGEND: own("lag").max(*_JOB)}),
            Panel("Active", {"{{scaledObject}}": foreign("keda_scaler_active").max(*scaled)}),
            Panel(
                "Errors",
                {"{{scaledObject}}": foreign("keda_scaler_detail_errors_total").rate(*scaled)},
                "ops",
            ),
            Panel(
                "Paused", {"{{scaledObject}}": foreign("keda_scaled_object_paused").max(*scaled)}
            ),
            Panel(
                "Pods",
                {"{{deployment}}": foreign("kube_deployment_status_replicas").max("deployment")},
            ),
            Panel(
                "Pods wanted",
                {"{{deployment}}": foreign("kube_deployment_spec_replicas").max("deployment")},
            ),
            Panel(
                "Changes within the hour",
                {
                    "{{deployment}}": "max by (deployment) (changes("
                    f"{foreign('kube_deployment_spec_replicas').name}[1h]))"
                },
            ),
            Panel("Workers", {"{{group}}": own("nodes").max("group", "state")}),
        ),
    )


def dashboards() -> list[Dashboard]:
    """All of them."""
    return [_jobs(), _schedules(), _cluster(), _nats(), _keda()]


def manifests(project: Project) -> list[dict[str, Any]]:
    """Each as a ConfigMap that Grafana's sidecar picks up."""
    found = []
    for board in dashboards():
        text = json.dumps(board.drawn(), indent=1)
        one = pods.resource(
            project,
            "v1",
            "ConfigMap",
            f"dashboard-{board.name}",
            "dashboards",
            data={f"holdfast-{board.name}.json": text},
        )
        one["metadata"]["labels"]["grafana_dashboard"] = "1"
        found.append(one)
    return found
