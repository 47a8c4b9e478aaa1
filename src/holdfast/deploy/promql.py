"""PromQL made from the catalogue of metrics, so that nothing can ask for what is not there.

`own("dead")` is a metric of ours, by its attribute in `holdfast.telemetry`; `foreign(…)` one that
NATS's exporter, KEDA, kube-state-metrics or Prometheus itself makes. Each refuses labels that it
does not have. `unknown` finds what a hand-written expression names and nobody makes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from holdfast.errors import ConfigError
from holdfast.telemetry import CATALOGUE, Metric

TARGET: Final = ("instance", "job", "namespace", "pod", "service")
"""Labels that every scraped series has."""
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
    "nats_consumer_num_pending": (
        *_JETSTREAM,
        "stream_name",
        "consumer_name",
        "is_consumer_leader",
    ),
    "keda_scaler_metrics_value": _SCALER,
    "keda_scaler_active": _SCALER,
    "keda_scaler_detail_errors_total": _SCALER,
    "keda_scaled_object_paused": ("exported_namespace", "scaledObject"),
    "kube_deployment_status_replicas": ("deployment",),
    "kube_deployment_spec_replicas": ("deployment",),
}
"""Metrics of others that we ask for, with the labels that we use."""

_HISTOGRAM = ("_bucket", "_sum", "_count")


@dataclass(frozen=True, slots=True)
class Series:
    """One metric under the name that Prometheus knows."""

    name: str
    labels: tuple[str, ...]

    def _by(self, by: tuple[str, ...]) -> str:
        for label in by:
            if label not in (*self.labels, *TARGET):
                raise ConfigError(f"{self.name} has no label {label!r}: it has {self.labels}")
        return f" by ({', '.join(by)})" if by else ""

    def sum(self, *by: str) -> str:
        """The sum over processes."""
        return f"sum{self._by(by)} ({self.name})"

    def max(self, *by: str) -> str:
        """What several processes say of the same thing."""
        return f"max{self._by(by)} ({self.name})"

    def rate(self, *by: str, window: str = "5m") -> str:
        """Each second, on average over a window."""
        return f"sum{self._by(by)} (rate({self.name}[{window}]))"

    def risen(self, *by: str, window: str = "10m") -> str:
        """How often it happened in a window, the very first time included.

        `increase` does not see the step from "never" to one, which is the one that matters.
        """
        return (
            f"sum{self._by(by)} (increase({self.name}[{window}])) > 0 "
            f"or sum{self._by(by)} ({self.name} unless {self.name} offset {window}) > 0"
        )

    def quantile(self, quantile: float, *by: str, window: str = "5m") -> str:
        """A quantile of a histogram."""
        spread = self._by(("le", *by)) if "le" in self.labels else ""
        if not spread:
            raise ConfigError(f"{self.name} is no histogram")
        return f"histogram_quantile({quantile:g}, sum{spread} (rate({self.name}_bucket[{window}])))"


def exposed(metric: Metric) -> str:
    """The name under which a metric of the catalogue is scraped."""
    return f"{metric.name}_total" if metric.kind == "counter" else metric.name


def own(attribute: str) -> Series:
    """A metric of ours."""
    for metric in CATALOGUE:
        if metric.attribute == attribute:
            labels = tuple(f"exported_{n}" if n in TARGET else n for n in metric.labels)
            return Series(exposed(metric), labels + (("le",) if metric.kind == "histogram" else ()))
    raise ConfigError(f"there is no metric {attribute!r} in the catalogue")


def foreign(name: str) -> Series:
    """A metric that another program makes."""
    if name not in FOREIGN:
        raise ConfigError(f"metric {name!r} is not among those that others are known to make")
    return Series(name, FOREIGN[name])


def known() -> set[str]:
    """Every name that an expression may ask for."""
    found = set(FOREIGN)
    for metric in CATALOGUE:
        found |= {exposed(metric)}
        if metric.kind == "histogram":
            found |= {metric.name + suffix for suffix in _HISTOGRAM}
    return found


_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_MATCHER = re.compile(r"\{[^}]*\}")
_WINDOW = re.compile(r"\[[^\]]*\]")
_WORD = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_CALL = re.compile(r"([a-zA-Z_]\w*)\s*\(")
_WORDS = {"and", "or", "unless", "offset", "bool", "by", "without", "on", "ignoring", "sum", "max"}
_WORDS |= {"min", "count", "avg", "inf", "nan", "group_left", "group_right", "atan2"}


def unknown(expression: str) -> list[str]:
    """The metrics that an expression names and nobody makes."""
    text = _QUOTED.sub("", expression)
    text = _WINDOW.sub("", _MATCHER.sub("", _GROUPING.sub("", text)))
    text = re.sub(r"\b\d+[smhdwy]\b|\b[\d.]+(e\d+)?\b", "", text)
    calls = set(_CALL.findall(text))
    named = set(_WORD.findall(text)) - calls - _WORDS
    return sorted(named - known())
