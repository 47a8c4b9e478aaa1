"""Grants: what each role may publish and subscribe to, derived from what its code does.

The core (workers, control services, operators), clients and agents each have an account without
streams (`rendering` says why). So grants hold whichever reply subject a request names: a worker
cannot move a lease, a client cannot read secrets. Every subject an agent may publish to contains
its id.

Within an account, server responses can still be directed to any subject. Requests that change
something are therefore signed by their sender (`requests`), commands to agents by dispatchers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from holdfast.identity.credentials import CORE_INBOX
from holdfast.names import (
    CONNECTIONS,
    EPOCHS_RAISED,
    SETTINGS_REVISION,
    Names,
    app_key,
    inbox_probe,
    kv_stream,
    kv_subject,
    object_stream,
    pull_inbox,
    schedule_key,
    settings_file_key,
    settings_manifest_key,
    slot_key,
)

_API: Final = "$JS.API."
PULL_INBOXES: Final = pull_inbox(f"{CORE_INBOX}.*", ">")
"""Inboxes in which the core's users receive pulled messages, and nothing else."""
INBOX_PROBES: Final = inbox_probe(pull_inbox(f"{CORE_INBOX}.*", "*"))
"""A subject in such an inbox, to find out whether anyone subscribes to it."""
_READ: Final = ("STREAM.MSG.GET.{0}", "DIRECT.GET.{0}", "DIRECT.GET.{0}.>")
_PULL: Final = (
    "CONSUMER.CREATE.{0}.>",
    "CONSUMER.INFO.{0}.>",
    "CONSUMER.MSG.NEXT.{0}.>",
    "CONSUMER.LIST.{0}",
    "CONSUMER.DELETE.{0}.>",
)
_RIGHTS: Final[dict[str, tuple[str, ...]]] = {
    "info": ("STREAM.INFO.{0}",),
    "create": ("STREAM.CREATE.{0}",),
    "read": _READ,
    "purge": ("STREAM.PURGE.{0}",),
    "delete": ("STREAM.MSG.DELETE.{0}",),
    "update": ("STREAM.UPDATE.{0}",),
    "list": ("CONSUMER.LIST.{0}", "CONSUMER.INFO.{0}.>"),
    "pause": ("CONSUMER.PAUSE.{0}.>",),
    "pull": _PULL,
    "remove": ("CONSUMER.DELETE.{0}.>",),
}


@dataclass(slots=True)
class Grants:
    """What one user may publish and subscribe to; lists keep their order, without duplicates."""

    publish: dict[str, None] = field(default_factory=dict)
    subscribe: dict[str, None] = field(default_factory=dict)
    responses: int = 0
    """Replies allowed per request, within `RESPONSE_SECONDS`; 0 for none."""
    local: dict[str, None] = field(default_factory=dict)
    """Subjects that it may publish inside its account only."""

    def may_publish(self, *subjects: str) -> Grants:
        self.publish |= dict.fromkeys(subjects)
        return self

    def may_hear(self, *subjects: str) -> Grants:
        self.subscribe |= dict.fromkeys(subjects)
        return self

    def stream(self, name: str, rights: str) -> Grants:
        """Add rights on a stream: names from `_RIGHTS`, or `ack`, separated by spaces."""
        for right in rights.split():
            if right == "ack":
                self.may_publish(f"$JS.ACK.{name}.>")
            else:
                self.may_publish(*(_API + verb.format(name) for verb in _RIGHTS[right]))
        return self

    def bucket(self, name: str, rights: str) -> Grants:
        """Rights on a bucket; `write` covers every key."""
        words = rights.split()
        if "write" in words:
            words.remove("write")
            self.may_publish(kv_subject(name, ">"))
        return self.stream(kv_stream(name), " ".join(words))

    def join(self, others: Iterable[Grants]) -> Grants:
        """Merge the others into these."""
        for other in others:
            self.publish |= other.publish
            self.subscribe |= other.subscribe
            self.responses = max(self.responses, other.responses)
        return self


# ---- shared by several roles


def _streams(names: Names) -> tuple[str, ...]:
    """The streams of every namespace that are not buckets."""
    plain = names.jobs, names.events, names.dead, names.ledger, names.run_logs
    return *plain, names.history, names.history_index, names.flows


def _core(names: Names) -> Grants:
    """Connect and find the namespace."""
    found = Grants().may_publish(f"{_API}INFO")
    for stream in _streams(names):
        found.stream(stream, "info")
    for bucket in (names.runs, names.schedules, names.slots, names.leases, names.nodes):
        found.bucket(bucket, "info")
    return found


def _founder(names: Names) -> Grants:
    """Create missing streams."""
    found = Grants()
    for stream in _streams(names):
        found.stream(stream, "create")
    for bucket in (names.runs, names.schedules, names.slots, names.leases, names.nodes):
        found.bucket(bucket, "create")
    return found


def _node(names: Names) -> Grants:
    """Register, heartbeat, answer pings, be drained."""
    found = Grants(responses=1).bucket(names.nodes, "info read write purge")
    found.may_publish(names.log("node", "*"))
    return found.may_hear(
        names.node("*", "ping"), names.node("*", "drain"), names.changed(names.nodes, ">")
    )


def _objects(names: Names, *, write: bool) -> Grants:
    """Use the store of large values."""
    stream = object_stream(names.objects)
    found = Grants().stream(stream, "info read")
    if write:
        found.stream(stream, "create purge").may_publish(f"$O.{names.objects}.>")
    return found


def _sender(names: Names) -> Grants:
    """Enqueue, publish events, wait for results, cancel, manage schedules."""
    ns = names.namespace
    found = Grants().may_publish(f"{ns}.job.>", f"{ns}.later.>", f"{ns}.event.>")
    found.may_publish(names.cancel("*"), names.ended("*", "*", "*"))
    found.stream(names.jobs, "read list purge").stream(names.events, "list")
    found.stream(names.run_logs, "read").may_hear(names.run_log("*"))
    found.stream(names.history, "read").stream(names.history_index, "read")
    found.join([_flow_teller(names)])
    found.may_publish(names.flow_stop("*"), f"{ns}.signal.*.*")
    found.bucket(names.runs, "read write").bucket(names.nodes, "read")
    found.bucket(names.schedules, "read").bucket(names.slots, "read")
    for key in (schedule_key("*"), app_key("*")):  # only operators may pause
        found.may_publish(kv_subject(names.schedules, key))
    found.may_publish(kv_subject(names.slots, slot_key("*", "*")))  # but not terms or progress
    return found.may_hear(names.changed(names.runs, ">")).join([_objects(names, write=False)])


def _flow_teller(names: Names) -> Grants:
    """Tell a flow how its child ended, and wake it; whoever may end a run must be able to."""
    found = Grants().may_publish(names.flow_children("*", "*"))
    return found.stream(names.flows, "info read")


def _flow_runner(names: Names) -> Grants:
    """Write journals, wait for events, wake flows."""
    ns = names.namespace
    found = Grants().may_publish(names.flow("*"), f"{ns}.wait.*.*.*")
    return found.stream(names.flows, "read purge pull ack")


def _limits(names: Names) -> Grants:
    """Take places in limits, and serve their lines."""
    found = Grants().bucket(names.limits, "info create read write")
    found.stream(names.jobs, "delete")  # messages that got a place leave the line
    return found.may_hear(names.changed(names.limits, ">"))


def _holder(names: Names) -> Grants:
    """Hold leases, and probe other holders."""
    found = Grants().bucket(names.leases, "read write purge").may_publish(names.node("*", "ping"))
    return found.may_hear(names.changed(names.leases, ">"))


# ---- roles


def client(names: Names) -> Grants:
    """Enqueues and waits for results."""
    return _core(names).join([_sender(names)])


def worker(names: Names) -> Grants:
    """Runs jobs, which may do what a client does."""
    ns = names.namespace
    found = _core(names).join(
        [
            _founder(names),
            _node(names),
            _sender(names),
            _limits(names),
            _flow_runner(names),
            _objects(names, write=True),
        ]
    )
    found.may_publish(f"{ns}.dead.>", f"{ns}.canary.>", names.run_log("*"))
    found.may_publish(names.indexed("counts"))
    found.may_hear(names.cancel("*"))
    found.bucket(names.runs, "purge")
    for stream in (names.jobs, names.events):
        found.stream(stream, "pull ack")
    return found.stream(names.dead, "read delete")


def scheduler(names: Names) -> Grants:
    """Fires slots while it leads."""
    found = _core(names).join([_founder(names), _node(names), _holder(names)])
    found.join([_flow_teller(names)]).may_publish(names.flow_stop("*"))
    found.may_publish(f"{names.namespace}.job.>", names.cancel("*"), names.ended("*", "*", "*"))
    found.stream(names.jobs, "read list pause")
    found.stream(names.events, "list pause")
    found.bucket(names.schedules, "read write").bucket(names.slots, "read write purge")
    found.bucket(names.runs, "read write")
    return found.may_hear(
        names.changed(names.schedules, ">"),
        names.changed(names.slots, ">"),
        names.changed(names.runs, ">"),
    )


def coordinator(names: Names) -> Grants:
    """Detects dead nodes, and gives back what they held."""
    ns = names.namespace
    found = _core(names).join([_founder(names), _node(names), _holder(names), _limits(names)])
    found.join([_flow_teller(names)])
    found.may_publish(f"{ns}.job.>", f"{ns}.dead.>", names.ended("*", "*", "*"))
    found.stream(names.history, "read").stream(names.history_index, "read")
    found.may_publish(names.indexed("*"))
    found.stream(names.jobs, "read ack list").stream(names.events, "read ack list")
    found.stream(names.dead, "read").bucket(names.schedules, "read")
    found.may_publish(CONNECTIONS, INBOX_PROBES).may_hear(PULL_INBOXES)
    return found.bucket(names.runs, "read write").join([_objects(names, write=True)])


def dispatcher(names: Names) -> Grants:
    """Fans runs out to agents and stores their returns."""
    ns = names.namespace
    found = _core(names).join([_founder(names), _node(names), _holder(names)])
    for bucket in (names.fleet, names.returns, names.facts, names.agents, names.joins):
        found.bucket(bucket, "info create update read write purge")
        found.may_hear(names.changed(bucket, ">"))
    for bucket in (names.settings, names.secrets, names.applied):
        found.bucket(bucket, "info create")
    found.may_publish(names.agent("*", "*"), names.log("fleet", ">"), names.handover)
    found.may_hear(
        names.dispatch("*"),
        names.join,
        names.handover,
        names.cancel("*"),
        names.ack("*", "*"),
        names.returned("*", "*"),
        f"{ns}.fleet.>",
    )
    found.may_publish(f"{ns}.fleet.>").may_publish(names.cancel("*"))
    return found.join([_objects(names, write=True)])


def control(names: Names) -> Grants:
    """Scheduler, dispatcher and coordinator in one process; registers and removes an app's jobs."""
    found = Grants().join(make(names) for make in (scheduler, dispatcher, coordinator))
    return found.stream(names.jobs, "remove").stream(names.events, "remove")


def operator(names: Names) -> Grants:
    """A person at the command line: everything in the namespace, nothing outside it."""
    ns = names.namespace
    found = worker(names).join([control(names)]).may_publish(f"{ns}.>").may_hear(f"{ns}.>")
    for stream in _streams(names):
        found.stream(stream, "info create read purge delete update list pause pull ack")
    nouns = "runs schedules slots leases nodes limits fleet returns facts agents"
    nouns += " settings secrets applied joins"
    for noun in nouns.split():
        found.bucket(names.bucket(noun), "info create read write purge delete update")
    return found


def web(names: Names) -> Grants:
    """The dashboard and API: an operator's grants except secrets, plus sessions.

    It never judges a node, so it cannot inspect connections or other users' pulls.
    """
    found = operator(names).bucket(names.bucket("sessions"), "info create read write purge")
    secret = (kv_subject(names.secrets, ""), f"{kv_stream(names.secrets)}")
    hidden = (*secret, CONNECTIONS, INBOX_PROBES)
    found.publish = {s: None for s in found.publish if not any(part in s for part in hidden)}
    found.subscribe.pop(PULL_INBOXES, None)
    return found


def snapshot(names: Names) -> Grants:
    """Reads whole streams; since it logs in to the streams' account, it may do nothing else."""
    found = Grants().may_publish(f"{_API}INFO", f"{_API}STREAM.NAMES")
    found.may_publish(*(f"{_API}STREAM.{verb}.*" for verb in ("INFO", "SNAPSHOT")))
    return found.may_publish("$JS.SNAPSHOT.ACK.*.*", f"{_API}CONSUMER.LIST.{names.jobs}")


def backup(names: Names) -> Grants:
    """Reads and restores whole streams."""
    found = snapshot(names).may_publish(f"{_API}STREAM.RESTORE.*", "$JS.SNAPSHOT.RESTORE.*.*")
    found.may_publish(f"{_API}CONSUMER.CREATE.{names.jobs}.>")
    return found.may_publish(kv_subject(names.runs, EPOCHS_RAISED))


def join(names: Names) -> Grants:
    """A host with a token: it may ask to become an agent, and receive the answer."""
    return Grants().may_publish(names.join)


ROLES: Final[dict[str, Callable[[Names], Grants]]] = {
    "worker": worker,
    "scheduler": scheduler,
    "coordinator": coordinator,
    "dispatcher": dispatcher,
    "control": control,
    "web": web,
    "operator": operator,
    "client": client,
    "snapshot": snapshot,
    "backup": backup,
    "join": join,
}
"""The roles by name, except agents."""

ISSUED_LATER: Final = frozenset({"snapshot", "backup", "join"})
"""Roles whose login is issued only when needed: the first two can read or replace every stream, the
last is for whoever has a token."""


# ---- agents


def agent(names: Names, id: str) -> Grants:
    """One agent: every subject names it. With `*` as id: what the core's account exports to all
    agents."""
    found = Grants(responses=1, local={names.node(id, "ping"): None})
    found.may_publish(
        f"{_API}INFO",
        names.ack("*", id),
        names.returned("*", id),
        *(kv_subject(bucket, id) for bucket in (names.agents, names.facts, names.applied)),
        _own_key(names.agents, id),
        _own_key(names.secrets, id),
        *(_own_key(names.settings, key) for key in _READ_SETTINGS),
    )
    return found.may_hear(
        names.agent(id, "*"),
        names.node(id, "*"),
        names.changed(names.secrets, id),
        names.changed(names.settings, SETTINGS_REVISION),
    )


_READ_SETTINGS: Final = (SETTINGS_REVISION, settings_manifest_key("*"), settings_file_key("*"))
"""Not the copies of secrets for the account itself, though an agent could not open them."""


def _own_key(bucket: str, key: str) -> str:
    """The request subject for one key; it contains the key so that permissions can name it."""
    return f"{_API}DIRECT.GET.{kv_stream(bucket)}.{kv_subject(bucket, key)}"


def program_bucket(names: Names, name: str, role: str) -> Grants:
    """A program's bucket, granted by name to the users that need it.

    A client may not create it: a stream's creator can have the server republish its messages to
    any subject outside the streams.
    """
    bucket = names.data(name)
    found = Grants().bucket(bucket, "info read write purge")
    if role != "client":
        found.bucket(bucket, "create")
    return found.may_hear(names.changed(bucket, ">"))


# ---- subject patterns


def covers(pattern: str, subject: str) -> bool:
    """Whether a pattern allows everything in `subject`, which may contain wildcards."""
    wanted, given = pattern.split("."), subject.split(".")
    for number, part in enumerate(wanted):
        if part == ">":
            return len(given) > number
        if number >= len(given) or given[number] == ">":
            return False
        if part != "*" and part != given[number]:
            return False
    return len(wanted) == len(given)


def overlaps(one: str, other: str) -> bool:
    """Whether some subject matches both patterns."""
    left, right = one.split("."), other.split(".")
    for a, b in zip(left, right, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(left) == len(right)
