"""`holdfast nodes`: every process of Holdfast, its state, its settings and its history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import (
    Cli,
    GroupOption,
    clock_time,
    connected,
    emit,
    given,
    operating,
    pairs,
    say,
    table,
)
from holdfast.status import actions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.model.node import Transition

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="The node's id.")]
RoleOption = Annotated[
    str, typer.Option("--role", metavar="ROLE", help="Only this role: worker, scheduler, …")
]
StateOption = Annotated[
    str, typer.Option("--state", metavar="STATE", help="Only this state, e.g. RUNNING.")
]
AllOption = Annotated[bool, typer.Option("--all", help="Include nodes that have ended.")]


def register(app: Cli) -> None:
    """Add `holdfast nodes`."""
    nodes = app.noun("nodes", "Look at the processes of Holdfast and drain them.")
    nodes.command("list")(list_nodes)
    nodes.command("show")(show)
    nodes.command("drain", help=actions.drain_node.doc)(drain)
    nodes.command("watch")(watch)


async def list_nodes(
    role: RoleOption = "", group: GroupOption = "", state: StateOption = "", all: AllOption = False
) -> None:
    """List nodes with state, uptime and runs in flight."""
    from holdfast.durations import text
    from holdfast.status.nodes import Nodes

    async with connected() as client:
        found = await Nodes(client).list(role=role, group=group, state=state, ended=all)
    if given().json:
        emit(found)
        return
    table(
        ("node", "role", "group", "state", "uptime", "running", "version", "reason"),
        [
            (
                n.id,
                n.role,
                n.group,
                n.state,
                text(float(round(n.uptime_seconds))),
                n.running,
                n.version,
                n.reason,
            )
            for n in found
        ],
        empty="no node is running: start one with 'holdfast worker APP'",
    )


async def show(node: NodeArgument) -> None:
    """Show a node: its settings, what it runs, and every transition with its reason."""
    from holdfast.durations import text
    from holdfast.status.nodes import Nodes

    async with connected() as client:
        info, history = await Nodes(client).show(node)
    if given().json:
        emit({"node": info, "history": history})
        return
    if info is not None:
        pairs(
            [
                ("node", info.id),
                ("role", info.role),
                ("group", info.group),
                ("state", f"{info.state}: {info.reason}"),
                ("host", f"{info.host}, pid {info.pid}, version {info.version}"),
                ("started", clock_time(info.started)),
                ("uptime", text(float(round(info.uptime_seconds)))),
                ("liveness", info.settings),
                ("running", info.running),
                ("jobs", ", ".join(info.jobs)),
            ]
        )
    _print_history(history)


def _print_history(history: Sequence[Transition]) -> None:
    table(
        ("at", "from", "to", "reason", "by"),
        [
            (
                clock_time(step.at),
                "" if step.before == step.after else step.before,
                step.after,
                step.reason or "registered",
                "itself" if step.by == step.node else step.by,
            )
            for step in history
        ],
        empty="no transitions are kept of it (they are kept for 7 days)",
    )


async def drain(node: NodeArgument) -> None:
    async with operating() as by:
        await actions.drain_node(by, node)
    if given().json:
        emit({"node": node, "draining": True})
    else:
        say(f"{node} is draining")


async def watch() -> None:
    """Print transitions as they happen, until Ctrl-C."""
    from holdfast.status.nodes import Nodes

    async with connected(create=True) as client:
        async for step in Nodes(client).watch():
            if given().json:
                emit(step)
            else:
                who = "" if step.by == step.node else f" (by {step.by})"
                say(f"{clock_time(step.at)}  {step.node}  {step.after}: {step.reason}{who}")
