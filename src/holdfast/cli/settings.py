"""`holdfast settings`: publish the settings of the fleet, and see who has which."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli import out
from holdfast.cli.command import command, connected, operating
from holdfast.cli.options import DryRunOption, SeedOption, YesOption, argument, given, option
from holdfast.errors import InvalidInput
from holdfast.status import fleet_actions as actions

if TYPE_CHECKING:
    from holdfast.settings.canary import CanaryVerdict, Trial
    from holdfast.settings.plan import Plan
    from holdfast.settings.publisher import Publisher
    from holdfast.settings.records import SettingsCanary
    from holdfast.settings.sealing import Sealer
    from holdfast.settings.tree import Tree
    from holdfast.status.operators import Operator

DirArgument = Annotated[Path, argument("Folder with top.yaml.", "DIR")]
AgentsOption = Annotated[
    list[str] | None, option("Also seal for this agent, which has never connected.", "ID")
]
ForceOption = Annotated[bool, option("Replace settings that another account has signed.")]

_AUTH = Path("auth")
_ASK_SECONDS = 5.0  # bounds the wait for an agent that does not answer


@command("settings push")
async def push(
    folder: DirArgument,
    dry_run: DryRunOption = False,
    agent: AgentsOption = None,
    allow_empty: Annotated[
        bool, option("Allow an empty folder, which removes all settings from all agents.")
    ] = False,
    force: ForceOption = False,
    canary: Annotated[
        str,
        option(
            "Push to the online agents that match TARGET first, or to N of them.", "TARGET|N|N%"
        ),
    ] = "",
    soak: Annotated[str, option("With --canary: how long to watch them.", "TIME")] = "60s",
    check: Annotated[
        str, option("With --canary: a fleet command that must succeed on them.", "COMMAND")
    ] = "",
    seed: SeedOption = None,
) -> None:
    """Publish a folder: all of it at once, or nothing.

    Secrets are sealed for each agent that is entitled to them. Only changes are written, and no
    secret is ever shown. With --canary, a few agents get it first; if one of them does not have it
    in force after --soak, or fails --check, the push is rolled back (exit code 2).
    """
    from holdfast.settings.publisher import Publisher

    agents = [*(agent or ()), *issued_agents(seed)]
    async with operating(create=True) as by:
        publisher = Publisher(by.client.broker, sealer(seed), by.client.records)
        if canary and not dry_run:
            if force:
                raise InvalidInput(
                    "--force does not work with --canary: there is nothing to go back to"
                )
            trial = await _trial(by, publisher, canary, soak, check)
            done = actions.try_settings(by, trial, folder, agents=agents, allow_empty=allow_empty)
            tree, _, verdict = await done
            remarks(tree)
            _print_verdict(verdict)
            return
        if dry_run:
            tree, plan = await publisher.plan(folder, agents=agents, empty=allow_empty, force=force)
        else:
            tree, plan = await actions.push_settings(
                by, publisher, folder, agents=agents, allow_empty=allow_empty, force=force
            )
    remarks(tree)
    if out.as_json(plan_json(plan)):
        return
    print_changes(plan)
    if plan.empty:
        out.say("nothing changes")
    elif dry_run:
        out.say("nothing was written")
    elif plan.revision:
        out.say(f"revision {plan.revision.number} is published")


@command("settings rollback", help=actions.roll_back_settings.doc)
async def rollback(
    number: Annotated[
        int, argument("Go back to this revision; default: the one before.", "[REVISION]", min=0)
    ] = 0,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    seed: SeedOption = None,
) -> None:
    from holdfast.settings.publisher import Publisher

    async with operating() as by:
        publisher = Publisher(by.client.broker, sealer(seed), by.client.records)
        if dry_run:
            plan = await publisher.plan_back(number)
        else:
            if not yes:
                await out.confirm_action(actions.roll_back_settings, by, publisher, number)
            plan = await actions.roll_back_settings(by, publisher, number)
    if out.as_json(plan_json(plan)):
        return
    print_changes(plan)
    if plan.revision is None:
        out.say("nothing changes")
    elif dry_run:
        out.say("nothing was written")
    else:
        back = plan.revision.back_to
        out.say(f"revision {plan.revision.number} is published: back to revision {back}")


@command("settings status")
async def status() -> None:
    """Show the revision of each agent, and the errors of those that refused one."""
    from holdfast.settings.store import SettingsStore

    async with connected() as client:
        store = SettingsStore(client.broker)
        current, reports = await store.shown_revision(), await store.reports()
    number = current.number if current else 0
    tried = current.canary if current else None
    behind = [a for a, r in reports.items() if (r.born, r.number) != _order(current)]
    if given().json:
        found = [{"agent": agent, **plain(report)} for agent, report in sorted(reports.items())]
        out.emit({"revision": number, "behind": sorted(behind), "agents": found})
        return
    generations = ", ".join(map(str, current.generations)) if current else ""
    out.pairs(
        [
            ("revision", number or "none readable"),
            ("published", out.clock_time(current.at) if current else ""),
            ("key generations", generations),
            ("canary", canary_text(tried)),
            ("agents", f"{len(reports) - len(behind)} of {len(reports)} agents have it"),
        ]
    )
    out.listing(
        sorted(reports.items()),
        ("agent", lambda one: one[0]),
        ("revision", lambda one: one[1].number or "none"),
        ("since", lambda one: out.clock_time(one[1].at)),
        ("refused", lambda one: one[1].refused or ""),
        ("problem", lambda one: out.shortened(one[1].error, 200)),
        empty="no agent has reported yet",
    )


@command("settings get")
async def get(
    agent: Annotated[str, argument("The agent's id.", "AGENT")],
    path: Annotated[str, argument("Dotted path, e.g. db.host.", "[PATH]")] = "",
) -> None:
    """Ask a live agent for its settings; secrets are masked."""
    from holdfast.errors import SettingsError, Unavailable
    from holdfast.model.fleet import FACTS
    from holdfast.names import check_name

    check_name(agent, "agent")
    async with connected() as client:
        subject = client.broker.names.node(agent, "settings")
        try:
            answer = await client.broker.request(subject, path.encode(), timeout=_ASK_SECONDS)
        except Unavailable:
            raise SettingsError(f"agent {agent} does not answer: is it running?") from None
    found = FACTS.decode(answer.body)
    if "error" in found:
        raise SettingsError(str(found["error"]))
    values = found.get("values")
    if given().json or not isinstance(values, str):
        out.emit(values)
    else:
        out.block(values)


# ---- canaries


def canary_text(canary: SettingsCanary | None) -> str:
    """Which agents try a snapshot, and until when."""
    if canary is None:
        return ""
    shown = ", ".join(canary.agents[:5]) + (" …" if len(canary.agents) > 5 else "")
    return f"tried by {shown} until {out.clock_time(canary.until)}"


async def _trial(by: Operator, publisher: Publisher, canary: str, soak: str, check: str) -> Trial:
    """A canary push, as the options describe it."""
    from holdfast.durations import seconds
    from holdfast.settings.canary import Trial

    wave = await _wave(by, canary)
    words = shlex.split(check)

    async def passes(agents: Sequence[str]) -> str:
        return await _failed_check(by, words, agents) if words else ""

    return Trial(by.client.broker, publisher, wave, seconds(soak, "soak"), passes)


async def _wave(by: Operator, canary: str) -> list[str]:
    """Online agents: those that a target matches, or a random few."""
    import random

    number = canary.removesuffix("%")
    few = number.isascii() and number.isdigit()
    online = [agent.id for agent in await by.agents.list("*" if few else canary, online=True)]
    if few:
        share = -(-len(online) * int(number) // 100) if canary.endswith("%") else int(number)
        online = random.sample(online, min(share, len(online)))
    if not online:
        raise InvalidInput(f"--canary {canary}: no agent that is online matches")
    return online


async def _failed_check(by: Operator, words: Sequence[str], agents: Sequence[str]) -> str:
    from holdfast.client.fleet import new_run
    from holdfast.model.fleet import FleetRequest, FleetRun
    from holdfast.settings.canary import CHECK_SECONDS

    request = FleetRequest(
        new_run(),
        f"L@{','.join(agents)}",
        words[0],
        args=tuple(words[1:]),
        raw=True,
        timeout=CHECK_SECONDS / 3,
        user=by.audit.who,
    )
    answered = set()
    async for found in by.fleet.fleet.follow(request):
        if isinstance(found, FleetRun):
            continue
        answered.add(found.agent)
        if not found.ok or found.value is False:
            return f"the check failed on {found.agent}: {found.error or 'it returned false'}"
    missing = sorted(set(agents) - answered)
    return f"{missing[0]} did not answer the check" if missing else ""


def _print_verdict(verdict: CanaryVerdict | None) -> None:
    """Say how a canary ended; exit code 2 when it was rolled back."""
    if verdict is None:
        out.say("nothing changes")
        return
    final = verdict.final.revision.number if verdict.final.revision else 0
    if given().json:
        found = {"tried": verdict.trial, "revision": final, "failure": verdict.failure}
        out.emit({**found, "promoted": not verdict.failure, "not_back": list(verdict.not_back)})
    elif verdict.failure:
        out.note(f"revision {verdict.trial} was rolled back: {verdict.failure}")
        out.say(f"revision {final} is published, with what was in force before")
    else:
        out.say(
            f"revision {final} is published: the canary with revision {verdict.trial} succeeded"
        )
    if verdict.not_back:
        out.note(
            f"agents that still have the canary's settings: {', '.join(verdict.not_back[:10])}"
        )
    if verdict.failure:
        raise typer.Exit(2)


# ---- shared with `holdfast settings diff` and `holdfast secrets`


def sealer(seed: Path | None) -> Sealer:
    """The account's part in sealing secrets."""
    from holdfast.identity.seed import AccountSeed
    from holdfast.settings.sealing import Sealer

    return Sealer(AccountSeed.load(seed_file(seed)))


def seed_file(given_file: Path | None) -> Path:
    """Where the account seed is."""
    from holdfast.config import DispatcherConfig, load

    configured = load(DispatcherConfig).seed_file
    return given_file or (Path(configured) if configured else _AUTH / "account.seed")


def issued_agents(seed: Path | None) -> list[str]:
    """Agents with credentials next to the seed: they may not have started yet."""
    from holdfast.identity.users import USERS, UserFolder

    folder = seed_file(seed).parent
    if not (folder / USERS).exists():
        return []
    return [user.agent for user in UserFolder(folder).users() if user.agent and not user.revoked]


def _order(revision: Any) -> tuple[int, int]:
    return revision.order if revision else (0, 0)


def plain(record: Any) -> dict[str, Any]:
    """A record as JSON values."""
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(record)
    return found


def remarks(tree: Tree) -> None:
    """Point out what somebody may have overlooked in a folder."""
    for name in tree.unused:
        out.note(f"note: {name}.yaml is named by no expression of top.yaml")
    if tree.plain:
        out.note(
            f"note: {len(tree.plain)} secrets are plain text in the folder "
            f"({', '.join(tree.plain[:3])} …): 'holdfast secrets seal DIR' seals them there"
        )


def print_changes(plan: Plan) -> None:
    """Print what a plan would change, or has changed."""
    for how, what in plan.changes:
        out.say(f"{how:<10} {what}")


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan as JSON values."""
    return {
        "revision": plan.revision.number if plan.revision else None,
        "changes": [{"how": how, "what": what} for how, what in plan.changes],
        "agents_sealed": sorted(plan.seal),
    }
