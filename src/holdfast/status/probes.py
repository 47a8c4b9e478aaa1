"""What `holdfast doctor` examines: the server and namespace, their monitors, and our permissions.

A monitoring endpoint reports how a server syncs and how large the cluster is. It is plain HTTP and
often closed to the outside, so failing to reach it is no error.

Permissions are tested on one subject of every family that Holdfast uses, with a message without
effect: a message to a stream expects another stream's name, so it is refused instead of stored; an
API request is empty, or names something that does not exist. The server reports forbidden subjects
at once and in order, so one round trip at the end covers all of them, without a timeout.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from holdfast.broker import Broker, Received
from holdfast.broker.streams import stream_configs
from holdfast.client import Client
from holdfast.config import ConnectionConfig, LivenessConfig, RecordConfig
from holdfast.identity.credentials import CORE_INBOX, Credentials
from holdfast.identity.grants import PULL_INBOXES, ROLES, covers
from holdfast.names import CONNECTIONS, Names, pull_inbox

Level = Literal["ok", "warn", "fail"]

_NAMED = 4  # names in one line of `holdfast doctor`


class Finding(msgspec.Struct, frozen=True):
    """What one check found, and what to do about it."""

    check: str
    level: Level
    text: str
    todo: str = ""


@dataclass(slots=True)
class Site:
    """One server or cluster, and one namespace on it."""

    broker: Broker
    client: Client
    records: RecordConfig
    liveness: LivenessConfig | None = None
    """The liveness options of nodes started with this configuration."""
    account: dict[str, Any] = field(default_factory=dict)
    """JetStream's account info."""
    asked: Sequence[str] = ()
    """The monitors queried, including those that did not answer."""
    monitors: Sequence[Jetstream] = ()

    missing: Sequence[str] = ()
    """Streams that do not exist yet."""

    @property
    def cluster_size(self) -> int:
        """How many servers the cluster has; 1 without a cluster."""
        seen = max((found.cluster_size for found in self.monitors), default=1)
        return max(seen, self.broker.known_servers if self.broker.cluster_name else 1)


Check = Callable[[Site], Awaitable[list[Finding]]]


def few(texts: Sequence[str]) -> str:
    """The first few, then how many more there are."""
    shown = ", ".join(texts[:_NAMED])
    return shown if len(texts) <= _NAMED else f"{shown} and {len(texts) - _NAMED} more"


CLIENT_PORT: Final = 4222
MONITOR_PORT: Final = 8222
"""The default port; for another client port the same offset from 4222 is assumed."""
ANSWER_SECONDS: Final = 2.0
"""A firewall may drop packets silently, so every monitor may take this long."""


@dataclass(frozen=True, slots=True)
class Jetstream:
    """JetStream on one server, as its monitor shows it."""

    url: str
    sync_always: bool
    sync_seconds: float
    storage_bytes: int
    storage_limit: int
    """How much disk it may use; 0 if unknown."""
    cluster_size: int


def derived_urls(servers: Sequence[str]) -> list[str]:
    """The likely monitor URLs of these servers: 8222 for 4222, and so on."""
    found = []
    for server in servers:
        parts = urlsplit(server)
        port = (parts.port or CLIENT_PORT) + MONITOR_PORT - CLIENT_PORT
        host = parts.hostname or "127.0.0.1"
        found.append(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    return found


async def ask(url: str) -> Jetstream | None:
    """JetStream's state and configuration from one monitor; None when unavailable."""
    try:
        found = await asyncio.to_thread(_get, f"{url.rstrip('/')}/jsz?config=true")
    except (OSError, http.client.HTTPException, ValueError):
        return None
    config = found.get("config")
    if not isinstance(config, dict):
        return None
    return Jetstream(
        url,
        bool(config.get("sync_always")),
        int(config.get("sync_interval", 0)) / 1e9,
        int(found.get("storage", 0)),
        max(0, int(config.get("max_storage", 0))),
        int((found.get("meta_cluster") or {}).get("cluster_size", 1)),
    )


def _get(url: str) -> dict[str, Any]:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("a monitor has an http address")
    with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
        return dict(json.loads(answer.read()))


PROBE: Final = "holdfast-doctor"
_REFUSED: Final = {"Nats-Expected-Stream": PROBE}
_EMPTY: Final = b"{}"
_NOTHING_TO_PURGE: Final = b'{"filter": "%s"}' % PROBE.encode()
"""An empty request would purge everything."""

_STREAM_REQUESTS: Final = {
    "STREAM.INFO.{stream}": "to find its streams",
    "STREAM.CREATE.{stream}": "to create its streams",
    "STREAM.MSG.GET.{stream}": "to read records",
    "DIRECT.GET.{stream}": "to list records and dead letters",
    "STREAM.PURGE.{stream}": "to remove keys and parked runs",
}
_CONSUMER_REQUESTS: Final = {
    "CONSUMER.CREATE.{stream}.{probe}.{probe}": "to create a job's consumer",
    "CONSUMER.INFO.{stream}.{probe}": "to find a job's consumer",
    "CONSUMER.LIST.{stream}": "to list jobs",
    "CONSUMER.MSG.NEXT.{stream}.{probe}": "to pull runs",
    "CONSUMER.PAUSE.{stream}.{probe}": "to pause and resume jobs",
}


@dataclass(frozen=True, slots=True)
class Probe:
    """One subject to test."""

    verb: str
    """`publish` or `subscribe`."""
    subject: str
    family: str
    """The pattern to allow if it is refused."""
    purpose: str
    optional: bool = False
    """Whether Holdfast works without it, only more slowly."""


@dataclass(frozen=True, slots=True)
class RefusedSubjects:
    """A family of subjects that is refused, wholly or in part."""

    verb: str
    family: str
    purpose: str
    subjects: tuple[str, ...]
    optional: bool = False
    """Whether Holdfast works without it, only more slowly."""


def probes(names: Names, records: RecordConfig, inbox: str) -> list[Probe]:
    """Everything that workers, clients and operators need."""
    configs = stream_configs(names, records, 1)
    found = [Probe("subscribe", inbox, "_INBOX.>", "to receive answers")]
    found += [
        Probe("publish", subject[:-1] + PROBE, subject, f"to write to {config['name']}")
        for config in configs
        for subject in config["subjects"]
    ]
    for config in configs:
        found += _requests(_STREAM_REQUESTS, config["name"])
    for stream in (names.jobs, names.events):
        found += _requests(_CONSUMER_REQUESTS, stream)
        ack = f"$JS.ACK.{stream}."
        found.append(Probe("publish", f"{ack}{PROBE}.1.1.1.1.0", f"{ack}>", "to acknowledge runs"))
    return found + _control(names) + _detecting(inbox)


def _detecting(inbox: str) -> list[Probe]:
    """Permissions of a coordinator to detect a death sooner, and to empty a dead worker's inbox."""
    own = inbox.rpartition(".")[0]
    prefix = f"{CORE_INBOX}.{PROBE}" if own.startswith(f"{CORE_INBOX}.") else own
    family = PULL_INBOXES if prefix != own else pull_inbox(own, ">")
    return [
        Probe("publish", CONNECTIONS, CONNECTIONS, "to notice at once that a node died", True),
        Probe(
            "subscribe",
            pull_inbox(prefix, PROBE),
            family,
            "to give back at once messages that are delivered to a dead worker",
            True,
        ),
    ]


def _requests(patterns: dict[str, str], stream: str) -> Iterable[Probe]:
    for pattern, purpose in patterns.items():
        subject = pattern.format(stream=stream, probe=PROBE)
        verb = pattern.partition(".{stream}")[0]
        yield Probe("publish", f"$JS.API.{subject}", f"$JS.API.{verb}.>", purpose)


def _control(names: Names) -> list[Probe]:
    """Subjects tested both ways get two names, because refusals are recorded by subject alone."""
    cancels, verbs = names.cancel("*"), names.node("*", "*")
    runs = names.changed(names.runs, PROBE)
    return [
        Probe("subscribe", cancels, cancels, "to receive cancellations"),
        Probe("publish", names.cancel(PROBE), cancels, "to cancel a running run"),
        Probe("subscribe", runs, names.changed(names.runs, ">"), "to wait for results"),
        Probe("subscribe", names.node(f"{PROBE}-own", "ping"), verbs, "to answer a ping"),
        Probe("publish", names.node(PROBE, "ping"), verbs, "to ping and drain nodes"),
    ]


async def refusals(broker: Broker, records: RecordConfig) -> tuple[int, list[RefusedSubjects]]:
    """How many subjects were tested, and the families that the server refused."""
    tried = probes(broker.names, records, broker.new_inbox())
    subscriptions = [
        await broker.subscribe(probe.subject, _ignore)
        for probe in tried
        if probe.verb == "subscribe"
    ]
    for probe in tried:
        if probe.verb == "publish":
            body = _NOTHING_TO_PURGE if ".PURGE." in probe.subject else _EMPTY
            await broker.publish(probe.subject, body, _REFUSED)
    await broker.flush()
    for subscription in subscriptions:
        await broker.unsubscribe(subscription)
    families: dict[tuple[str, str, str, bool], list[str]] = {}
    needed = _needed(broker.config, broker.names)
    for probe in tried:
        if probe.subject.lower() in broker.denied and needed(probe):
            key = (probe.verb, probe.family, probe.purpose, probe.optional)
            families.setdefault(key, []).append(probe.subject)
    return len(tried), [
        RefusedSubjects(verb, family, purpose, tuple(subjects), optional)
        for (verb, family, purpose, optional), subjects in families.items()
    ]


def _needed(config: ConnectionConfig, names: Names) -> Callable[[Probe], bool]:
    """Select what the login's role needs; everything for a login not made by `holdfast auth`."""
    role = Credentials.load(config.credentials_file).role if config.credentials_file else ""
    if role not in ROLES:
        return lambda _: True
    grants = ROLES[role](names)
    allowed = {"publish": grants.publish, "subscribe": grants.subscribe}
    return lambda probe: any(covers(given, probe.subject) for given in allowed[probe.verb])


async def _ignore(_: Received) -> None:
    return None
