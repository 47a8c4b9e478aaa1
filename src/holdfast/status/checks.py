"""Every check of `holdfast doctor`, and the stream changes that it may make.

A check returns findings and changes nothing. A drifted stream is corrected only where nothing can
be lost, that is, by adding: subjects, features, replicas, a longer age. Changes that the server
refuses, or that would remove messages somebody chose to keep, are left to a person.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import urlsplit

from holdfast import errors
from holdfast.broker import Bucket
from holdfast.broker.connecting import REQUIRED_API_LEVEL, REQUIRED_VERSION, parse_version
from holdfast.broker.streams import Difference, Topology, stream_configs
from holdfast.broker.wire import ENVELOPE_BYTES
from holdfast.client import Client
from holdfast.client.schedules import REFUSED
from holdfast.config import ConnectionConfig
from holdfast.durations import text as duration
from holdfast.identity.credentials import Credentials
from holdfast.model import node as nodes
from holdfast.model.node import NodeRecord
from holdfast.names import REFUSALS, parse_consumer
from holdfast.status.flows import Flows
from holdfast.status.jobs import Jobs
from holdfast.status.limits import Limits
from holdfast.status.operators import many
from holdfast.status.probes import Finding, Jetstream, Level, Site, few, refusals
from holdfast.status.stranded import Stranded
from holdfast.status.unreadable import UnreadableRecords

_LOCAL: Final = ("127.", "localhost", "::1")


async def encryption(site: Site) -> list[Finding]:
    """Without TLS, payloads and logins can be read on the network."""
    if site.broker.encrypted:
        return [Finding("encryption", "ok", "the connection uses TLS")]
    if is_local(site.broker.config):
        return [Finding("encryption", "ok", "no TLS, and the connection stays on this machine")]
    text = "no TLS: payloads and passwords can be read on the network"
    todo = "give the server a certificate and write tls:// in nats_url (see docs/security.md)"
    return [Finding("encryption", "warn", text, todo)]


async def login(site: Site) -> list[Finding]:
    """A server that requires no login lets anyone do anything."""
    config = site.broker.config
    if not site.broker.asks_login:
        local = is_local(config)
        text = "the server requires no login: anybody who reaches it may do everything"
        todo = "make users with 'holdfast auth init', and start the server with its auth.conf"
        return [Finding("login", "ok" if local else "warn", text, "" if local else todo)]
    if config.credentials_file:
        found = Credentials.load(config.credentials_file)
        return [Finding("login", "ok", f"logged in as {found.user} (role {found.role})")]
    if config.user or config.token or "@" in config.nats_url:
        text = "logged in with a password or token, which the server's configuration holds as well"
        todo = "use a key that never leaves this machine: 'holdfast auth user ROLE'"
        return [Finding("login", "warn", text, "" if is_local(config) else todo)]
    return [Finding("login", "ok", "logged in with a key")]


def is_local(config: ConnectionConfig) -> bool:
    """Whether every server is on this machine."""
    hosts = [urlsplit(url).hostname or "" for url in config.servers]
    return all(host.startswith(_LOCAL) for host in hosts)


SKEW_WARN_SECONDS: Final = 0.25
"""Clocks under NTP differ by less than this."""
SKEW_FAIL_SECONDS: Final = 1.0
"""Schedulers whose clock differs by more do not fire."""
FULL_WARN: Final = 0.8
FULL_FAIL: Final = 0.95
"""Fractions of the storage limit; a full store recovers only after a restart."""
SMALLEST_PAYLOAD: Final = 4 * ENVELOPE_BYTES
"""Below this, headers leave little room for a body."""
USUAL_PAYLOAD: Final = 1024 * 1024
"""The server's default `max_payload`."""
LARGEST_PAYLOAD: Final = 8 * 1024 * 1024
"""NATS advises against more: larger messages delay all others on a connection."""

_WANTED = ".".join(map(str, REQUIRED_VERSION))


def version(site: Site) -> Finding:
    """Old servers silently ignore options they do not know."""
    found = site.broker.server_version or "of an unknown version"
    if parse_version(found) >= REQUIRED_VERSION:
        return Finding("server version", "ok", f"nats-server {found}")
    text = f"nats-server {found} is too old: it silently ignores message TTLs and schedules"
    return Finding("server version", "fail", text, f"upgrade it to {_WANTED} or newer")


async def jetstream(site: Site) -> Finding:
    """JetStream must be enabled, at an API level that supports schedules and batches."""
    try:
        site.account = await site.broker.api("INFO")
    except (errors.Unavailable, errors.NotFound) as error:
        todo = "add 'jetstream {}' to the server's configuration, and to the account if it has any"
        return Finding("jetstream", "fail", f"JetStream is not enabled ({error})", todo)
    except errors.BrokerError as error:
        return Finding("jetstream", "fail", f"did not answer: {error}")
    level = int(site.account.get("api", {}).get("level", 0))
    if level >= REQUIRED_API_LEVEL:
        return Finding("jetstream", "ok", f"enabled, API level {level}")
    text = f"JetStream's API level is {level} and Holdfast needs {REQUIRED_API_LEVEL}"
    return Finding("jetstream", "fail", text, f"upgrade every node to {_WANTED} or newer")


async def permissions(site: Site) -> list[Finding]:
    """The login may use every family of subjects that Holdfast uses."""
    tried, refused = await refusals(site.broker, site.records)
    if not refused:
        return [Finding("permissions", "ok", f"all {tried} subjects that were tried are allowed")]
    return [
        Finding(
            "permissions",
            "warn" if one.optional else "fail",
            f"may not {one.verb} to {few(one.subjects)}; Holdfast needs it {one.purpose}",
            f'allow this user to {one.verb} to "{one.family}"',
        )
        for one in refused
    ]


async def durability(site: Site) -> list[Finding]:
    """Whether an acknowledged write survives a power cut."""
    if site.monitors:
        return [_synced(found, site.cluster_size) for found in site.monitors]
    text = "whether every write is synced could not be checked: no monitor answers at "
    todo = "name one with --monitor-url; the server needs 'jetstream { sync_interval: always }'"
    return [Finding("durability", "warn", text + ", ".join(site.asked), todo)]


def _synced(found: Jetstream, size: int) -> Finding:
    if found.sync_always:
        return Finding("durability", "ok", f"{found.url} syncs every write (sync_always)")
    lost = f"a power cut loses up to {duration(found.sync_seconds)} of acknowledged writes"
    if size > 1:
        lost += ", when it takes a majority of the nodes"
    text = f"{found.url} does not sync every write: {lost}"
    todo = "set 'jetstream { sync_interval: always }' on every node"
    return Finding("durability", "warn", text, todo)


async def payload(site: Site) -> list[Finding]:
    """A message must have room for a body and the headers of a dead letter."""
    limit = site.broker.max_message_bytes
    text = f"messages may have {limit:,} bytes"
    if limit < SMALLEST_PAYLOAD:
        text += (
            f", of which Holdfast keeps {ENVELOPE_BYTES:,} free for the history of a dead letter"
        )
        return [Finding("max_payload", "fail", text, f"raise max_payload to {USUAL_PAYLOAD:,}")]
    if limit < USUAL_PAYLOAD:
        todo = f"raise max_payload to {USUAL_PAYLOAD:,} unless this is intended"
        return [Finding("max_payload", "warn", f"{text}, fewer than usual", todo)]
    if limit > LARGEST_PAYLOAD:
        todo = "keep large data in an object store and send its key"
        return [Finding("max_payload", "warn", f"{text}: large ones slow everybody down", todo)]
    return [Finding("max_payload", "ok", text)]


async def storage(site: Site) -> list[Finding]:
    """A full store accepts nothing and recovers only after a restart."""
    found = [
        _filled(f"the store behind {one.url}", one.storage_bytes, one.storage_limit)
        for one in site.monitors
        if one.storage_limit
    ]
    limit = int(site.account.get("limits", {}).get("max_storage", -1))
    if limit > 0:
        found.insert(0, _filled("the account", int(site.account.get("storage", 0)), limit))
    return found or [Finding("storage", "ok", "the account has no limit")]


def _filled(what: str, used: int, limit: int) -> Finding:
    share = used / limit
    level: Level = "fail" if share >= FULL_FAIL else "warn" if share >= FULL_WARN else "ok"
    text = f"{what} has {used / 1e6:,.0f} of {limit / 1e6:,.0f} MB in use ({share:.0%})"
    todo = "raise max_storage, or drop dead letters: a full store refuses new runs"
    return Finding("storage", level, text, "" if level == "ok" else todo)


async def clock(site: Site) -> list[Finding]:
    """Delays and schedules are due by the server's clock; the local one should agree with it."""
    if site.broker.names.jobs in site.missing:
        return [
            Finding(
                "clock",
                "warn",
                "not compared with the server's: no stream exists yet to read it from",
            )
        ]
    size = abs(await site.client.topology.measure_clock())
    text = f"this clock and the server's differ by {duration(size)}"
    todo = "synchronize both with NTP or chrony"
    if size > SKEW_FAIL_SECONDS:
        return [Finding("clock", "fail", f"{text}: schedulers here would not fire", todo)]
    if size > SKEW_WARN_SECONDS:
        return [Finding("clock", "warn", text, todo)]
    return [Finding("clock", "ok", text)]


MOST_LISTED = 10
"""Unreadable records listed individually; the rest are only counted."""

MOST_RUNS: Final = 100_000
"""Most records that a check reads: more would take longer than an operator waits."""


async def replicas(site: Site) -> list[Finding]:
    """Streams have as many replicas as the cluster can hold."""
    size, wanted = site.cluster_size, site.broker.config.replicas
    if size == 1:
        text = "one server: nothing runs while it is away, and a lost disk loses everything"
        return [Finding("replicas", "warn", text, "run a cluster of three in production")]
    if wanted > size:
        text = f"{wanted} replicas are configured and the cluster has {size} nodes"
        return [Finding("replicas", "fail", text, "add nodes, or lower HOLDFAST_REPLICAS")]
    if wanted == 1:
        text = f"replicas is set to 1 although the cluster has {size} nodes"
        return [Finding("replicas", "warn", text, "leave HOLDFAST_REPLICAS out, or set it to 3")]
    found = [f for info in await _existing(site) for f in _copies(info)]
    return found or [Finding("replicas", "ok", f"no copy is missing, {size} nodes")]


async def _existing(site: Site) -> list[dict[str, Any]]:
    found = []
    for config in stream_configs(site.broker.names, site.records, 1):
        try:
            found.append(await site.broker.api(f"STREAM.INFO.{config['name']}"))
        except errors.NotFound:
            continue
    return found


def _copies(info: dict[str, Any]) -> list[Finding]:
    name = info["config"]["name"]
    cluster = info.get("cluster") or {}
    found = []
    if not cluster.get("leader"):
        found.append(Finding("replicas", "fail", f"{name} has no leader", "restart missing nodes"))
    for peer in cluster.get("replicas") or []:
        if peer.get("offline") or not peer.get("current"):
            how = "offline" if peer.get("offline") else "behind"
            text = f"the copy of {name} on {peer.get('name')} is {how}"
            found.append(Finding("replicas", "warn", text, "restart that node, or wait for it"))
    return found


async def streams(site: Site) -> list[Finding]:
    """Streams are configured as Holdfast would create them; it never changes one by itself."""
    differences = await site.client.topology.differences()
    found = [
        Finding(
            "streams",
            "fail" if is_grave(one) else "warn",
            str(one),
            "run 'holdfast doctor --fix'" if is_safe(one) else why_by_hand(one),
        )
        for one in differences
        if one.key
    ]
    site.missing = [one.stream for one in differences if not one.key]
    every = len(stream_configs(site.broker.names, site.records, 1))
    if len(site.missing) == every:
        text = f"not created yet, the first worker does: {few(site.missing)}"
        found.append(Finding("streams", "ok", text))
    elif site.missing:
        text = f"missing, though the namespace is in use: {few(site.missing)}"
        todo = "a running worker or 'holdfast control' creates them again: start one"
        found.append(Finding("streams", "fail", text, todo))
    return found or [Finding("streams", "ok", "every stream is as Holdfast would create it")]


async def jobs(site: Site) -> list[Finding]:
    """Runs that wait although no live worker serves their job."""
    names = site.broker.names
    if {names.jobs, names.events, names.dead} & {*site.missing}:
        return [Finding("jobs", "ok", "no job exists yet")]
    alive = [node for node, _ in await _nodes(site) if node.alive and node.role == "worker"]
    served = {(node.group, job) for node in alive for job in node.jobs}
    found = []
    for job in await Jobs(site.client).list():
        count = job.waiting + job.in_flight
        if count and (job.group, job.job) not in served:
            text = f"{count} runs of {job.job} (group {job.group}) wait, and no live worker has it"
            todo = f"start one: holdfast worker APP --group {job.group}"
            found.append(Finding("jobs", "warn", text, todo))
        elif count and job.paused:
            text = f"{count} runs of {job.job} (group {job.group}) wait because it is paused"
            found.append(Finding("jobs", "warn", text, f"holdfast jobs resume {job.job}"))
    return found or [Finding("jobs", "ok", "no job waits for a worker")]


async def registrations(site: Site) -> list[Finding]:
    """Schedules defined in an app's code that were not accepted."""
    bucket = Bucket(site.broker, site.broker.names.schedules)
    found = []
    if bucket.stream not in site.missing:
        async for entry in bucket.entries(REFUSALS):
            refusal = bucket.read(REFUSED.decode, entry)
            if refusal is None:
                continue  # reported by the check of records
            text = f"the schedules of app {refusal.app} are not registered: {refusal.reason}"
            todo = "rename them in the code, or remove those of the other app"
            found.append(Finding("schedules", "fail", text, f"{todo}: holdfast schedules list"))
    return found or [Finding("schedules", "ok", "no app's schedules were refused")]


async def stranded_runs(site: Site) -> list[Finding]:
    """Runs that wait for a message that does not exist."""
    if {site.client.runs.stream, site.broker.names.jobs} & {*site.missing}:
        return [Finding("runs", "ok", "there are none yet")]
    info = await site.broker.api(f"STREAM.INFO.{site.client.runs.stream}")
    count = int(info["state"]["messages"])
    if count > MOST_RUNS:
        text = f"{count:,} records are too many to look through; coordinators do, bit by bit"
        return [Finding("runs", "ok", text)]
    cases = await stranded(site.client).look()
    if not cases:
        return [Finding("runs", "ok", "no run waits for a message that is gone")]
    text = f"{len(cases)} runs wait for a message that is gone: {few([c.run for c in cases])}"
    todo = "a coordinator repairs them within minutes; or run 'holdfast doctor --fix'"
    return [Finding("runs", "fail", text, todo)]


async def limits(site: Site) -> list[Finding]:
    """Places in limits held by runs that do not need them."""
    leaked = await Limits(site.client).leaked()
    if not leaked:
        return [Finding("limits", "ok", "every place in a limit belongs to a run that needs it")]
    text = f"{len(leaked)} places in limits belong to runs that have ended: {few(leaked)}"
    todo = "a coordinator frees them within a minute; or run 'holdfast doctor --fix'"
    return [Finding("limits", "fail", text, todo)]


async def flows(site: Site) -> list[Finding]:
    """Flows that nobody has woken, and flows whose code does not fit their journal."""
    if {site.client.runs.stream, site.broker.names.flows} & {*site.missing}:
        return [Finding("flows", "ok", "there are none yet")]
    known = Flows(site.client)
    found = []
    if stuck := await known.stuck():
        text = f"{len(stuck)} flows wait although nothing holds them up: {few(stuck)}"
        todo = "a coordinator wakes them within a minute; or run 'holdfast doctor --fix'"
        found.append(Finding("flows", "fail", text, todo))
    if stopped := await known.list(state="stopped", limit=sys.maxsize):
        text = f"{many(len(stopped), 'flow')} stopped, because the code does not fit the journal: "
        text += few([one.run for one in stopped])
        todo = "'holdfast flows show RUN' says why; deploy code that fits, and they continue"
        found.append(Finding("flows", "warn", text, todo))
    return found or [Finding("flows", "ok", "every flow that waits has something to wait for")]


async def subscriptions(site: Site) -> list[Finding]:
    """Consumers that collect events for a job that is now served in another group."""
    names = site.broker.names
    if names.events in site.missing:
        return [Finding("subscriptions", "ok", "there are none yet")]
    alive = [node for node, _ in await _nodes(site) if node.alive and node.role == "worker"]
    served = {(node.group, job) for node in alive for job in node.jobs}
    found = []
    for info in await site.client.topology.consumers(names.events):
        where = parse_consumer(info.get("name", ""))
        groups = sorted(group for group, job in served if where and job == where[1])
        if where is None or where in served or not groups:
            continue
        text = f"{info['name']} collects events ({info.get('num_pending', 0)} wait) and no live "
        text += f"worker has it; job {where[1]} is served in group {', '.join(groups)}"
        todo = f"its own app's workers take it over; else: nats consumer rm {names.events} "
        found.append(Finding("subscriptions", "warn", text, f"{todo}'{info['name']}'"))
    return found or [Finding("subscriptions", "ok", "every subscriber is in one group")]


def stranded(client: Client) -> Stranded:
    """A finder of stranded runs that trusts node records instead of judging nodes itself."""
    bucket = Bucket(client.broker, client.broker.names.nodes)

    async def alive(node: str) -> bool:
        entry = await bucket.get(node)
        if entry is None:
            return False
        record = bucket.read(nodes.decode, entry)
        return record is None or record.alive  # a node that cannot be judged keeps its runs

    return Stranded(client, alive)


async def node_records(site: Site) -> list[Finding]:
    """Nodes recorded as alive that have been silent for too long."""
    found, alive = [], []
    for node, silent in await _nodes(site):
        if node.alive and silent > node.liveness.timeout_seconds:
            text = f"{node.id} is {node.state} and was last heard of {duration(round(silent))} ago"
            todo = "check whether its process hangs; a running coordinator would declare it lost"
            found.append(Finding("nodes", "warn", text, todo))
        elif node.alive:
            alive.append(node.role)
        if node.alive and not node.liveness.enabled:
            text = (
                f"no coordinator watches {node.id} (liveness.enabled = no): its death would go "
                "unnoticed"
            )
            todo = "start it again without liveness.enabled = no (HOLDFAST_LIVENESS_ENABLED)"
            found.append(Finding("nodes", "warn", text, todo))
    if site.liveness is not None and site.liveness.enabled == "no":
        text = "the configuration here has liveness.enabled = no: no coordinator watches its nodes"
        todo = "remove it, unless you are debugging"
        found.append(Finding("nodes", "warn", text, todo))
    counts = [f"{alive.count(role)} {role}" for role in sorted(set(alive))]
    text = f"alive: {', '.join(counts)}" if counts else "no node is alive"
    return found or [Finding("nodes", "ok", text)]


async def records(site: Site) -> list[Finding]:
    """Records that every process skips because it cannot read them."""
    damaged = await UnreadableRecords(site.client).list()
    if not damaged:
        return [Finding("records", "ok", "every record can be read")]
    found = [
        Finding("records", "warn", f"{one.bucket}/{one.key}: {one.reason}", one.remedy)
        for one in damaged[:MOST_LISTED]
    ]
    if more := len(damaged) - len(found):
        text = f"{more} more records cannot be read"
        found.append(Finding("records", "warn", text, "holdfast unreadable list"))
    return found


async def _nodes(site: Site) -> list[tuple[NodeRecord, float]]:
    """Every node's record, and how long it has been silent by the server's clock."""
    bucket = Bucket(site.broker, site.broker.names.nodes)
    if bucket.stream in site.missing:
        return []
    now = site.broker.server_now()
    found = bucket.records(nodes.decode)
    return [(record, now - entry.stored) async for entry, record in found]


_FIXED_FOR_EVER: Final = frozenset({"retention", "storage"})
_BOUNDS: Final = frozenset({"max_age", "max_bytes", "max_msgs", "max_msgs_per_subject"})
"""A lower one removes messages."""
_TASTE: Final = _BOUNDS | {"duplicate_window", "num_replicas", "max_consumers"}
"""Options an operator may deliberately have chosen; a difference breaks no promise at once."""


def is_grave(difference: Difference) -> bool:
    """Whether a guarantee depends on it."""
    return difference.key not in _TASTE


def is_safe(difference: Difference) -> bool:
    """Whether it can be corrected without losing anything."""
    key, actual, wanted = difference.key, difference.actual, difference.wanted
    if not key or key in _FIXED_FOR_EVER:
        return False
    if key in _BOUNDS:
        return bool(actual) and 0 < actual < wanted
    if key == "num_replicas":
        return bool(actual < wanted)
    return True


def why_by_hand(difference: Difference) -> str:
    """What to do about a difference that is not corrected automatically."""
    if difference.key in _FIXED_FOR_EVER:
        return "a server never changes it: drain the jobs, delete the stream, restart the workers"
    if difference.key in _BOUNDS:
        return "messages would be removed: change the configuration, or the stream by hand"
    return "copies would be removed: change HOLDFAST_REPLICAS, or the stream by hand"


def changes(differences: Iterable[Difference]) -> dict[str, dict[str, Any]]:
    """For each stream, the members that are safe to change."""
    found: dict[str, dict[str, Any]] = {}
    for one in differences:
        if is_safe(one):
            value = one.wanted
            if one.key == "subjects":
                value = [*one.actual, *(s for s in one.wanted if s not in one.actual)]
            found.setdefault(one.stream, {})[one.key] = value
    return found


async def fix(topology: Topology) -> list[str]:
    """Correct what is safe; returns the streams that were changed."""
    planned = changes(await topology.differences())
    for stream, members in planned.items():
        await topology.update_stream(stream, members)
    return list(planned)
