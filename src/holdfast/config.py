"""Configuration: one frozen record per role, every field documented where it is defined.

A value comes from the first of: an explicit argument, the environment, `holdfast.toml`, the
default. `load(WorkerConfig, concurrency=10)` does this; the environment and the file are read when
`load` is called, never at import. The file is the one `HOLDFAST_CONFIG` names, or `holdfast.toml`
in the working directory, with one table per role (`[worker]`).

Guaranteed: a record that exists is usable. Types, limits and the relations between fields are
checked at construction, and what cannot work raises a `ConfigError` that names the field, where
the value came from and what to write instead. Unknown tables and keys of the file are refused.
Passwords and tokens, also those inside URLs, appear in no `repr` and in no message.

Not checked: whether files, hosts or ports exist. Unknown environment variables are ignored, because
Kubernetes adds `HOLDFAST_…_PORT` and others for every service of that name.

`python -m holdfast.config` prints `docs/configuration.md`.
"""

from __future__ import annotations

import math
import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from holdfast import durations, names
from holdfast.errors import ConfigError, InvalidInput

FILE = "holdfast.toml"
FILE_VARIABLE = "HOLDFAST_CONFIG"

ROLES: dict[str, type[Role]] = {}
"""Every role by the name of its table in the file."""

R = TypeVar("R", bound="Role")
C = TypeVar("C")


def option(
    default: Any,
    doc: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """A field of a role: its default, what it means, and which values it takes."""
    facts = {"doc": doc, "least": least, "most": most, "choices": choices, "secret": secret}
    return field(default=default, metadata=facts)


class Role:
    """What all roles share: checks at construction, and a `repr` without secrets."""

    table: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if "table" in vars(cls):
            ROLES[cls.table] = cls

    def __post_init__(self) -> None:
        for spec in options(type(self)):
            value = _checked(spec, getattr(self, spec.name), f"{self.table}.{spec.name}")
            object.__setattr__(self, spec.name, value)
        self._check_relations()

    def _check_relations(self) -> None:
        """Raise `ConfigError` when values that are fine alone cannot work together."""

    def __repr__(self) -> str:
        shown = (f"{s.name}={_shown(s, getattr(self, s.name))}" for s in options(type(self)))
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class ConnectionConfig(Role):
    """How every process and every client reaches NATS."""

    table = "connection"

    nats_url: str = option(
        "nats://127.0.0.1:4222",
        "Servers to connect to, separated by commas: `nats://`, `tls://`, `ws://` or `wss://`.",
    )
    namespace: str = option(
        names.DEFAULT_NAMESPACE,
        "First part of every stream, subject and bucket name: two namespaces share a NATS "
        "account without seeing each other.",
    )
    user: str = option("", "User name, together with `password`.")
    password: str = option("", "Password of `user`.", secret=True)
    token: str = option("", "Authentication token.", secret=True)
    nkey_seed_file: str = option("", "File with an NKey seed.")
    creds_file: str = option("", "File with a user JWT and its seed (`.creds`).")
    tls_ca: str = option("", "File with the certificate authority that signed the servers'.")
    tls_cert: str = option("", "File with the client's certificate, together with `tls_key`.")
    tls_key: str = option("", "File with the key of `tls_cert`.")
    tls_hostname: str = option("", "Name the server's certificate must carry, if not the URL's.")
    connect_timeout_seconds: float = option(
        5.0, "How long one attempt to connect may take.", least=0.05, most=3600
    )
    request_timeout_seconds: float = option(
        5.0,
        "How long an answer may take; after that the outcome is unknown.",
        least=0.05,
        most=3600,
    )
    replicas: int = option(
        0,
        "Copies of every stream: 1, 3 or 5; 0 means as many as the cluster has nodes for, "
        "at most 3.",
        least=0,
        most=5,
    )

    @property
    def servers(self) -> list[str]:
        """The URLs one by one."""
        return [url.strip() for url in self.nats_url.split(",")]

    def _check_relations(self) -> None:
        _check_servers(self.servers)
        _checked_by(names.Names, self.namespace)
        if self.replicas not in (0, 1, 3, 5):
            raise ConfigError("replicas must be 0, 1, 3 or 5: an even number adds no safety")
        if bool(self.password) != bool(self.user):
            raise ConfigError("user and password belong together: give both or neither")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key belong together: give both or neither")
        given = [n for n in ("user", "token", "nkey_seed_file", "creds_file") if getattr(self, n)]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are different ways to log in: give one")


@dataclass(frozen=True, repr=False)
class WorkerConfig(Role):
    """What one `holdfast worker` does."""

    table = "worker"

    group: str = option(names.DEFAULT_GROUP, "Group whose jobs this worker runs.")
    concurrency: int = option(
        100, "Runs that one process executes at the same time.", least=1, most=100_000
    )
    processes: int = option(1, "Processes that share the work.", least=1, most=1024)
    max_runs: int = option(
        0, "Runs after which a process is replaced by a fresh one; 0 means never.", least=0
    )
    grace_seconds: float = option(
        0.0,
        "How long running handlers may go on after SIGTERM; 0 means as the liveness profile says.",
        least=0,
        most=86_400,
    )
    health_port: int = option(
        0, "Port that answers health and metrics requests; 0 means none.", least=0, most=65_535
    )
    health_host: str = option("0.0.0.0", "Address on which `health_port` listens.")
    ack_wait_seconds: float = option(
        5.0,
        "After this long without a sign of life the server gives a run to another worker.",
        least=0.5,
        most=3600,
    )
    extend_seconds: float = option(
        1.5,
        "How often a worker gives that sign for everything it holds; below half of "
        "`ack_wait_seconds`.",
        least=0.05,
    )
    crash_limit: int = option(
        3, "Crashes of its process after which a run becomes a dead letter.", least=1, most=1000
    )
    canary_seconds: float = option(
        5.0, "How often a worker sends itself a message to prove that it can.", least=0.5, most=3600
    )
    short_wait_seconds: float = option(
        10.0,
        "Retries up to this wait stay with the consumer; longer ones become scheduled messages "
        "and do not count as lag.",
        least=0,
        most=3600,
    )

    def _check_relations(self) -> None:
        _checked_by(names.check_name, self.group, "group")
        if self.extend_seconds >= self.ack_wait_seconds / 2:
            raise ConfigError(
                f"extend_seconds ({self.extend_seconds:g}) must be below half of ack_wait_seconds "
                f"({self.ack_wait_seconds:g}): else one late extension gives the run to another "
                "worker while this one still executes it"
            )


@dataclass(frozen=True, repr=False)
class LivenessConfig(Role):
    """How fast the death of a node is noticed. Every number that is 0 comes from the profile."""

    table = "liveness"

    profile: str = option(
        "lan",
        "Numbers for one machine, one network, or several sites; docs/liveness.md explains each.",
        choices=("local", "lan", "wan"),
    )
    enabled: str = option(
        "yes", "Whether this node is judged at all; `no` is for debugging.", choices=("yes", "no")
    )
    heartbeat_seconds: float = option(
        0.0, "How often a node renews its record.", least=0, most=3600
    )
    timeout_seconds: float = option(
        0.0, "Silence after which a node is declared lost.", least=0, most=86_400
    )
    initial_delay_seconds: float = option(
        0.0, "How long a new node is not judged.", least=0, most=86_400
    )
    ping_seconds: float = option(
        0.0, "How often a coordinator asks whether the node is there.", least=0, most=3600
    )
    ping_misses: int = option(
        0, "Answers of 'nobody there' in a row that are tolerated.", least=0, most=1000
    )
    grace_seconds: float = option(
        0.0,
        "Time to finish after SIGTERM, and before `after_grace` starts a lost node's runs again.",
        least=0,
        most=86_400,
    )


LEASES = {"local": (2.0, 0.5, 0.1), "lan": (5.0, 2.0, 0.15), "wan": (15.0, 5.0, 1.0)}
"""By profile: a lease's TTL, how often it is renewed, how often its holder is looked for."""


@dataclass(frozen=True, repr=False)
class SchedulerConfig(Role):
    """What one `holdfast scheduler` does."""

    table = "scheduler"

    profile: str = option(
        "lan",
        "How far apart the machines are: sets the times below that are 0.",
        choices=tuple(LEASES),
    )
    lease_ttl_seconds: float = option(
        0.0,
        "After this long without a renewal the leader's lease expires; 0: by profile "
        "(2, 5 or 15).",
        least=0,
        most=3600,
    )
    lease_renew_seconds: float = option(
        0.0,
        "How often the leader renews its lease; 0: by profile (0.5, 2 or 5).",
        least=0,
        most=3600,
    )
    probe_seconds: float = option(
        0.0,
        "How often the others look whether the leader's process is there; 0: by profile "
        "(0.1, 0.15 or 1).",
        least=0,
        most=3600,
    )
    probe_misses: int = option(
        3, "Looks in a row that find nobody before another takes over.", least=1, most=100
    )
    overdue_seconds: float = option(
        1.0,
        "A slot that is due for so long and not recorded makes another scheduler look at the "
        "leader, and take over when it does not answer; after three times this it does so anyway.",
        least=0.1,
        most=3600,
    )
    missed_after_seconds: float = option(
        10.0,
        "A slot that could not be sent within this time of being due was missed: `catch_up` "
        "decides about it. Until then it is late, and fires.",
        least=1,
        most=86_400,
    )
    clock_tolerance_seconds: float = option(
        1.0,
        "A scheduler whose clock differs by more from the server's fires nothing.",
        least=0.05,
        most=60,
    )
    slot_ttl_seconds: int = option(
        604_800,
        "How long the record of a slot is kept at most; `slots_kept` may make it shorter.",
        least=3600,
    )
    slots_kept: int = option(
        1000,
        "How many slots of one schedule are kept, about; none goes before an hour has passed.",
        least=1,
        most=1_000_000,
    )
    release: str = option(
        "",
        "The release of the app whose schedules are registered, such as a build number: a lower "
        "one never replaces what a higher one registered.",
    )
    ready_file: str = option("", "File that exists while this scheduler is ready.")
    health_port: int = option(
        0, "Port that answers health and metrics requests; 0 means none.", least=0, most=65_535
    )
    health_host: str = option("0.0.0.0", "Address on which `health_port` listens.")

    @property
    def lease(self) -> tuple[float, float, float]:
        """TTL, renewal and probe, as given or by profile."""
        ttl, renew, probe = LEASES[self.profile]
        return (
            self.lease_ttl_seconds or ttl,
            self.lease_renew_seconds or renew,
            self.probe_seconds or probe,
        )

    def _check_relations(self) -> None:
        ttl, renew, _ = self.lease
        if ttl < 1 or ttl < 2 * renew:
            raise ConfigError(
                f"lease_ttl_seconds ({ttl:g}) must be at least 1 and at least twice "
                f"lease_renew_seconds ({renew:g}): else one late renewal costs the lead"
            )
        if not all(p.isascii() and p.isdigit() for p in self.release.split(".") if self.release):
            raise ConfigError(f"release {self.release!r} must be numbers with dots: 41 or 1.10.2")


@dataclass(frozen=True, repr=False)
class RecordConfig(Role):
    """How long Holdfast remembers."""

    table = "record"

    keyed_ttl_seconds: int = option(
        86_400,
        "How long the record of a finished run with a key, or of a slot, is kept: for so long "
        "the same key is known as a repeat.",
        least=1,
    )
    keyless_ttl_seconds: int = option(
        3600, "How long the record of any other finished run, with its result, is kept.", least=1
    )
    dedup_window_seconds: float = option(
        120.0,
        "For how long the server drops a second message with the same id.",
        least=0.1,
        most=86_400,
    )
    dead_days: int = option(30, "How long dead letters are kept.", least=1, most=36_500)
    event_days: int = option(7, "How long events are kept.", least=1, most=36_500)
    ledger_days: int = option(7, "How long the audit ledger is kept.", least=1, most=36_500)

    def _check_relations(self) -> None:
        for name in ("keyed_ttl_seconds", "keyless_ttl_seconds"):
            if getattr(self, name) < self.dedup_window_seconds:
                raise ConfigError(
                    f"{name} ({getattr(self, name)}) must not be below dedup_window_seconds "
                    f"({self.dedup_window_seconds:g}): else the server drops a repeat of which "
                    "no record is left"
                )


@dataclass(frozen=True, repr=False)
class LogConfig(Role):
    """What the processes write to standard error."""

    table = "log"

    level: str = option(
        "info", "The least important lines to write.", choices=("debug", "info", "warning", "error")
    )
    format: str = option(
        "text", "Lines for people, or one JSON object per line.", choices=("text", "json")
    )


# -- loading -----------------------------------------------------------------------------------


def load(role: type[R], **overrides: Any) -> R:
    """A role's record from arguments, environment, file and defaults; None means not given."""
    known = {spec.name: spec for spec in options(role)}
    for name in overrides:
        if name not in known:
            raise ConfigError(f"{role.__name__} has no {name!r}: it has {', '.join(known)}")
    path = _file_path()
    table = _read_file(path).get(role.table, {})
    values, origins = {}, []
    for name, spec in known.items():
        found = _find(role, spec, overrides, table, path)
        if found is not None:
            values[name] = _checked(spec, *found)
            origins.append(found[1])
    try:
        return role(**values)
    except ConfigError as error:
        given = f" (given: {', '.join(origins)})" if origins else ""
        raise ConfigError(f"{error}{given}") from None


def options(role: type[Role]) -> tuple[Field[Any], ...]:
    """The fields of a role, in order."""
    return fields(role)  # type: ignore[arg-type]  # every subclass is a dataclass


def variable(role: type[Role], name: str) -> str:
    """The environment variable of a field: those of the connection have no role in their name."""
    prefix = "" if role.table == "connection" else f"{role.table}_"
    return f"HOLDFAST_{prefix}{name}".upper()


def _find(
    role: type[Role],
    spec: Field[Any],
    overrides: Mapping[str, Any],
    table: Mapping[str, Any],
    path: Path,
) -> tuple[Any, str] | None:
    """The first value given for a field, and a text that says where."""
    if overrides.get(spec.name) is not None:
        return overrides[spec.name], f"{role.table}.{spec.name}"
    name = variable(role, spec.name)
    if text := os.environ.get(name, "").strip():
        return _parsed(spec, text), f"environment variable {name}"
    if spec.name in table:
        return table[spec.name], f"{path}: {role.table}.{spec.name}"
    return None


def _parsed(spec: Field[Any], text: str) -> Any:
    """An environment variable's text as what the file would have; unreadable stays a text."""
    try:
        return {"int": int, "float": float}.get(str(spec.type), str)(text)
    except ValueError:
        return text


def _file_path() -> Path:
    return Path(os.environ.get(FILE_VARIABLE, "").strip() or FILE)


def _read_file(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of the file, with every key known; nothing when there is no file."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if os.environ.get(FILE_VARIABLE, "").strip():
            raise ConfigError(f"{FILE_VARIABLE} names {path}, which does not exist") from None
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for name, table in found.items():
        _check_keys(path, name, table)
    return found


def _check_keys(path: Path, name: str, table: Any) -> None:
    if name not in ROLES or not isinstance(table, dict):
        raise ConfigError(f"{path}: {name!r} is not a table; known are {', '.join(ROLES)}")
    known = [spec.name for spec in options(ROLES[name])]
    for key in table:
        if key not in known:
            raise ConfigError(f"{path}: {name}.{key} is unknown; known are {', '.join(known)}")


# -- checking ----------------------------------------------------------------------------------


def _checked(spec: Field[Any], value: Any, where: str) -> Any:
    """A field's value in its type and within its limits, or a `ConfigError` that says where."""
    kind = str(spec.type)
    if kind == "str":
        return _checked_text(spec, value, where)
    number = _number(value, spec.name.endswith("_seconds"), where)
    if kind == "int" and number is not None and number.is_integer():
        number = int(number)
    if number is None or (kind == "int" and isinstance(number, float)):
        raise ConfigError(f"{where} must be {_kind_text(spec)}, not {_shown(spec, value)}")
    least, most = spec.metadata["least"], spec.metadata["most"]
    if (least is not None and number < least) or (most is not None and number > most):
        raise ConfigError(f"{where} must be {_limits_text(spec)}, not {_shown(spec, value)}")
    return number


def _checked_text(spec: Field[Any], value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where} must be a text, not a {type(value).__name__}")
    choices = spec.metadata["choices"]
    if choices and value not in choices:
        raise ConfigError(f"{where} must be {_limits_text(spec)}, not {value!r}")
    return value


def _number(value: Any, is_duration: bool, where: str) -> float | None:
    if is_duration and isinstance(value, str):
        return _checked_by(durations.seconds, value, where)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, int) and abs(value) > 2**53:
        return None
    return float(value) if math.isfinite(value) else None


def _checked_by(check: Callable[..., C], *args: Any) -> C:
    try:
        return check(*args)
    except InvalidInput as error:
        raise ConfigError(str(error)) from None


def _check_servers(servers: list[str]) -> None:
    for number, url in enumerate(servers, 1):
        scheme, found, rest = url.partition("://")
        if not found or scheme not in ("nats", "tls", "ws", "wss") or not rest.strip("/"):
            raise ConfigError(
                f"nats_url: server {number} of {len(servers)} is not a URL such as "
                "nats://host:4222 (a ',' inside a password must be written %2C)"
            )


def _shown(spec: Field[Any], value: Any) -> str:
    if spec.metadata["secret"]:
        return "'***'" if value else "''"
    if spec.name == "nats_url" and isinstance(value, str):
        return repr(",".join(_without_login(url) for url in value.split(",")))
    return repr(value)


def _without_login(url: str) -> str:
    before, at, host = url.rpartition("@")
    scheme, slashes, _ = before.rpartition("://") if "://" in before else ("", "", "")
    return f"{scheme}{slashes}***@{host}" if at else url


# -- documentation -----------------------------------------------------------------------------

_INTRO = f"""\
# Configuration

<!-- Written by `python -m holdfast.config`; edit src/holdfast/config.py instead. -->

A value comes from the first of these that has it:

1. an explicit argument or command-line flag,
2. the environment variable (an empty one counts as not set),
3. the file `{FILE}` in the working directory, or the file that `{FILE_VARIABLE}` names,
4. the default.

Unknown tables and keys in the file are refused, and so are values that cannot work together; the
message says where the value came from. Fields in seconds also take a text such as `"10m"`.
Unknown environment variables are ignored. On Kubernetes, a service called `holdfast-worker-health`
would set `HOLDFAST_WORKER_HEALTH_PORT`: `enableServiceLinks: false` in the pod prevents that.

```toml
[connection]
nats_url = "nats://nats-0:4222,nats://nats-1:4222,nats://nats-2:4222"

[worker]
group = "images"
concurrency = 20
```
"""


def markdown() -> str:
    """The page `docs/configuration.md`."""
    return _INTRO + "".join(_section(name, role) for name, role in ROLES.items())


def _section(name: str, role: type[Role]) -> str:
    head = f"\n## `[{name}]`\n\n{role.__doc__}\n\n"
    head += "| key | environment | default | takes | meaning |\n|---|---|---|---|---|\n"
    return head + "".join(
        f"| `{spec.name}` | `{variable(role, spec.name)}` | {_default_text(spec)} "
        f"| {_limits_text(spec)} | {spec.metadata['doc']} |\n"
        for spec in options(role)
    )


def _default_text(spec: Field[Any]) -> str:
    assert spec.default is not MISSING
    if isinstance(spec.default, str):
        return f"`{spec.default}`" if spec.default else "none"
    return f"`{spec.default:g}`" if isinstance(spec.default, float) else f"`{spec.default}`"


def _limits_text(spec: Field[Any]) -> str:
    if spec.metadata["choices"]:
        return " or ".join(f"`{choice}`" for choice in spec.metadata["choices"])
    least, most = spec.metadata["least"], spec.metadata["most"]
    limits = f" of at least {least:,}" if least is not None else ""
    limits += (" and" if limits else "") + f" at most {most:,}" if most is not None else ""
    return _kind_text(spec) + limits


def _kind_text(spec: Field[Any]) -> str:
    return {"int": "a whole number", "float": "a number"}.get(str(spec.type), "a text")


if __name__ == "__main__":
    sys.stdout.write(markdown())
