"""Checks of a namespace: its streams and their copies, its nodes, and jobs that nobody serves."""

from __future__ import annotations

from typing import Any, Final

from holdfast import errors
from holdfast.broker import Bucket
from holdfast.broker.streams import stream_configs
from holdfast.client import Client
from holdfast.client.schedules import REFUSED
from holdfast.durations import text as duration
from holdfast.model import node as nodes
from holdfast.model.node import NodeRecord
from holdfast.names import REFUSALS, parse_consumer
from holdfast.status.checkup import Finding, Site, few
from holdfast.status.jobs import Jobs
from holdfast.status.stranded import Stranded
from holdfast.status.stream_fixes import is_grave, is_safe, why_by_hand
from holdfast.status.unreadable import UnreadableRecords

MOST_TOLD = 10
"""Unreadable records that are listed one by one."""

MOST_RUNS: Final = 100_000
"""Records that a check looks through: more of them take longer than anybody waits for it."""


async def replicas(site: Site) -> list[Finding]:
    """As many copies as the cluster can keep."""
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
    """As Holdfast would create them; it never changes an existing one by itself."""
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
        text = f"not there yet, the first worker creates them: {few(site.missing)}"
        found.append(Finding("streams", "ok", text))
    elif site.missing:
        text = f"missing, though the namespace is in use: {few(site.missing)}"
        todo = "a running worker or 'holdfast control' makes them again: start one, or see its log"
        found.append(Finding("streams", "fail", text, todo))
    return found or [Finding("streams", "ok", "every stream is as Holdfast would create it")]


async def jobs(site: Site) -> list[Finding]:
    """Runs that wait although nobody is there to execute them."""
    names = site.broker.names
    if {names.jobs, names.events, names.dead} & {*site.missing}:
        return [Finding("jobs", "ok", "none has been sent anything yet")]
    alive = [node for node, _ in await _nodes(site) if node.alive and node.role == "worker"]
    served = {(node.group, job) for node in alive for job in node.jobs}
    found = []
    for job in await Jobs(site.client).list():
        count = job.waiting + job.in_flight
        if count and (job.group, job.job) not in served:
            text = f"{count} runs of {job.job} (group {job.group}) wait and no live worker has it"
            todo = f"start one: holdfast worker APP --group {job.group}"
            found.append(Finding("jobs", "warn", text, todo))
        elif count and job.paused:
            text = f"{count} runs of {job.job} (group {job.group}) wait because it is paused"
            found.append(Finding("jobs", "warn", text, f"holdfast jobs resume {job.job}"))
    return found or [Finding("jobs", "ok", "no job waits for want of a worker")]


async def registrations(site: Site) -> list[Finding]:
    """Schedules that an app's code defines and that were not taken."""
    bucket = Bucket(site.broker, site.broker.names.schedules)
    found = []
    if bucket.stream not in site.missing:
        async for entry in bucket.entries(REFUSALS):
            refusal = bucket.read(REFUSED.decode, entry)
            if refusal is None:
                continue  # the check of records names it
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


async def subscriptions(site: Site) -> list[Finding]:
    """Consumers that collect events for a job which is served in another group by now."""
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
    """Finds stranded runs, and judges no node by itself."""
    bucket = Bucket(client.broker, client.broker.names.nodes)

    async def alive(node: str) -> bool:
        entry = await bucket.get(node)
        if entry is None:
            return False
        record = bucket.read(nodes.decode, entry)
        return record is None or record.alive  # a node that cannot be judged keeps its runs

    return Stranded(client, alive)


async def node_records(site: Site) -> list[Finding]:
    """Nodes that say they live and have not been heard of."""
    found, alive = [], []
    for node, silent in await _nodes(site):
        if node.alive and silent > node.liveness.timeout_seconds:
            text = f"{node.id} is {node.state} and was last heard of {duration(round(silent))} ago"
            todo = "see whether its process hangs; run a coordinator to have it judged"
            found.append(Finding("nodes", "warn", text, todo))
        elif node.alive:
            alive.append(node.role)
        if node.alive and not node.liveness.enabled:
            text = (
                f"{node.id} is judged by nobody (liveness.enabled = no): its death goes unnoticed"
            )
            todo = "start it again without liveness.enabled = no (HOLDFAST_LIVENESS_ENABLED)"
            found.append(Finding("nodes", "warn", text, todo))
    if site.liveness is not None and site.liveness.enabled == "no":
        text = "the configuration here says liveness.enabled = no: nodes are judged by nobody"
        todo = "leave it out, but for debugging"
        found.append(Finding("nodes", "warn", text, todo))
    counts = [f"{alive.count(role)} {role}" for role in sorted(set(alive))]
    text = f"alive: {', '.join(counts)}" if counts else "no node is alive"
    return found or [Finding("nodes", "ok", text)]


async def records(site: Site) -> list[Finding]:
    """Records that every process passes over because it cannot read them."""
    damaged = await UnreadableRecords(site.client).list()
    if not damaged:
        return [Finding("records", "ok", "every record can be read")]
    found = [
        Finding("records", "warn", f"{one.bucket}/{one.key}: {one.reason}", one.remedy)
        for one in damaged[:MOST_TOLD]
    ]
    if more := len(damaged) - len(found):
        text = f"{more} more records cannot be read"
        found.append(Finding("records", "warn", text, "holdfast unreadable list"))
    return found


async def _nodes(site: Site) -> list[tuple[NodeRecord, float]]:
    """Every node's record, and for how long it has been silent by the server's clock."""
    bucket = Bucket(site.broker, site.broker.names.nodes)
    if bucket.stream in site.missing:
        return []
    now = site.broker.server_now()
    found = bucket.records(nodes.decode)
    return [(record, now - entry.stored) async for entry, record in found]
