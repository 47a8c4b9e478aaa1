"""Actions of operators on nodes, agents and settings, and for upkeep.

Each action is defined here once, for the CLI, the API and the pages; see `operators`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from holdfast.status.operators import LONGEST_DETAIL, Line, Operator, Preview, action, many

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.identity.seed import AccountSeed
    from holdfast.model.fleet import FleetRequest, FleetRun, Return
    from holdfast.model.join import JoinRecord
    from holdfast.settings.canary import CanaryVerdict, Trial
    from holdfast.settings.plan import Plan
    from holdfast.settings.publisher import Publisher
    from holdfast.settings.tree import Tree
    from holdfast.status.stranded import Case, Stranded

    Fixed = tuple[list[str], dict[str, str]]


# ---- nodes


@action("nodes", "drain", "admin", "Drain it", danger=True)
async def drain_node(by: Operator, line: Line, node: str) -> None:
    """Ask a node to finish what it runs and end, as SIGTERM would."""
    await by.nodes.drain(node)
    line.update(detail=node)


@drain_node.previewed
async def _(by: Operator, node: str) -> Preview:
    from holdfast.errors import NotFound
    from holdfast.model.lifecycle import ALIVE

    info, _ = await by.nodes.show(node)
    if info is None or info.state not in ALIVE:
        raise NotFound(f"node {node!r} has ended: there is nothing to drain")
    return Preview(
        f"Drain {node}?",
        "Its process takes nothing new, finishes what it runs within its grace period, and ends, "
        "as after SIGTERM.",
        f"{many(info.running, 'run')} in flight there now; what does not finish starts elsewhere.",
        "An orchestrator may start it again; Holdfast does not.",
    )


# ---- agents and their fleet


@action("agents", "forget", "admin", "Forget it", danger=True)
async def forget_agent(by: Operator, line: Line, agent: str) -> None:
    """Forget an agent that will not come back: targets no longer match it."""
    await by.agents.forget(agent)
    line.update(detail=agent)


@forget_agent.previewed
async def _(by: Operator, agent: str) -> Preview:
    await by.agents.show(agent)
    return Preview(
        f"Forget {agent}?", "Targets no longer match it. If it comes back, it is listed again."
    )


@action("agents", "accept", "admin", "Accept it")
async def accept_agent(
    by: Operator, line: Line, agent: str, *, replace: bool = False, fingerprint: str = ""
) -> JoinRecord:
    """Let a host that has asked to join become an agent; its login is issued where the folder of
    logins is."""
    record = await by.joins.approve(agent, by.audit.who, replace=replace, fingerprint=fingerprint)
    line.update(detail=f"{agent} with token {record.token}")
    return record


@accept_agent.previewed
async def _(by: Operator, agent: str, *, replace: bool = False, fingerprint: str = "") -> Preview:
    record = await by.joins.show(agent)
    replaced = "It replaces a host that has or had this id, whose login ends."
    return Preview(
        f"Accept {agent}?",
        f"{record.host or 'The host'} becomes agent {agent}: it gets the commands, settings and "
        "secrets of that id.",
        f"Its fingerprint is {record.fingerprint}: compare it with the one in the host's log.",
        *([replaced] if record.replaces or replace else []),
    )


@action("agents", "reject", "admin", "Reject it", danger=True)
async def reject_agent(by: Operator, line: Line, agent: str) -> JoinRecord:
    """Reject a host that asked to join; it needs another token to ask again."""
    record = await by.joins.reject(agent, by.audit.who)
    line.update(detail=f"{agent} with token {record.token}")
    return record


@action("agents", "revoke", "admin", "Revoke it", danger=True)
async def revoke_token(by: Operator, line: Line, token: str, *, force: bool = False) -> None:
    """Revoke a token: no other host can join with it. Agents that have joined stay."""
    await by.joins.revoke(token, by.audit.who, force=force)
    line.update(detail=f"token {token}")


@action("fleet", "command", "admin", "Send the command", danger=True)
async def command_fleet(by: Operator, line: Line, request: FleetRequest) -> FleetRun:
    """Run a function on every agent that a target matches; it is dispatched when this returns."""
    record = await by.fleet.fleet.start(request)
    detail = f"{request.function} on {request.target}"
    line.update(runs=[record.run], count=len(record.targets), detail=detail)
    return record


@command_fleet.previewed
async def _(by: Operator, request: FleetRequest) -> Preview:
    matched = await by.fleet.fleet.resolve(request.target)
    words = " ".join([request.function, *map(str, request.args)])
    return Preview(
        f"Run {request.function} on {request.target}?",
        f"{words} runs on {many(len(matched), 'agent')}, as you.",
        "Each agent runs it once. What it has done cannot be undone from here.",
        listed=matched or ["no agent matches: none would run it"],
    )


@action("fleet", "direct", "admin", "Send the command", danger=True)
async def command_agent(
    by: Operator,
    line: Line,
    request: FleetRequest,
    seed: AccountSeed | None,
    generation: int = 1,
) -> Return:
    """Run a function on one agent without a dispatcher; only its return is kept."""
    from holdfast.client.direct import command

    line.update(runs=[request.run], count=1, detail=f"{request.function} on {request.target}")
    return await command(by.client.broker, request, seed, generation)


@action("fleet", "cancel", "operator", "Cancel it", danger=True)
async def cancel_fleet(by: Operator, line: Line, run: str) -> FleetRun:
    """Cancel a fan-out run: no further agent gets it, and those that run it stop."""
    record = await by.fleet.cancel(run, by.audit.who)
    if not record.over or record.cancelled_by:
        line.update(runs=[run], detail="fleet")
    return record


@cancel_fleet.previewed
async def _(by: Operator, run: str) -> Preview:
    record, returns = await by.fleet.show(run)
    left = len(record.targets) - len(returns)
    return Preview(
        f"Cancel {record.request.function}?",
        "No further agent gets the command, and those that execute it stop.",
        f"{many(left, 'agent')} of {len(record.targets)} have not answered yet; what the others "
        "have done is not undone.",
    )


# ---- upkeep


@action("unreadable", "remove", "admin", "Remove it", danger=True)
async def remove_unreadable(by: Operator, line: Line, bucket: str, key: str) -> None:
    """Remove one record that cannot be read."""
    await by.unreadable.remove(bucket, key)
    line.update(detail=f"{bucket}/{key}")


@remove_unreadable.previewed
async def _(by: Operator, bucket: str, key: str) -> Preview:
    return Preview(f"Remove the record {key} from {bucket}?", "It cannot be brought back.")


@action("settings", "push", "admin", "Publish them")
async def push_settings(
    by: Operator,
    line: Line,
    publisher: Publisher,
    folder: Path,
    *,
    agents: Sequence[str] = (),
    allow_empty: bool = False,
    force: bool = False,
) -> tuple[Tree, Plan]:
    """Publish a folder of settings: all of it at once, or nothing."""
    tree, plan = await publisher.push(folder, agents=agents, empty=allow_empty, force=force)
    if not plan.empty and plan.revision:
        line.update(count=len(plan.changes), detail=f"revision {plan.revision.number}")
    return tree, plan


@action("settings", "canary", "admin", "Try them")
async def try_settings(
    by: Operator,
    line: Line,
    trial: Trial,
    folder: Path,
    *,
    agents: Sequence[str] = (),
    allow_empty: bool = False,
) -> tuple[Tree, Plan, CanaryVerdict | None]:
    """Publish a folder of settings to a few agents first, then to all, or roll it back."""
    line.update(detail=f"tried on {many(len(trial.wave), 'agent')}")
    tree, plan, verdict = await trial.push(folder, agents=agents, empty=allow_empty)
    if verdict is None or plan.revision is None:
        line.clear()
    else:
        ended = f"rolled back: {verdict.failure}" if verdict.failure else "promoted"
        line.update(
            count=len(plan.changes),
            detail=f"revision {plan.revision.number} {line['detail']}, {ended}"[:LONGEST_DETAIL],
        )
    return tree, plan, verdict


@action("settings", "rollback", "admin", "Go back", danger=True)
async def roll_back_settings(
    by: Operator, line: Line, publisher: Publisher, number: int = 0
) -> Plan:
    """Make an earlier revision of the settings current again; without a number, the last one."""
    plan = await publisher.go_back(number)
    if plan.revision:
        detail = f"revision {plan.revision.number}, back to {plan.revision.back_to}"
        line.update(count=len(plan.changes), detail=detail)
    return plan


@roll_back_settings.previewed
async def _(by: Operator, publisher: Publisher, number: int = 0) -> Preview:
    plan = await publisher.plan_back(number)
    back = plan.revision.back_to if plan.revision else number
    return Preview(
        f"Go back to revision {back}?" if plan.revision else "Nothing would change. Continue?",
        "Every agent gets the files and secrets of that revision, under a new number.",
        listed=[f"{how} {what}" for how, what in plan.changes],
    )


@action("secrets", "rotate", "admin", "Rotate the keys")
async def rotate_secrets(
    by: Operator, line: Line, publisher: Publisher, *, finish: bool = False, force: bool = False
) -> Plan:
    """Begin using a new generation of keys beside the old one, or finish a rotation."""
    plan = await publisher.rotate(finish=finish, force=force)
    line.update(detail=f"generation {' and '.join(map(str, plan.generations))}")
    return plan


@action("doctor", "fix", "admin", "Fix them")
async def fix(by: Operator, line: Line, stranded: Stranded, cases: list[Case]) -> Fixed:
    """Correct drifted streams, repair stranded runs, free places in limits of ended runs, and wake
    flows that nobody has woken."""
    from holdfast.status.checks import fix as fix_streams
    from holdfast.status.stranded import repair_all

    streams = await fix_streams(by.client.topology)
    repaired = await repair_all(stranded, cases)
    await by.limits.repair()
    freed = await by.limits.repair(lines=True)
    repaired |= dict.fromkeys(freed, "its place in the limit was freed")
    repaired |= dict.fromkeys(await by.flows.repair(), "it was woken")
    if streams or repaired:
        line.update(runs=list(repaired), count=len(repaired), detail=", ".join(streams))
    return streams, repaired


@action("backup", "restore", "admin", "Restore it")
async def restore(
    by: Operator, line: Line, streams: Sequence[str], load: Callable[[str], Awaitable[int]]
) -> dict[str, int]:
    """Recreate the streams and buckets of a backup on a server that lacks them."""
    made: dict[str, int] = {}
    try:
        for stream in streams:
            made[stream] = await load(stream)
    finally:
        if made:
            line.update(count=len(made), detail=", ".join(made))
    return made
