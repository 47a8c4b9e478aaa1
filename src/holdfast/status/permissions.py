"""What the user that we are logged in as may publish and subscribe to.

Every family of subjects that Holdfast uses is tried with a message that changes nothing: one into a
stream says that it expects another stream, so it is refused instead of stored; a request to the API
is empty, or about something that does not exist; so is an acknowledgement. The server tells about a
forbidden subject at once, in the order of what was sent, so a single round trip at the end answers
for all: nothing here waits for a timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from holdfast.broker import Broker, Received
from holdfast.broker.streams import stream_configs
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.identity import load_credentials
from holdfast.identity.credentials import CORE_INBOX
from holdfast.identity.grants import PULL_INBOXES, ROLES
from holdfast.identity.patterns import covers
from holdfast.names import CONNECTIONS, Names, pull_inbox

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
    """One subject to try."""

    verb: str
    """`publish` or `subscribe`."""
    subject: str
    family: str
    """The pattern to allow when it is refused."""
    purpose: str
    optional: bool = False
    """It works without, more slowly."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A family of subjects that may not be used, wholly or in part."""

    verb: str
    family: str
    purpose: str
    subjects: tuple[str, ...]
    optional: bool = False
    """It works without, more slowly."""


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
    """What a coordinator uses to notice a death sooner, and to empty a dead worker's inbox."""
    own = inbox.rpartition(".")[0]
    prefix = f"{CORE_INBOX}.{PROBE}" if own.startswith(f"{CORE_INBOX}.") else own
    family = PULL_INBOXES if prefix != own else pull_inbox(own, ">")
    return [
        Probe("publish", CONNECTIONS, CONNECTIONS, "to notice at once that a node died", True),
        Probe(
            "subscribe",
            pull_inbox(prefix, PROBE),
            family,
            "to give back at once what a dead worker is handed",
            True,
        ),
    ]


def _requests(patterns: dict[str, str], stream: str) -> Iterable[Probe]:
    for pattern, purpose in patterns.items():
        subject = pattern.format(stream=stream, probe=PROBE)
        verb = pattern.partition(".{stream}")[0]
        yield Probe("publish", f"$JS.API.{subject}", f"$JS.API.{verb}.>", purpose)


def _control(names: Names) -> list[Probe]:
    """A subject that is tried both ways is tried under two names: the server's word has but one."""
    cancels, verbs = names.cancel("*"), names.node("*", "*")
    runs = names.changed(names.runs, PROBE)
    return [
        Probe("subscribe", cancels, cancels, "to be told of a cancel"),
        Probe("publish", names.cancel(PROBE), cancels, "to cancel a running run"),
        Probe("subscribe", runs, names.changed(names.runs, ">"), "to wait for results"),
        Probe("subscribe", names.node(f"{PROBE}-own", "ping"), verbs, "to answer a ping"),
        Probe("publish", names.node(PROBE, "ping"), verbs, "to ping and drain nodes"),
    ]


async def refusals(broker: Broker, records: RecordConfig) -> tuple[int, list[Refusal]]:
    """How many subjects were tried, and the families that the server refused."""
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
        Refusal(verb, family, purpose, tuple(subjects), optional)
        for (verb, family, purpose, optional), subjects in families.items()
    ]


def _needed(config: ConnectionConfig, names: Names) -> Callable[[Probe], bool]:
    """What the login's role needs; all of it for one that is not of `holdfast auth`."""
    role = load_credentials(config.credentials_file).role if config.credentials_file else ""
    if role not in ROLES:
        return lambda _: True
    grants = ROLES[role](names)
    allowed = {"publish": grants.publish, "subscribe": grants.subscribe}
    return lambda probe: any(covers(given, probe.subject) for given in allowed[probe.verb])


async def _ignore(_: Received) -> None:
    return None
