"""`holdfast dead`: list, show, replay and drop dead letters."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli import out
from holdfast.cli.command import command, operating, with_options
from holdfast.cli.options import (
    BeforeOption,
    DryRunOption,
    GroupOption,
    JobOption,
    LimitOption,
    MostOption,
    SinceOption,
    YesOption,
    argument,
    option,
)
from holdfast.cli.typed import instant
from holdfast.status import actions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.status.dead import Body, DeadFilter, DeadLetter, Replayed, Selection
    from holdfast.status.listing import RunInfo
    from holdfast.status.operators import Operator

REFUSED = 1  # exit code if at least one letter was refused
WAITING_SHOWN = 50
"""Failed runs counted for a hint: more do not change what it says."""

Ids = Annotated[
    list[int] | None, argument("Ids of dead letters; or use the filters.", "ID", "dead")
]
All = Annotated[bool, option("Every dead letter.")]
FILTERS: dict[str, Any] = {
    "job": JobOption,
    "group": GroupOption,
    "reason": Annotated[
        str, option("Only letters with this reason, e.g. failed, timeout, lost or gone.", "REASON")
    ],
    "error": Annotated[str, option("Only errors that contain TEXT.", "TEXT")],
    "since": SinceOption,
    "before": BeforeOption,
}
"""Which dead letters a command is about."""


def _filter(
    by: Operator,
    job: str,
    group: str,
    reason: str,
    error: str,
    since: str | None,
    before: str | None,
) -> DeadFilter:
    from holdfast.status.dead import DeadFilter

    after, until = instant(since, by.client, "--since"), instant(before, by.client, "--before")
    return DeadFilter(job, group, reason, error, since=after, before=until)


@command("dead list")
@with_options("filters", FILTERS)
async def list_letters(
    filters: dict[str, Any],
    limit: LimitOption = 50,
) -> None:
    """List dead letters, the newest first."""
    from holdfast.status.listing import RunFilter

    async with operating() as by:
        wanted = _filter(by, **filters)
        found = await by.dead.list(wanted, limit)
        # They become dead letters if the next attempt fails too.
        failed = RunFilter(wanted.job, wanted.group, "failed")
        waiting = [] if found else await by.runs.list(failed, WAITING_SHOWN)
    out.listing(
        found,
        "id",
        "run",
        "group",
        "job",
        "reason",
        ("since (UTC)", lambda letter: out.clock_time(letter.at)),
        ("error", lambda letter: out.shortened(letter.error)),
        empty="no dead letters found" + _told_waiting(waiting),
    )


def _told_waiting(runs: Sequence[RunInfo]) -> str:
    if not runs:
        return ""
    first = min(runs, key=lambda run: run.due)
    count = f"{len(runs)}{' or more' if len(runs) == WAITING_SHOWN else ''}"
    return (
        f"; {count} failed so far and wait for their next attempt, {first.run} until "
        f"{out.clock_time(first.due)} UTC: holdfast runs list --state failed"
    )


@command("dead show")
async def show(id: Annotated[int, argument("The letter's id.", "ID", "dead")]) -> None:
    """Show a dead letter: its attempts, headers and body."""
    from holdfast.status.dead import as_text

    async with operating() as by:
        letter = await by.dead.show(id)
        body = as_text(await by.dead.body(id))
    if not out.as_json({"letter": letter, "body": body}):
        _print_letter(letter, body)


def _print_letter(letter: DeadLetter, body: Body) -> None:
    out.pairs(
        [
            ("id", letter.id),
            ("run", letter.run),
            ("job", letter.job),
            ("group", letter.group),
            ("reason", letter.reason),
            ("error", letter.error),
            ("since", out.clock_time(letter.at)),
            ("failures", letter.failures),
            ("crashes", letter.crashes),
            ("came from", letter.subject),
            *((f"header {name}", value) for name, value in letter.headers.items()),
        ]
    )
    for attempt in letter.attempts:
        outcome = f"{attempt.outcome or ''} {attempt.error}".strip()
        ended = out.clock_time(attempt.ended)
        out.say(f"attempt {attempt.number} on {attempt.node}, {ended}: {outcome}")
    if letter.traceback:
        out.block("\n" + letter.traceback.rstrip())
    out.block(f"\nbody ({body.encoding}):")
    out.block(body.text)


@command("dead replay", help=f"{actions.replay_dead.doc} Exit code 1 if one is refused.")
@with_options("filters", FILTERS)
async def replay(
    filters: dict[str, Any],
    ids: Ids = None,
    all_: All = False,
    dry_run: DryRunOption = False,
    rate: Annotated[float, option("Send at most N per second; 0: no limit.", "N", min=0)] = 0,
    limit: MostOption = actions.SELECT_MOST,
    yes: YesOption = False,
) -> None:
    async with operating() as by:
        wanted = _filter(by, **filters)
        chosen = _selection(ids, wanted, all_)
        chosen = [letter.id for letter in await by.dead.select(chosen, limit)]
        if chosen and not (yes or dry_run or (ids and len(ids) == 1)):
            await out.confirm_action(actions.replay_dead, by, chosen)
        with out.ProgressList[Any](0 if dry_run else len(chosen), "replaying") as done:
            await actions.replay_dead(
                by, chosen, dry_run=dry_run, rate=rate, limit=limit, done=done
            )
    _report(done)


@command("dead drop", help=actions.drop_dead.doc)
@with_options("filters", FILTERS)
async def drop(
    filters: dict[str, Any],
    ids: Ids = None,
    all_: All = False,
    dry_run: DryRunOption = False,
    limit: MostOption = actions.SELECT_MOST,
    yes: YesOption = False,
) -> None:
    async with operating() as by:
        wanted = _filter(by, **filters)
        chosen = _selection(ids, wanted, all_)
        if not (yes or dry_run):
            chosen = [letter.id for letter in await by.dead.select(chosen, limit)]
            await out.confirm_action(actions.drop_dead, by, chosen)
        done = await actions.drop_dead(by, chosen, dry_run=dry_run, limit=limit)
    _report(done)


def _selection(ids: list[int] | None, wanted: DeadFilter, everything: bool) -> Selection:
    from holdfast.status.dead import DeadFilter

    filtered = wanted != DeadFilter()
    if bool(ids) + filtered + everything != 1:
        raise typer.BadParameter("name ids, or filters, or --all (one of the three)")
    return ids or wanted


def _report(done: Sequence[Replayed]) -> None:
    out.listing(done, "id", "run", "job", "result", "why", empty="no dead letters found")
    if counts := Counter(d.result for d in done):
        out.note(", ".join(f"{count} {result}" for result, count in sorted(counts.items())))
    if any(d.result == "refused" for d in done):
        raise typer.Exit(REFUSED)
