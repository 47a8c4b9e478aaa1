"""`holdfast agents`: the agents, whether they are online, and their facts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from holdfast.cli import out
from holdfast.cli.auth import FOLDER, DirOption, PidOption
from holdfast.cli.command import command, operating
from holdfast.cli.options import argument, option
from holdfast.status import fleet_actions as actions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.cli.reloading import Reloading
    from holdfast.errors import HoldfastError
    from holdfast.identity.users import UserFolder
    from holdfast.model.join import JoinRecord
    from holdfast.status.operators import Operator

REPLACES = "replaces a known host"
_LOOK_SECONDS = 1.0  # a host that waits for its login asks every two seconds
_REST = (
    4.0  # times as long as the last change took, which lists all agents and makes servers reload
)
_END_SECONDS = 60.0  # logins last an hour at least, and the search for ended ones reads all of them

AgentArgument = Annotated[str, argument("The agent's id.", "AGENT", "agents")]


@command("agents list")
async def list_agents(
    target: Annotated[str, argument("Which agents: web*, G@os:linux, …", "TARGET")] = "*",
    online: Annotated[bool, option("Only online agents.")] = False,
) -> None:
    """List agents: whether they are online, when they were last seen, what they are."""
    async with operating() as by:
        found = await by.agents.list(target, online=online)
    out.listing(
        found,
        ("agent", lambda agent: agent.id),
        ("online", lambda agent: "yes" if agent.online else "no"),
        ("last seen", lambda agent: out.clock_time(agent.last_seen)),
        "os",
        "address",
        "version",
        "running",
        empty="no agent is known: start one with 'holdfast agent'"
        if target == "*" and not online
        else "no agent matches: 'holdfast agents list' shows all",
    )


@command("agents show")
async def show(agent: AgentArgument) -> None:
    """Show an agent with all its facts and functions."""
    async with operating() as by:
        info, facts = await by.agents.show(agent)
    if out.as_json({"agent": info, "facts": facts}):
        return
    out.pairs(
        [
            ("agent", info.id),
            ("online", "yes" if info.online else "no"),
            ("last seen", out.clock_time(info.last_seen)),
            ("functions", ", ".join(info.functions)),
            *((f"numbers: {name}", value) for name, value in sorted(info.metrics.items())),
            *((f"fact: {name}", _shown(value)) for name, value in sorted(facts.items())),
        ]
    )


@command("agents pending")
async def pending(
    all: Annotated[bool, option("Include hosts that were accepted or rejected.")] = False,
) -> None:
    """List hosts that have asked to join, and wait for a decision or for their login."""
    async with operating() as by:
        found = await by.joins.list(everything=all)
    if out.as_json([_join(record) for record in found]):
        return
    out.listing(
        found,
        "agent",
        "state",
        "host",
        "fingerprint",
        "token",
        ("asked", lambda one: out.clock_time(one.at)),
        "version",
        ("note", lambda one: REPLACES if one.replaces and one.state == "pending" else one.by),
        empty="no host waits: 'holdfast auth token' makes a token to ask with",
    )


@command("agents accept")
async def accept(
    agents: Annotated[list[str] | None, argument("Their ids.", "[AGENT]...")] = None,
    replace: Annotated[bool, option("Also accept a host that replaces a known one.")] = False,
    fingerprint: Annotated[
        str,
        option(
            "Accept only the host with this fingerprint, as its log and 'agents pending' show it."
        ),
    ] = "",
    all: Annotated[
        bool, option("Accept all that wait, except those that replace a known host.")
    ] = False,
    follow: Annotated[
        bool, option("Keep issuing the logins of approved hosts until Ctrl-C.")
    ] = False,
    dir: DirOption = FOLDER,
    pid_file: PidOption = None,
    reload: Annotated[
        str,
        option(
            "Run COMMAND after each change of auth.conf, so that your servers reload it.", "COMMAND"
        ),
    ] = "",
) -> None:
    """Let hosts that have asked to join become agents.

    Where the folder of 'holdfast auth' is, their logins are issued at once; elsewhere they are
    approved, and 'holdfast agents accept --follow' beside that folder issues them. It also issues
    logins to hosts whose token was made with --accept, and the next logins of agents whose login
    ends. Hosts can log in once every server has reloaded auth.conf: see --pid-file and --reload.
    """
    from holdfast.cli.reloading import Reloading
    from holdfast.errors import InvalidInput

    folder = _auth_folder(dir)
    if follow and folder is None:
        raise InvalidInput(f"{str(dir)!r} holds no users: name the folder with --dir")
    if not (agents or all or follow):
        raise InvalidInput("name the agents to accept, or pass --all or --follow")
    if fingerprint and (all or len(agents or ()) != 1):
        raise InvalidInput("a fingerprint belongs to one host: name that host")
    servers = Reloading(folder.config, pid_file, reload, at_once=follow) if folder else None
    async with operating() as by:
        chosen = list(agents or ())
        if all:
            waiting = [r for r in await by.joins.list() if r.state == "pending"]
            chosen += [r.agent for r in waiting if not r.replaces and r.agent not in chosen]
        try:
            await _accept(by, chosen, folder, replace=replace, fingerprint=fingerprint)
        finally:
            if servers and not follow:
                servers.look()
        if follow and folder is not None:
            await _follow(by, folder, servers)


async def _accept(
    by: Operator,
    agents: Sequence[str],
    folder: UserFolder | None,
    *,
    replace: bool,
    fingerprint: str,
) -> None:
    """Approve hosts; with the folder, issue their logins with one change.

    One that cannot be accepted keeps the others from nothing; the last error is raised.
    """
    from holdfast.errors import HoldfastError, TryAgain

    done: Sequence[JoinRecord] = []
    wrong: dict[str, HoldfastError] = {}
    for agent in agents:
        try:
            accepted = await actions.accept_agent(
                by, agent, replace=replace, fingerprint=fingerprint
            )
            done = [*done, accepted]
        except TryAgain:  # nor would the next one
            raise
        except HoldfastError as error:
            wrong[agent] = error
    if folder is not None:
        done, refused = await by.joins.issue([r.agent for r in done], folder)
        wrong |= refused
    for record in done:
        _accepted(record, folder)
    *others, last = [None, *wrong.values()]
    for other in others[1:]:
        out.note(f"error: {other}")
    if last is not None:
        raise last


async def _follow(by: Operator, folder: UserFolder, servers: Reloading | None = None) -> None:
    """Issue logins until cancelled; waits while NATS is away."""
    import time

    from holdfast.errors import BrokerError
    from holdfast.retrying import repeating
    from holdfast.status.joins import LoginKeeper

    broker = by.client.broker
    keeper = LoginKeeper(by.client, folder)
    told: dict[str, str] = {}
    took, ended = 0.0, -math.inf

    def say_once(about: str, text: str) -> None:
        if text and told.get(about) != text:
            out.note(text)
        told[about] = text

    async def step() -> None:
        nonlocal took, ended
        begun = time.monotonic()
        issued, wrong = await keeper.issue()
        for record in issued:
            _accepted(record, folder)
        for agent, error in wrong.items():
            say_once(agent, f"{agent}: {error}")
        for agent in await keeper.renew():
            out.say(f"{agent} has its next login")
        if begun - ended > _END_SECONDS:
            ended = begun
            for user in folder.end_joined(broker.server_now()):
                out.note(f"a login of {user.agent} has ended")
        took = time.monotonic() - begun
        say_once("", await _not_taken(servers))

    await repeating(
        step,
        clock=broker.clock,
        every=lambda: max(_LOOK_SECONDS, _REST * took),
        what="issuing logins",
        on=BrokerError,
        at_once=True,
    )


async def _not_taken(servers: Reloading | None) -> str:
    """Why the servers were not told of a change; empty if they were."""
    import asyncio

    from holdfast.errors import ConfigError

    try:
        if servers:
            await asyncio.to_thread(servers.look)
    except ConfigError as error:
        return str(error)
    return ""


def _accepted(record: JoinRecord, folder: UserFolder | None) -> None:
    here = "has its login: it joins once the servers have reloaded"
    elsewhere = "is approved: 'holdfast agents accept --follow' issues its login"
    out.result(_join(record), f"{record.agent} {here if folder else elsewhere}")


@command("agents reject", help=actions.reject_agent.doc)
async def reject(agent: AgentArgument) -> None:
    async with operating() as by:
        record = await actions.reject_agent(by, agent)
    out.result(_join(record), f"{agent} is rejected")


@command("agents revoke", help=actions.revoke_token.doc)
async def revoke(
    token: Annotated[str, argument("The token's id.", "TOKEN-ID")],
    force: Annotated[bool, option("Even if no token with this id is known.")] = False,
    dir: DirOption = FOLDER,
) -> None:
    folder = _auth_folder(dir)
    made = {one.id for one in folder.tokens()} if folder else set()
    async with operating() as by:
        await actions.revoke_token(by, token, force=force or token in made)
    out.result({"token": token, "revoked": True}, f"token {token} is revoked")


def _auth_folder(dir: Path) -> UserFolder | None:
    import time

    from holdfast.clock import rfc3339
    from holdfast.identity.users import USERS, UserFolder

    return UserFolder(dir, now=rfc3339(time.time())) if (dir / USERS).exists() else None


def _join(record: JoinRecord) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(record) | {"fingerprint": record.fingerprint}
    return {name: value for name, value in found.items() if name not in ("signed", "answer")}


@command("agents forget", help=actions.forget_agent.doc)
async def forget(agent: AgentArgument) -> None:
    async with operating() as by:
        await actions.forget_agent(by, agent)
    out.result({"agent": agent, "forgotten": True}, f"{agent} is forgotten")


def _shown(value: Any) -> str:
    import msgspec

    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
