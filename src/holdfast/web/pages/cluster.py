"""`/cluster`: every node with its state, liveness numbers and history; drain one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from holdfast.model.lifecycle import ALIVE
from holdfast.model.node import Transition
from holdfast.status.nodes import NodeInfo
from holdfast.status.servers import servers
from holdfast.web.pages.charts import Block, lane
from holdfast.web.pages.rendering import exact, look
from holdfast.web.pages.request import ViewerPage

router = APIRouter(include_in_schema=False)

SHOWN: Final = 50
"""Rows of one page."""
NATS_SECONDS: Final = 3.0
"""How long these are shared between pages: reading streams and consumers takes a dozen requests."""
LANE_SECONDS: Final = 3600.0
"""The last hour shows restarts and rollouts at a glance."""
DOTS: Final = 400
"""Most nodes drawn as dots; more could not be told apart."""
_ORDER: Final = ("ERROR", "DISCONNECTED", "TERMINATING", "CREATED", "RUNNING")
_OVER: Final = ("NOT_RUNNING", "INACTIVE", "TERMINATED_GRACEFULLY", "TERMINATED_FORCED")


class NodeLine(msgspec.Struct, frozen=True):
    """One node in the list, with its states in the last hour."""

    node: NodeInfo
    lane: list[Block]


@router.get("/cluster")
async def list_nodes(
    page: ViewerPage, q: str = "", role: str = "", ended: bool = False, start: int = 0
) -> Response:
    """The nodes that match, problems first."""
    every = await page.all_nodes()
    known = [n for n in every if ended or n.state not in _OVER]
    found = [n for n in known if (not role or n.role == role) and _has(n, q)]
    found.sort(key=_trouble)
    start = max(0, start)
    recent = await page.nodes.recent()
    steps = by_node(recent)
    now = page.now
    lines = [
        NodeLine(n, life(steps.get(n.id, []), n, now - LANE_SECONDS, now))
        for n in found[start : start + SHOWN]
    ]
    return await page.show(
        "cluster.html",
        "cluster",
        lines=lines,
        count=len(found),
        every=len(every),
        over=sum(n.state in _OVER for n in every),
        states=Counter(n.state for n in known).most_common(),
        dots=sorted(known, key=_trouble)[:DOTS],
        roles=sorted({n.role for n in every}),
        running=sum(n.running for n in known),
        chosen={"q": q, "role": role, "ended": "1" if ended else ""},
        recent=recent[:12],
        versions=versions(known),
        nats=await page.shared("servers", NATS_SECONDS, lambda: servers(page.client)),
        start=start,
        older=start + SHOWN if start + SHOWN < len(found) else 0,
        lane_from=now - LANE_SECONDS,
    )


def versions(nodes: Sequence[NodeInfo]) -> list[tuple[str, list[tuple[str, int]]]]:
    """The versions of each role, with how many nodes have each: more than one during a rollout."""
    found: dict[str, Counter[str]] = {}
    for node in nodes:
        found.setdefault(node.role, Counter())[node.version or "unknown"] += 1
    return [(role, sorted(counts.items())) for role, counts in sorted(found.items())]


def _has(node: NodeInfo, text: str) -> bool:
    return text.lower() in f"{node.id} {node.group} {node.host} {node.state}".lower()


def _trouble(node: NodeInfo) -> tuple[int, str, str, str]:
    place = _ORDER.index(node.state) if node.state in _ORDER else len(_ORDER)
    return place, node.role, node.group, node.id


@router.get("/cluster/{node}")
async def show(page: ViewerPage, node: str) -> Response:
    """One node and its history; a node that is gone has only its history."""
    info, history = await page.nodes.show(node)
    now = page.now
    first = history[0].at if history else now - LANE_SECONDS
    return await page.show(
        "node.html",
        "cluster",
        id=node,
        info=info,
        history=list(history)[::-1][:200],
        lane=life(history, info, min(first, now - 60), now),
        lane_from=min(first, now - 60),
        settings=settings(info.settings) if info else [],
        over=info is None or info.state not in ALIVE,
    )


def settings(described: str) -> list[tuple[str, str]]:
    """The liveness numbers as names and values."""
    found = []
    for part in described.split(", "):
        name, _, value = part.rpartition(" ") if " × " not in part else part.partition(" ")
        found.append((name or "liveness", value))
    return found


def by_node(steps: Sequence[Transition]) -> dict[str, list[Transition]]:
    """Transitions of each node, oldest first."""
    found: dict[str, list[Transition]] = {}
    for step in reversed(steps):
        found.setdefault(step.node, []).append(step)
    return found


def life(
    steps: Sequence[Transition], node: NodeInfo | None, start: float, end: float
) -> list[Block]:
    """The states of a node between two times."""
    spans: list[tuple[float, float, str, str]] = []
    if not steps and node:
        since = node.started or start
        spans.append((since, end, look(node.state), f"{node.state} since {exact(since)}"))
    elif steps and steps[0].before and steps[0].before != steps[0].after:
        spans.append((start, steps[0].at, look(steps[0].before), steps[0].before))
    for n, step in enumerate(steps):
        until = steps[n + 1].at if n + 1 < len(steps) else end
        if step.after not in _OVER:
            title = f"{step.after} from {exact(step.at)}: {step.reason}"
            spans.append((step.at, until, look(step.after), title))
    return lane(spans, start, end)
