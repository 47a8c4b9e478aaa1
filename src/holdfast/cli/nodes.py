"""`holdfast nodes`: every process of Holdfast, its state, its settings and its history."""

from __future__ import annotations

from typing import Annotated

from holdfast.cli import out
from holdfast.cli.command import command, operating
from holdfast.cli.options import GroupOption, argument, option
from holdfast.status import fleet_actions as actions

NodeArgument = Annotated[str, argument("The node's id.", "NODE", "nodes")]


@command("nodes list")
async def list_nodes(
    role: Annotated[str, option("Only this role: worker, scheduler, …", "ROLE")] = "",
    group: GroupOption = "",
    state: Annotated[str, option("Only this state, e.g. RUNNING.", "STATE")] = "",
    all: Annotated[bool, option("Include nodes that have ended.")] = False,
) -> None:
    """List nodes with state, uptime and runs in flight."""
    async with operating() as by:
        found = await by.nodes.list(role=role, group=group, state=state, ended=all)
    out.listing(
        found,
        ("node", lambda node: node.id),
        "role",
        "group",
        "state",
        ("uptime", lambda node: out.age(round(node.uptime_seconds))),
        "running",
        "version",
        "reason",
        empty="no node is running: start one with 'holdfast worker APP'",
    )


@command("nodes show")
async def show(node: NodeArgument) -> None:
    """Show a node: its settings, what it runs, and every transition with its reason."""
    async with operating() as by:
        info, history = await by.nodes.show(node)
    if out.as_json({"node": info, "history": history}):
        return
    if info is not None:
        out.pairs(
            [
                ("node", info.id),
                ("role", info.role),
                ("group", info.group),
                ("state", f"{info.state}: {info.reason}"),
                ("host", f"{info.host}, pid {info.pid}, version {info.version}"),
                ("started", out.clock_time(info.started)),
                ("uptime", out.age(round(info.uptime_seconds))),
                ("liveness", info.settings),
                ("running", info.running),
                ("fleet runs", ", ".join(info.runs)),
                ("jobs", ", ".join(info.jobs)),
            ]
        )
    out.listing(
        history,
        ("at", lambda step: out.clock_time(step.at)),
        ("from", lambda step: "" if step.before == step.after else step.before),
        ("to", lambda step: step.after),
        ("reason", lambda step: step.reason or "registered"),
        ("by", lambda step: "itself" if step.by == step.node else step.by),
        empty="no transitions are kept of it (they are kept for 7 days)",
    )


@command("nodes drain", help=actions.drain_node.doc)
async def drain(node: NodeArgument) -> None:
    async with operating() as by:
        await actions.drain_node(by, node)
    out.result({"node": node, "draining": True}, f"{node} is draining")


@command("nodes watch")
async def watch() -> None:
    """Print transitions as they happen, until Ctrl-C."""
    async with operating(create=True) as by:
        async for step in by.nodes.watch():
            if not out.as_json(step):
                who = "" if step.by == step.node else f" (by {step.by})"
                out.say(f"{out.clock_time(step.at)}  {step.node}  {step.after}: {step.reason}{who}")
