"""`holdfast settings`: publish the settings of the fleet, and see who has which."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.common import (
    Cli,
    DryRunOption,
    block,
    clock_time,
    connected,
    emit,
    given,
    note,
    operating,
    pairs,
    say,
    shortened,
    table,
)
from holdfast.status import actions

if TYPE_CHECKING:
    from holdfast.settings.plan import Plan
    from holdfast.settings.sealing import Sealer
    from holdfast.settings.store import Published
    from holdfast.settings.tree import Tree

DirArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder with top.yaml.")]
SeedOption = Annotated[
    Path | None,
    typer.Option("--seed", metavar="FILE", help="Account seed; else auth/account.seed."),
]
AgentsOption = Annotated[
    list[str] | None,
    typer.Option("--agent", metavar="ID", help="Seal for this agent too, though it is unknown."),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace settings that another account has signed.")
]
EmptyOption = Annotated[
    bool, typer.Option("--allow-empty", help="Take all settings from all agents.")
]

_AUTH = Path("auth")
_ASK_SECONDS = 5.0  # bounds the wait for an agent that does not answer


def register(app: Cli) -> None:
    """Add `holdfast settings`."""
    settings = app.noun("settings", "Publish settings to agents, and see who has which.")
    settings.command("push")(push)
    settings.command("diff")(diff)
    settings.command("status")(status)
    settings.command("get")(get)


async def push(
    folder: DirArgument,
    dry_run: DryRunOption = False,
    agent: AgentsOption = None,
    allow_empty: EmptyOption = False,
    force: ForceOption = False,
    seed: SeedOption = None,
) -> None:
    """Publish a folder: all of it at once, or nothing.

    Secrets are sealed for each agent that is entitled to them. Nothing that has not changed is
    written again, and no secret is ever shown.
    """
    from holdfast.settings.publisher import Publisher

    agents = [*(agent or ()), *issued_agents(seed)]
    async with operating(create=True) as by:
        publisher = Publisher(by.client.broker, sealer(seed), by.client.records)
        if dry_run:
            tree, plan = await publisher.plan(folder, agents=agents, empty=allow_empty, force=force)
        else:
            tree, plan = await actions.push_settings(
                by, publisher, folder, agents=agents, allow_empty=allow_empty, force=force
            )
    _remarks(tree)
    if given().json:
        emit(_as_json(plan))
        return
    _print_changes(plan)
    if plan.empty:
        say("nothing changes")
    elif dry_run:
        say("nothing was written")
    elif plan.revision:
        say(f"revision {plan.revision.number} is published")


async def diff(
    folder: DirArgument,
    agent: AgentsOption = None,
    force: ForceOption = False,
    seed: SeedOption = None,
) -> None:
    """Show what a push of a folder would change, line by line; secrets are placeholders."""
    from holdfast.settings.publisher import Publisher

    agents = [*(agent or ()), *issued_agents(seed)]
    own = sealer(seed)
    async with connected(create=True) as client:
        publisher = Publisher(client.broker, own, client.records)
        tree, plan = await publisher.plan(folder, agents=agents, empty=True, force=force)
        there = await publisher.store.published(own, force=force)
    _remarks(tree)
    if given().json:
        emit(_as_json(plan))
        return
    _print_changes(plan)
    for line in _lines(tree, there):
        say(line)


async def status() -> None:
    """Show which agent is on which revision, and who failed with what message."""
    from holdfast.settings.store import Store

    async with connected() as client:
        store = Store(client.broker)
        current, reports = await store.shown_revision(), await store.reports()
    number = current.number if current else 0
    behind = [a for a, r in reports.items() if (r.born, r.number) != _order(current)]
    if given().json:
        found = [{"agent": agent, **_report(report)} for agent, report in sorted(reports.items())]
        emit({"revision": number, "behind": sorted(behind), "agents": found})
        return
    generations = ", ".join(map(str, current.generations)) if current else ""
    pairs(
        [
            ("revision", number or "none that can be read"),
            ("published", clock_time(current.at) if current else ""),
            ("key generations", generations),
            ("agents", f"{len(reports) - len(behind)} of {len(reports)} are on it"),
        ]
    )
    table(
        ("agent", "revision", "since", "refused", "problem"),
        [
            (agent, r.number or "none", clock_time(r.at), r.refused or "", shortened(r.error, 200))
            for agent, r in sorted(reports.items())
        ],
        empty="no agent has reported yet",
    )


async def get(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="The agent's id.")],
    path: Annotated[str, typer.Argument(metavar="[PATH]", help="Dotted path, e.g. db.host.")] = "",
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
        emit(values)
    else:
        block(values)


# ---- shared with `holdfast secrets`


def sealer(seed: Path | None) -> Sealer:
    """The account's side of sealing."""
    from holdfast.identity import AccountSeed
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


def _report(report: Any) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(report)
    return found


def _remarks(tree: Tree) -> None:
    for name in tree.unused:
        note(f"note: {name}.yaml is named by no expression of top.yaml")
    if tree.plain:
        note(
            f"note: {len(tree.plain)} secrets stand in plain in the folder "
            f"({', '.join(tree.plain[:3])} …): 'holdfast secrets seal DIR' seals them there"
        )


def _print_changes(plan: Plan) -> None:
    for how, what in plan.changes:
        say(f"{how:<10} {what}")


def _as_json(plan: Plan) -> dict[str, Any]:
    return {
        "revision": plan.revision.number if plan.revision else None,
        "changes": [{"how": how, "what": what} for how, what in plan.changes],
        "agents_sealed": sorted(plan.seal),
    }


def _lines(tree: Tree, there: Published) -> list[str]:
    import difflib

    from holdfast.names import settings_file_key

    lines: list[str] = []
    for name in sorted(set(tree.files) | set(there.manifest.files)):
        entry, source = there.manifest.files.get(name), tree.files.get(name)
        old = there.contents.get(settings_file_key(entry.sha256), b"").decode() if entry else ""
        new = source.text if source else ""
        sides = (f"published/{name}.yaml", f"folder/{name}.yaml")
        both = old.splitlines(), new.splitlines()
        lines += difflib.unified_diff(*both, *sides, lineterm="", n=2)
    return lines
