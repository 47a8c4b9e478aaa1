"""Configuration: where a value comes from, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import config
from holdfast.config import (
    ROLES,
    ConnectionConfig,
    LogConfig,
    RecordConfig,
    RoleConfig,
    WorkerConfig,
    documented,
    load,
    options,
    variable,
)
from holdfast.errors import ConfigError


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable and no file of the machine reaches these tests."""
    for name in list(os.environ):
        if name.startswith("HOLDFAST_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "holdfast.toml") -> None:
    Path(name).write_text(text, encoding="utf-8")


# -- where a value comes from --------------------------------------------------------------------


def test_load_prefers_argument_then_environment_then_file_then_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The precedence is explicit argument, environment, file, default."""
    assert load(WorkerConfig).concurrency == 100
    write("[worker]\nconcurrency = 3\n")
    assert load(WorkerConfig).concurrency == 3
    monkeypatch.setenv("HOLDFAST_WORKER_CONCURRENCY", "4")
    assert load(WorkerConfig).concurrency == 4
    assert load(WorkerConfig, concurrency=5).concurrency == 5


def test_load_takes_none_and_empty_variables_as_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that was not used and a variable that is empty leave the next source in charge."""
    monkeypatch.setenv("HOLDFAST_WORKER_GROUP", " ")
    write('[worker]\ngroup = "images"\n')
    assert load(WorkerConfig, group=None).group == "images"


def test_load_reads_the_file_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`HOLDFAST_CONFIG` replaces the file of the working directory."""
    write('[log]\nlevel = "error"\n')
    write('[log]\nlevel = "debug"\n', "other.toml")
    monkeypatch.setenv("HOLDFAST_CONFIG", str(tmp_path / "other.toml"))
    assert load(LogConfig).level == "debug"


def test_load_refuses_a_named_file_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error in `HOLDFAST_CONFIG` does not silently mean the defaults."""
    monkeypatch.setenv("HOLDFAST_CONFIG", "nowhere.toml")
    with pytest.raises(ConfigError, match=r"HOLDFAST_CONFIG names nowhere\.toml"):
        load(LogConfig)


def test_environment_is_not_read_at_import() -> None:
    """Importing the module with an impossible variable is fine; only `load` looks."""
    code = "import holdfast.config as c; c.WorkerConfig()"
    environment = os.environ | {"HOLDFAST_WORKER_CONCURRENCY": "none", "HOLDFAST_CONFIG": "/no"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)


@pytest.mark.parametrize("role", list(ROLES.values()))
def test_defaults_are_usable(role: type[RoleConfig]) -> None:
    """Every role works without any configuration."""
    assert load(role) == role()


@pytest.mark.parametrize("role", list(ROLES.values()))
def test_every_field_is_documented_and_has_a_variable(role: type[RoleConfig]) -> None:
    """No field is without a doc, and no two fields share a variable."""
    docs = documented(role)
    for spec in options(role):
        assert docs[spec.name].endswith(".")
        assert str(spec.type) in ("str", "int", "float")
    every = [variable(r, spec.name) for r in ROLES.values() for spec in options(r)]
    assert len(set(every)) == len(every)
    assert config.FILE_VARIABLE not in every


@pytest.mark.parametrize("role", list(ROLES.values()))
def test_every_field_is_read_from_environment_and_file(
    role: type[RoleConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of each field, written down, is read back from both sources."""
    default = {s.name: getattr(role(), s.name) for s in options(role)}
    lines = [f"{k} = {v!r}" for k, v in default.items()]
    write(f"[{role.table}]\n" + "\n".join(lines))
    assert load(role) == role()
    for name, value in default.items():
        monkeypatch.setenv(variable(role, name), str(value))
    assert load(role) == role()


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "teaches"),
    [
        ("[worker]\nconcurency = 3", r"holdfast\.toml: worker\.concurency is unknown; known are"),
        ("[workers]\n", r"holdfast\.toml: 'workers' is not a table; known are connection, worker"),
        ("worker = 3", r"holdfast\.toml: 'worker' is not a table"),
        ("[worker.deep]\n", r"worker\.deep is unknown"),
        ("[worker]\nconcurrency = 'many'", r"toml: worker\.concurrency must be a whole number"),
        ("[worker]\nconcurrency = 1.5", r"must be a whole number, not 1\.5"),
        ("[worker]\nconcurrency = true", "must be a whole number, not True"),
        ("[worker]\nconcurrency = 0", "at least 1 and at most 100,000, not 0"),
        ("[worker]\nconcurrency = [1]", "must be a whole number"),
        ("[worker]\ngroup = 5", r"worker\.group must be a text, not a int"),
        ("[worker]\ngroup = 'a b'", "group 'a b' is not usable"),
        ("[worker]\ngrace_seconds = 'soon'", r"grace_seconds 'soon' is not readable"),
        ("[worker]\ngrace_seconds = nan", "must be a number, not nan"),
        ("[worker]\ngrace_seconds = inf", "must be a number, not inf"),
        ("[log]\nlevel = 'loud'", "must be `debug` or `info`"),
        ("[log\n", r"holdfast\.toml is not TOML"),
    ],
)
def test_file_with_a_mistake_is_refused_by_name(text: str, teaches: str) -> None:
    """The message names the file, the key and what would be right."""
    write(text)
    role = LogConfig if text.startswith("[log") else WorkerConfig
    with pytest.raises(ConfigError, match=teaches):
        load(role)


def test_file_that_is_no_text_is_refused() -> None:
    """Bytes that are no UTF-8, and a directory in the file's place, are named."""
    Path("holdfast.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        load(LogConfig)
    Path("holdfast.toml").unlink()
    Path("holdfast.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load(LogConfig)


@pytest.mark.parametrize("value", ["many", "1.5", "-1", "1e3", "nan", "9" * 400])
def test_environment_with_a_mistake_is_refused_by_name(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the variable."""
    monkeypatch.setenv("HOLDFAST_WORKER_PROCESSES", value)
    with pytest.raises(ConfigError, match="environment variable HOLDFAST_WORKER_PROCESSES must be"):
        load(WorkerConfig)


def test_argument_that_does_not_exist_is_refused() -> None:
    """A misspelt argument is not ignored."""
    with pytest.raises(ConfigError, match="WorkerConfig has no 'concurency'"):
        load(WorkerConfig, concurency=3)


def test_seconds_take_durations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields in seconds also take texts such as '10m', from every source."""
    write('[worker]\ngrace_seconds = "2m"\n')
    monkeypatch.setenv("HOLDFAST_RECORD_KEYED_TTL_SECONDS", "2d")
    assert load(WorkerConfig).grace_seconds == 120
    assert load(RecordConfig).keyed_ttl_seconds == 172_800
    assert WorkerConfig(short_wait_seconds="500ms").short_wait_seconds == 0.5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("role", "values", "teaches"),
    [
        (WorkerConfig, {"extend_seconds": 2.5}, "below half of ack_wait_seconds"),
        (WorkerConfig, {"ack_wait_seconds": 3}, "below half of ack_wait_seconds"),
        (WorkerConfig, {"crash_limit": 0}, "at least 1"),
        (WorkerConfig, {"crash_limit": 6.5}, "whole number"),
        (WorkerConfig, {"health_port": 70_000}, "at most 65,535"),
        (WorkerConfig, {"group": "a.b"}, "group 'a.b' is not usable"),
        (RecordConfig, {"keyless_ttl_seconds": 60}, "record is already gone"),
        (RecordConfig, {"dedup_window_seconds": "25h"}, "at most 86,400"),
        (ConnectionConfig, {"namespace": "A"}, "namespace 'A' is not usable"),
        (ConnectionConfig, {"password": "x"}, "user and password belong together"),
        (ConnectionConfig, {"tls_key": "x"}, "tls_cert and tls_key belong together"),
        (ConnectionConfig, {"token": "x", "creds_file": "y"}, "token and creds_file are different"),
        (ConnectionConfig, {"replicas": 2}, "0, 1, 3 or 5"),
        (ConnectionConfig, {"nats_url": ""}, "server 1 of 1 is not a URL"),
        (ConnectionConfig, {"nats_url": "nats://a:1,b:2"}, "server 2 of 2 is not a URL"),
        (ConnectionConfig, {"nats_url": "http://a"}, "server 1 of 1 is not a URL"),
        (ConnectionConfig, {"nats_url": 5}, "must be a text"),
    ],
)
def test_values_that_cannot_work_together_are_refused(
    role: type[RoleConfig], values: dict[str, Any], teaches: str
) -> None:
    """A record that exists is usable; what cannot work teaches why."""
    with pytest.raises(ConfigError, match=teaches):
        role(**values)
    with pytest.raises(ConfigError, match=teaches):
        load(role, **values)


def test_relation_error_names_where_the_values_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """When two sources contradict each other, both are named."""
    write("[worker]\nack_wait_seconds = 2\n")
    monkeypatch.setenv("HOLDFAST_WORKER_EXTEND_SECONDS", "1")
    with pytest.raises(ConfigError) as caught:
        load(WorkerConfig)
    assert "holdfast.toml: worker.ack_wait_seconds" in str(caught.value)
    assert "environment variable HOLDFAST_WORKER_EXTEND_SECONDS" in str(caught.value)


@given(st.floats(0.5, 100), st.floats(0.05, 100))
def test_relations_hold_for_every_record_that_exists(ack_wait: float, extend: float) -> None:
    """No combination of allowed values gives a worker that loses its own runs."""
    try:
        made = WorkerConfig(ack_wait_seconds=ack_wait, extend_seconds=extend)
    except ConfigError:
        assert extend >= ack_wait / 2
    else:
        assert made.extend_seconds < made.ack_wait_seconds / 2


def test_record_is_frozen() -> None:
    """Configuration does not change while a process runs."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        WorkerConfig().group = "x"


# -- secrets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"user": "u", "password": "hunter2"},
        {"token": "hunter2"},
        {"nats_url": "nats://u:hunter2@a:1, nats://hunter2@b:2,nats://c:3"},
        {"nats_url": "nats://u:p@hunter2@a:1"},
    ],
)
def test_repr_shows_no_secret(values: dict[str, Any]) -> None:
    """Printing the configuration gives no password away, not even one inside a URL."""
    made = ConnectionConfig(**values)
    assert "hunter2" not in f"{made} {made!r}"
    assert "***" in repr(made)


@pytest.mark.parametrize(
    "values",
    [
        {"nats_url": "nats://u:hunter2,x@a:1"},
        {"nats_url": "u:hunter2@a:1"},
        {"password": "hunter2"},
        {"token": ["hunter2"]},
        {"token": "hunter2", "user": "u", "password": "hunter2"},
    ],
)
def test_message_shows_no_secret(values: dict[str, Any]) -> None:
    """A mistake beside a secret does not put it into a log."""
    with pytest.raises(ConfigError) as caught:
        load(ConnectionConfig, **values)
    assert "hunter2" not in str(caught.value)


def test_servers_are_the_urls_one_by_one() -> None:
    """Commas separate; blanks do not matter."""
    made = ConnectionConfig(nats_url="nats://a:1, tls://b:2")
    assert made.servers == ["nats://a:1", "tls://b:2"]


def test_restart_strategies_of_groups_are_read() -> None:
    """One text has them all, so that an environment variable can; a wrong one is refused."""
    config = WorkerConfig(group_restart="payments=after_grace, rockets = never")
    assert config.restarts == {"payments": "after_grace", "rockets": "never"}
    assert WorkerConfig().restarts == {}
    for wrong in ("payments", "payments=sometimes", "=never", "pay ments=never"):
        with pytest.raises(ConfigError, match="group"):
            WorkerConfig(group_restart=wrong)
    with pytest.raises(ConfigError, match="immediately"):
        WorkerConfig(restart="later")
