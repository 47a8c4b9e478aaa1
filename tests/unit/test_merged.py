"""The metrics of several processes as one text."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from holdfast.telemetry import Telemetry
from holdfast.worker.supervisor import merge


def text(runs: int) -> str:
    telemetry = Telemetry()
    telemetry.retries.labels("nak").inc(runs)
    telemetry.recovery_seconds.observe(0.2)
    telemetry.running.set(runs)
    return telemetry.render().decode()


def test_merge_keeps_every_series_apart_by_process() -> None:
    """Counters, gauges and histograms of each process, none of them added up."""
    merged = merge([(0, text(3)), (1, text(5))]).decode()
    for process, runs in (("0", 3), ("1", 5)):
        assert f'holdfast_retries_total{{how="nak",process="{process}"}} {runs}.0' in merged
        assert f'holdfast_recovery_seconds_count{{process="{process}"}} 1.0' in merged
        assert f'holdfast_attempts_running{{process="{process}"}} {runs}.0' in merged


def test_merge_describes_each_metric_once() -> None:
    """Prometheus refuses a text that describes a metric twice."""
    merged = merge([(n, text(n)) for n in range(4)]).decode()
    for word in ("HELP", "TYPE"):
        names = [line.split()[2] for line in merged.splitlines() if line.startswith(f"# {word}")]
        assert len(names) == len(set(names))
    assert list(text_string_to_metric_families(merged))


def test_merge_leaves_out_a_process_that_said_nothing() -> None:
    """A process that is away takes nothing from the others."""
    merged = merge([(0, ""), (1, text(2))]).decode()
    assert 'process="0"' not in merged
    assert 'process="1"' in merged
