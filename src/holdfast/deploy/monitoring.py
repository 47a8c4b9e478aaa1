"""Alert rules and dashboards: checks the metrics they query, and builds the dashboards.

Both are YAML in `templates/monitoring`. Expressions may use only metrics of our catalogue and those
of the NATS exporter, KEDA, kube-state-metrics and Prometheus itself: `unknown` finds any others,
also in files edited by hand.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, Final

import yaml

from holdfast.deploy.inventory import Inventory, Item, Problem
from holdfast.telemetry import CATALOGUE, Metric

BOARDS: Final = ("jobs", "scheduler", "cluster", "nats", "keda")
COLUMNS, WIDTH, HEIGHT = 3, 8, 8
"""A Grafana page is 24 units wide."""
SOURCES = {
    "prometheus": {"type": "prometheus", "uid": "${datasource}"},
    "loki": {"type": "loki", "uid": "${loki}"},
}

TARGET: Final = frozenset({"instance", "job", "namespace", "pod", "service"})
"""Labels of every scraped series. A metric's own label of that name becomes exported_job etc."""
_SERVER = ("server_id",)
_JETSTREAM = ("server_id", "server_name", "cluster")
_SCALER = ("exported_namespace", "scaledObject", "scaler", "metric")
FOREIGN: Final[dict[str, tuple[str, ...]]] = {
    "up": (),
    "nats_varz_connections": _SERVER,
    "nats_varz_cpu": _SERVER,
    "nats_varz_mem": _SERVER,
    "nats_varz_in_msgs": _SERVER,
    "nats_varz_out_msgs": _SERVER,
    "nats_varz_in_bytes": _SERVER,
    "nats_varz_out_bytes": _SERVER,
    "nats_varz_slow_consumers": _SERVER,
    "nats_healthz_status": _SERVER,
    "nats_server_total_streams": _JETSTREAM,
    "nats_server_total_consumers": _JETSTREAM,
    "nats_server_total_messages": _JETSTREAM,
    "nats_server_total_message_bytes": _JETSTREAM,
    "nats_server_max_storage": _JETSTREAM,
    "nats_consumer_num_pending": (*_JETSTREAM, "stream_name", "consumer_name"),
    "keda_scaler_metrics_value": _SCALER,
    "keda_scaler_active": _SCALER,
    "keda_scaler_detail_errors_total": _SCALER,
    "keda_scaled_object_paused": ("exported_namespace", "scaledObject"),
    "kube_deployment_status_replicas": ("deployment",),
    "kube_deployment_spec_replicas": ("deployment",),
    "kube_cronjob_created": ("cronjob",),
    "kube_cronjob_status_last_successful_time": ("cronjob",),
    "kube_job_status_failed": ("job_name",),
}
"""Other programs' metrics that our expressions use, with the labels we use."""

_HISTOGRAM = ("_bucket", "_sum", "_count")


def dashboards(namespace: str) -> dict[str, dict[str, Any]]:
    """Every dashboard as Grafana imports it, by the name of its file.

    Two environments in one Grafana have separate dashboards: each preselects its `namespace`.
    """
    folder = files("holdfast.deploy") / "templates" / "monitoring"
    return {
        f"{namespace}-{name}": _board(
            name, yaml.safe_load((folder / f"{name}.yaml").read_text("utf-8")), namespace
        )
        for name in BOARDS
    }


def _board(name: str, board: dict[str, Any], namespace: str) -> dict[str, Any]:
    chosen = {
        "name": "namespace",
        "type": "query",
        "datasource": SOURCES["prometheus"],
        "query": "label_values(holdfast_leading, namespace)",
        "current": {"text": namespace, "value": namespace},
        "refresh": 2,  # when the time range changes
    }
    return {
        # Grafana accepts 40 characters.
        "uid": f"holdfast-{name}-{hashlib.sha256(namespace.encode()).hexdigest()[:8]}",
        "title": f"Holdfast / {namespace} / {board['title']}",
        "tags": ["holdfast"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {"name": "loki", "type": "datasource", "query": "loki", "hide": 2},
                chosen,
            ]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(board["panels"])],
    }


def _panel(number: int, panel: dict[str, Any]) -> dict[str, Any]:
    """A panel; its number determines its position."""
    row, column = divmod(number, COLUMNS)
    source = SOURCES[panel.get("source", "prometheus")]
    targets = [
        {"refId": chr(65 + n), "expr": expr, "legendFormat": legend, "datasource": source}
        for n, (legend, expr) in enumerate(panel["queries"].items())
    ]
    return {
        "id": number + 1,
        "type": panel.get("kind", "timeseries"),
        "title": panel["title"],
        "description": panel.get("about", ""),
        "datasource": source,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": row * HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.get("unit", "short"), "min": 0},
            "overrides": [],
        },
        "targets": targets,
    }


def exposed(metric: Metric) -> str:
    """The name under which a catalogue metric is scraped."""
    return f"{metric.name}_total" if metric.kind == "counter" else metric.name


def known() -> dict[str, frozenset[str]]:
    """Every metric an expression may use, with its labels."""
    found = {name: TARGET.union(labels) for name, labels in FOREIGN.items()}
    for metric in CATALOGUE:
        labels = TARGET.union(f"exported_{n}" if n in TARGET else n for n in metric.labels)
        found[exposed(metric)] = labels
        if metric.kind == "histogram":
            found |= {metric.name + suffix: labels | {"le"} for suffix in _HISTOGRAM}
    return found


_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_MATCHER = re.compile(r"\{[^}]*\}")
_WINDOW = re.compile(r"\[[^\]]*\]")
_WORD = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_CALL = re.compile(r"([a-zA-Z_]\w*)\s*\(")
_WORDS = {"and", "or", "unless", "offset", "bool", "by", "without", "on", "ignoring", "sum", "max"}
_WORDS |= {"min", "count", "avg", "inf", "nan", "group_left", "group_right", "atan2"}


def _metrics(expression: str) -> set[str]:
    text = _QUOTED.sub("", expression)
    text = _WINDOW.sub("", _MATCHER.sub("", _GROUPING.sub("", text)))
    text = re.sub(r"\b\d+[smhdwy]\b|\b[\d.]+(e\d+)?\b", "", text)
    return set(_WORD.findall(text)) - set(_CALL.findall(text)) - _WORDS


def unknown(expression: str) -> list[str]:
    """Metrics in an expression that nothing exports."""
    return sorted(_metrics(expression) - known().keys())


def unknown_labels(expression: str) -> list[str]:
    """Labels an expression groups by that none of its metrics has."""
    labels = {name for found in _GROUPING.finditer(expression) for name in _WORD.findall(found[2])}
    every = known()
    return sorted(labels.difference(*(every.get(name, ()) for name in _metrics(expression))))


# ---- rules of `holdfast deploy check`


def known_in_rules(inventory: Inventory) -> Iterator[Problem]:
    """Alert rules use metrics that exist, and have a description."""
    for item in inventory.of("PrometheusRule"):
        for group in item.spec.get("groups") or []:
            for rule in group.get("rules") or []:
                for text in _flaws(str(rule.get("expr", ""))):
                    yield item.problem(f"rule {rule.get('alert')}: {text}")
                if not (rule.get("annotations") or {}).get("summary"):
                    yield item.problem(f"rule {rule.get('alert')}: it has no summary")


def known_in_panels(inventory: Inventory) -> Iterator[Problem]:
    """Panels use metrics that exist."""
    for item in inventory.of("ConfigMap"):
        if "grafana_dashboard" not in item.labels:
            continue
        for name, text in (item.resource.get("data") or {}).items():
            yield from _of_dashboard(item, name, text)


def _flaws(expression: str) -> Iterator[str]:
    for name in unknown(expression):
        yield f"there is no metric {name!r}"
    for name in unknown_labels(expression):
        yield f"none of its metrics has a label {name!r}"


def _of_dashboard(item: Item, name: str, content: str) -> Iterator[Problem]:
    try:
        board = json.loads(content)
    except ValueError as error:
        yield item.problem(f"{name} is not JSON: {error}")
        return
    for title, expression in expressions(board):
        for text in _flaws(expression):
            yield item.problem(f"{name}, panel {title!r}: {text}")


def expressions(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every Prometheus expression of a dashboard, with its panel's title."""
    for panel in board.get("panels") or []:
        if (panel.get("datasource") or {}).get("type") == "loki":
            continue
        for target in panel.get("targets") or []:
            yield str(panel.get("title")), str(target.get("expr", ""))


RULES = (known_in_rules, known_in_panels)
