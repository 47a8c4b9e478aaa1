"""`holdfast agents`: the agents, whether they are online, and their facts."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli.common import (
    Cli,
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

AgentArgument = Annotated[str, typer.Argument(metavar="AGENT", help="The agent's id.")]
TargetArgument = Annotated[
    str, typer.Argument(metavar="TARGET", help="Which agents: web*, G@os:linux, …")
]
OnlineOption = Annotated[bool, typer.Option("--online", help="Only online agents.")]


def register(app: Cli) -> None:
    """Add `holdfast agents`."""
    agents = app.noun("agents", "Look at the agents and their facts.")
    agents.command("list")(list_agents)
    agents.command("show")(show)
    agents.command("forget", help=actions.forget_agent.doc)(forget)


async def list_agents(target: TargetArgument = "*", online: OnlineOption = False) -> None:
    """List agents: whether they are online, when they were last seen, what they are."""
    from holdfast.status.fleet import Agents

    async with connected() as client:
        found = await Agents(client).list(target, online=online)
    if given().json:
        emit(found)
        return
    table(
        ("agent", "online", "last seen", "os", "address", "version", "running"),
        [
            (
                a.id,
                "yes" if a.online else "no",
                clock_time(a.last_seen),
                a.os,
                a.address,
                a.version,
                a.running,
            )
            for a in found
        ],
        empty="no agent is known: start one with 'holdfast agent'"
        if target == "*" and not online
        else "no agent matches: 'holdfast agents list' shows all",
    )


async def show(agent: AgentArgument) -> None:
    """Show an agent with all its facts and functions."""
    from holdfast.status.fleet import Agents

    async with connected() as client:
        info, facts = await Agents(client).show(agent)
    if given().json:
        emit({"agent": info, "facts": facts})
        return
    pairs(
        [
            ("agent", info.id),
            ("online", "yes" if info.online else "no"),
            ("last seen", clock_time(info.last_seen)),
            ("functions", ", ".join(info.functions)),
            *((f"numbers: {name}", value) for name, value in sorted(info.metrics.items())),
            *((f"fact: {name}", _shown(value)) for name, value in sorted(facts.items())),
        ]
    )


async def forget(agent: AgentArgument) -> None:
    async with operating() as by:
        await actions.forget_agent(by, agent)
    if given().json:
        emit({"agent": agent, "forgotten": True})
    else:
        say(f"{agent} is forgotten")


def _shown(value: Any) -> str:
    import msgspec

    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
