"""Alert rules: promtool takes them, and each fires when it should and only then."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.deploy.monitoring import dashboards, expressions, unknown, unknown_labels
from tests.unit.deployment import alert_groups

ROOT = Path(__file__).parents[2]

STEADY = "1x60"
CONTROL = '{instance="c-0"}'
LEADS = f'holdfast_leading{CONTROL[:-1]}, role="scheduler"}}'


@functools.cache
def groups() -> list[dict[str, Any]]:
    """Every alert, those of options included."""
    return alert_groups(backup_url="s3://kept/acme")


def placed(series: str, namespace: str) -> str:
    """A series as it is scraped in a namespace of Kubernetes."""
    label = "exported_namespace" if series.startswith("keda_") else "namespace"
    name, brace, rest = series.partition("{")
    return f'{name}{{{label}="{namespace}"{", " if brace else "}"}{rest}'


def _case(
    alert: str, series: dict[str, str], at: str, labels: dict[str, str] | None, **more: Any
) -> dict[str, Any]:
    """A story, and whether the alert fires at some minute of it."""
    rule = next(r for g in groups() for r in g["rules"] if r["alert"] == alert)
    space = more.pop("space", "acme")
    fires = [] if labels is None else [{"exp_labels": rule["labels"] | labels}]
    for one in fires:
        one["exp_annotations"] = rule["annotations"] | more
    healthy = {LEADS: STEADY, 'up{job="control", instance="c-0"}': STEADY}
    healthy |= {'up{job="control", instance="c-1"}': STEADY}
    return {
        "interval": "1m",
        "input_series": [
            {"series": placed(s, space), "values": v} for s, v in (healthy | series).items()
        ],
        "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": fires}],
    }


OVERDUE = f"holdfast_slot_overdue_seconds{CONTROL}"
LAG = 'holdfast_job_lag{instance="c-0", group="g", exported_job="j"}'
DEAD = 'holdfast_stream_messages{instance="c-0", stream="HF_DEAD"}'
LOST = 'holdfast_nodes_lost_total{instance="c-0", role="worker"}'
FENCED = 'holdfast_fenced_writes_total{instance="w-0", what="settle"}'
USED = 'nats_server_total_message_bytes{server_name="nats-0"}'
MOST = 'nats_server_max_storage{server_name="nats-0"}'
ENDED = 'holdfast_attempts_ended_total{instance="w-0", group="g", exported_job="j", outcome='
STORED = f"holdfast_storage_bytes{CONTROL}"
LIMIT = f"holdfast_storage_limit_bytes{CONTROL}"
OFFLINE = 'holdfast_agents{instance="c-0", state="offline"}'
KEDA = 'keda_scaler_detail_errors_total{scaledObject="resize", scaler="s0"}'


def _bucket(le: str) -> str:
    return f'holdfast_slot_delay_seconds_bucket{{le="{le}"}}'


def _summary(text: str) -> dict[str, str]:
    return {"summary": text}


SAVED = 'kube_cronjob_status_last_successful_time{cronjob="backup"}'
MADE = 'kube_cronjob_created{cronjob="backup"}'
FAILED = 'kube_job_status_failed{job_name="backup-drill-29"}'
CASES = {
    "backup old": _case(
        "HoldfastBackupOld", {SAVED: "0x4000"}, "3000m", {},
        **_summary("The newest backup was made 2d 2h 0m 0s ago."),
    ),
    "backup old elsewhere": _case(
        "HoldfastBackupOld", {SAVED: "0x4000"}, "3000m", None, space="staging"
    ),
    "backup new": _case("HoldfastBackupOld", {SAVED: "0x1000 60000x3000"}, "3000m", None),
    "backup never made": _case(
        "HoldfastBackupMissing", {MADE: "0x4000"}, "3000m", {},
        **_summary("No backup was made in the 2d 2h 0m 0s since backups were set up."),
    ),
    "backup made": _case("HoldfastBackupMissing", {MADE: "0x4000", SAVED: "0x4000"}, "3000m", None),
    "rehearsal failed": _case(
        "HoldfastBackupFailed", {FAILED: "1x60"}, "30m", {"job_name": "backup-drill-29"},
        **_summary("backup-drill-29 failed: a backup was not made, or cannot be restored."),
    ),
    "scheduler silent": _case(
        "HoldfastSchedulerSilent", {OVERDUE: "0x10 30x10"}, "15m", {},
        **_summary("A slot is due for 30s and no scheduler has fired it."),
    ),
    "production silent beside staging": _case(
        "HoldfastNobodyLeads", {}, "10m", {}, space="staging",
        **_summary("No scheduler leads: nothing is fired."),
    ),
    "production gone beside staging": _case(
        "HoldfastControlDown", {}, "10m", {}, space="staging",
        **_summary("Fewer than two control processes answer: the next loss is a gap."),
    ),
    "scheduler speaks": _case("HoldfastSchedulerSilent", {OVERDUE: "0x10 2x10"}, "15m", None),
    "nobody leads": _case(
        "HoldfastNobodyLeads", {LEADS: "1x5 0x10"}, "10m", {}
    ),
    "somebody leads": _case("HoldfastNobodyLeads", {}, "10m", None),
    "slots late": _case(
        "HoldfastSlotsLate",
        {_bucket("1.0"): "0x60", _bucket("5.0"): "0+10x60", _bucket("+Inf"): "0+10x60"},
        "30m", {}, **_summary("One slot in a hundred is sent more than 4.96s late."),
    ),
    "slots in time": _case(
        "HoldfastSlotsLate",
        {_bucket("1.0"): "0+10x60", _bucket("+Inf"): "0+10x60"}, "30m", None,
    ),
    "lag grows": _case(
        "HoldfastLagGrowing", {LAG: "0+50x60"}, "50m", {"group": "g", "exported_job": "j"},
        **_summary("More runs come than are done: g/j."),
    ),
    "lag shrinks": _case("HoldfastLagGrowing", {LAG: "5000-50x60"}, "50m", None),
    "lag is small": _case("HoldfastLagGrowing", {LAG: "0+1x60"}, "50m", None),
    "dead letters": _case(
        "HoldfastDeadLetters", {DEAD: "3x10 4x20"}, "12m", {"stream": "HF_DEAD"},
        **_summary("1 runs were given up within ten minutes."),
    ),
    "old dead letters": _case("HoldfastDeadLetters", {DEAD: "3x60"}, "30m", None),
    "dead letters drop": _case("HoldfastDeadLetters", {DEAD: "9x10 2x20"}, "12m", None),
    "node lost": _case(
        "HoldfastNodesLost", {LOST: "0x10 1x20"}, "12m", {"role": "worker"},
        **_summary("A worker died, froze or was cut off."),
    ),
    "first node lost": _case(
        "HoldfastNodesLost", {LOST: "_x10 1x20"}, "12m", {"role": "worker"},
        **_summary("A worker died, froze or was cut off."),
    ),
    "node lost long ago": _case("HoldfastNodesLost", {LOST: "_x5 1x55"}, "50m", None),
    "fenced write": _case(
        "HoldfastFencedWrites", {FENCED: "_x10 1x20"}, "12m", {"what": "settle"},
        **_summary("A process that had been replaced woke up and was refused: settle."),
    ),
    "no fenced write": _case("HoldfastFencedWrites", {FENCED: "2x60"}, "30m", None),
    "disk nearly full": _case(
        "HoldfastStorageFull", {USED: "95x60", MOST: "100x60"}, "30m", {"server_name": "nats-0"},
        **_summary("95% of the storage is used."),
    ),
    "account nearly full": _case(
        "HoldfastStorageFull", {STORED: "95x60", LIMIT: "100x60"}, "30m", {},
        **_summary("95% of the storage is used."),
    ),
    "disk has room": _case("HoldfastStorageFull", {USED: "50x60", MOST: "100x60"}, "30m", None),
    "account without a limit": _case(
        "HoldfastStorageFull", {STORED: "95x60", LIMIT: "0x60"}, "30m", None
    ),
    "disk fills": _case(
        "HoldfastStorageFillsSoon", {USED: "0+1x60", MOST: "1000x60"}, "55m",
        {"server_name": "nats-0"},
    ),
    "disk fills slowly": _case(
        "HoldfastStorageFillsSoon", {USED: "0+1x60", MOST: "9000x60"}, "55m", None
    ),
    "attempts fail": _case(
        "HoldfastAttemptsFail",
        {ENDED + '"failed"}': "0+5x60", ENDED + '"done"}': "0+5x60"}, "40m",
        {"group": "g", "exported_job": "j"}, **_summary("50% of the attempts at j fail."),
    ),
    "few attempts fail": _case(
        "HoldfastAttemptsFail",
        {ENDED + '"failed"}': "0+1x60", ENDED + '"done"}': "0+50x60"}, "40m", None,
    ),
    "one control left": _case(
        "HoldfastControlDown", {'up{job="control", instance="c-1"}': "1x10 0x20"}, "20m", {}
    ),
    "two control": _case("HoldfastControlDown", {}, "20m", None),
    "nats down": _case(
        "HoldfastNatsDown", {'up{job="nats-headless", instance="n-0"}': "1x5 0x10"}, "10m",
        {"job": "nats-headless", "instance": "n-0"},
    ),
    "worker deaf": _case(
        "HoldfastWorkerDeaf", {'holdfast_canary_age_seconds{instance="w-0"}': "5x5 60x10"}, "10m",
        {"instance": "w-0"}, **_summary("No message has travelled to w-0 for a while."),
    ),
    "clock off": _case(
        "HoldfastClockOff", {f"holdfast_clock_offset_seconds{CONTROL}": "-0.7x30"}, "20m",
        {"instance": "c-0"},
        **_summary("The clock of c-0 is off; beyond a second it fires nothing."),
    ),
    "flapping": _case(
        "HoldfastFlapping", {'holdfast_reconnects_total{instance="w-0"}': "0+1x60"}, "30m",
        {"instance": "w-0"}, **_summary("w-0 keeps losing its connection to NATS."),
    ),
    "agents offline": _case(
        "HoldfastAgentsOffline", {OFFLINE: "2x30"}, "20m",
        {}, **_summary("2 agents are offline."),
    ),
    "agents online": _case(
        "HoldfastAgentsOffline", {OFFLINE: "0x30"}, "20m",
        None,
    ),
    "takeovers": _case(
        "HoldfastTakeovers", {'holdfast_takeovers_total{instance="w-0"}': "0+1x120"}, "90m", {},
        **_summary("60 runs were taken over from lost workers within an hour."),
    ),
    "threads stuck": _case(
        "HoldfastThreadsStuck", {'holdfast_stuck_threads{instance="w-0"}': "2x60"}, "30m",
        {"instance": "w-0"},
        **_summary("Handlers on w-0 are still running long after their timeout."),
    ),
    "keda errs": _case(
        "HoldfastScalerErrors", {KEDA: "_x5 1+1x30"}, "20m", {"scaledObject": "resize"},
        **_summary("KEDA cannot read the lag of resize: it runs on its fallback."),
    ),
}  # fmt: skip


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """The rules as a file of Prometheus."""
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": groups()}))
    return path


def promtool(*words: str) -> str:
    """Run promtool; it has to be there."""
    done = subprocess.run(["promtool", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_takes_the_rules(rules: Path) -> None:
    """Every expression, duration and template is one."""
    count = sum(len(group["rules"]) for group in groups())
    assert f"{count} rules found" in promtool("check", "rules", str(rules))


@pytest.mark.parametrize("days", [False, True], ids=["hours", "days"])
def test_each_alert_fires_when_it_should_and_only_then(rules: Path, days: bool) -> None:
    """Stories for every alert, told to promtool: with the trouble and without.

    In stories of days the rules are evaluated less often: every minute would take 20 s of CPU.
    """
    path = rules.with_name("tests.yaml")
    stories = [
        case | {"name": name} for name, case in CASES.items() if name.startswith("backup") == days
    ]
    every = "30m" if days else "1m"
    told = {"rule_files": [str(rules)], "evaluation_interval": every, "tests": stories}
    path.write_text(yaml.safe_dump(told, sort_keys=False))
    promtool("test", "rules", str(path))


def test_every_alert_has_a_story() -> None:
    """No rule goes without one in which it fires."""
    told = {
        case["alert_rule_test"][0]["alertname"]
        for case in CASES.values()
        if case["alert_rule_test"][0]["exp_alerts"]
    }
    assert told == {rule["alert"] for group in groups() for rule in group["rules"]}


def test_every_alert_has_a_runbook_that_exists() -> None:
    """Who is woken finds the page, and the heading on it."""
    for group in groups():
        for rule in group["rules"]:
            url = rule["annotations"]["runbook_url"]
            assert url.startswith("docs/operations")
            name, _, anchor = url.partition("#")
            page = (ROOT / name).read_text(encoding="utf-8")
            headings = {
                line.lstrip("# ").lower().replace(" ", "-").replace("'", "")
                for line in page.splitlines()
                if line.startswith("#")
            }
            assert anchor in headings, f"{rule['alert']}: {name} has no #{anchor}"


def test_no_expression_names_a_metric_that_nobody_makes() -> None:
    """Rules and panels, all of them."""
    asked = [rule["expr"] for group in groups() for rule in group["rules"]]
    asked += [text for board in dashboards("acme").values() for _, text in expressions(board)]
    assert len(asked) > 70
    assert {name for text in asked for name in unknown(text) + unknown_labels(text)} == set()
