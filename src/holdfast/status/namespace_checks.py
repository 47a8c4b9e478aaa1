"""Checks of a namespace: its streams and their copies, its nodes, and jobs that nobody serves."""

from __future__ import annotations

from typing import Any

from holdfast import errors
from holdfast.broker import Bucket
from holdfast.broker.streams import stream_configs
from holdfast.durations import text as duration
from holdfast.model import node as nodes
from holdfast.model.node import NodeRecord
from holdfast.status.checkup import Finding, Site, few
from holdfast.status.jobs import Jobs
from holdfast.status.stream_fixes import is_grave, is_safe, why_by_hand
from holdfast.status.unreadable import UnreadableRecords

MOST_TOLD = 10
"""Unreadable records that are told of one by one."""


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
    if site.missing:
        text = f"not there yet, the first worker creates them: {few(site.missing)}"
        found.append(Finding("streams", "ok", text))
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
