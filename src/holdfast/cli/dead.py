"""`holdfast dead`: list, show, replay and drop dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.common import (
    BeforeOption,
    Cli,
    DryRunOption,
    GroupOption,
    JobOption,
    LimitOption,
    SinceOption,
    YesOption,
    block,
    clock_time,
    confirm_action,
    connected,
    emit,
    given,
    instant,
    note,
    operating,
    pairs,
    say,
    shortened,
    table,
)
from holdfast.status import actions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.client import Client
    from holdfast.status.dead import (
        Body,
        DeadFilter,
        DeadLetter,
        Replayed,
        Selection,
    )

REFUSED = 1

Ids = Annotated[
    list[int] | None,
    typer.Argument(metavar="ID", help="Ids of dead letters; or use the filters."),
]
Reason = Annotated[
    str,
    typer.Option(
        "--reason",
        metavar="REASON",
        help="Only letters with this reason, e.g. failed, timeout, lost or gone.",
    ),
]
Error = Annotated[
    str, typer.Option("--error", metavar="TEXT", help="Only errors that contain TEXT.")
]
All = Annotated[bool, typer.Option("--all", help="Every dead letter.")]
Most = Annotated[int, typer.Option("--limit", metavar="N", help="Take at most N.", min=1)]


def register(app: Cli) -> None:
    """Add `holdfast dead`."""
    dead = app.noun("dead", "Look at dead letters, send them again, drop them.")
    dead.command("list")(list_letters)
    dead.command("show")(show)
    dead.command("replay", help=f"{actions.replay_dead.doc} Exit code 1 if one is refused.")(replay)
    dead.command("drop", help=actions.drop_dead.doc)(drop)


def _filter(
    client: Client,
    job: str,
    group: str,
    reason: str,
    error: str,
    since: str | None,
    before: str | None,
) -> DeadFilter:
    from holdfast.status.dead import DeadFilter

    return DeadFilter(
        job,
        group,
        reason,
        error,
        since=instant(since, client, "--since"),
        before=instant(before, client, "--before"),
    )


async def list_letters(
    job: JobOption = "",
    group: GroupOption = "",
    reason: Reason = "",
    error: Error = "",
    since: SinceOption = None,
    before: BeforeOption = None,
    limit: LimitOption = 50,
) -> None:
    """List dead letters, the newest first."""
    from holdfast.status.dead import DeadLetters

    async with connected() as client:
        wanted = _filter(client, job, group, reason, error, since, before)
        found = await DeadLetters(client).list(wanted, limit)
    if given().json:
        emit(found)
        return
    table(
        ("id", "run", "group", "job", "reason", "since (UTC)", "error"),
        [
            (d.id, d.run, d.group, d.job, d.reason, clock_time(d.at), shortened(d.error))
            for d in found
        ],
        empty="no dead letters found",
    )


async def show(id: Annotated[int, typer.Argument(metavar="ID", help="The letter's id.")]) -> None:
    """Show a dead letter: its attempts, headers and body."""
    from holdfast.status.dead import DeadLetters, as_text

    async with connected() as client:
        letters = DeadLetters(client)
        letter = await letters.show(id)
        body = as_text(await letters.body(id))
    if given().json:
        emit({"letter": letter, "body": body})
    else:
        _print_letter(letter, body)


def _print_letter(letter: DeadLetter, body: Body) -> None:
    pairs(
        [
            ("id", letter.id),
            ("run", letter.run),
            ("job", letter.job),
            ("group", letter.group),
            ("reason", letter.reason),
            ("error", letter.error),
            ("since", clock_time(letter.at)),
            ("failures", letter.failures),
            ("crashes", letter.crashes),
            ("came from", letter.subject),
            *((f"header {name}", value) for name, value in letter.headers.items()),
        ]
    )
    for attempt in letter.attempts:
        outcome = f"{attempt.outcome or ''} {attempt.error}".strip()
        say(f"attempt {attempt.number} on {attempt.node}, {clock_time(attempt.ended)}: {outcome}")
    if letter.traceback:
        block("\n" + letter.traceback.rstrip())
    block(f"\nbody ({body.encoding}):")
    block(body.text)


async def replay(
    ids: Ids = None,
    job: JobOption = "",
    group: GroupOption = "",
    reason: Reason = "",
    error: Error = "",
    since: SinceOption = None,
    before: BeforeOption = None,
    all_: All = False,
    dry_run: DryRunOption = False,
    rate: Annotated[
        float,
        typer.Option("--rate", metavar="N", help="Send at most N per second; 0: no limit.", min=0),
    ] = 0,
    limit: Most = actions.SELECT_MOST,
    yes: YesOption = False,
) -> None:
    async with operating() as by:
        wanted = _filter(by.client, job, group, reason, error, since, before)
        chosen = _selection(ids, wanted, all_)
        if not (yes or dry_run or (ids and len(ids) == 1)):
            chosen = await _confirmed(actions.replay_dead, by, chosen, limit)
        done = await actions.replay_dead(by, chosen, dry_run=dry_run, rate=rate, limit=limit)
    _report(done)


async def drop(
    ids: Ids = None,
    job: JobOption = "",
    group: GroupOption = "",
    reason: Reason = "",
    error: Error = "",
    since: SinceOption = None,
    before: BeforeOption = None,
    all_: All = False,
    dry_run: DryRunOption = False,
    limit: Most = actions.SELECT_MOST,
    yes: YesOption = False,
) -> None:
    async with operating() as by:
        wanted = _filter(by.client, job, group, reason, error, since, before)
        chosen = _selection(ids, wanted, all_)
        if not (yes or dry_run):
            chosen = await _confirmed(actions.drop_dead, by, chosen, limit)
        done = await actions.drop_dead(by, chosen, dry_run=dry_run, limit=limit)
    _report(done)


def _selection(ids: list[int] | None, wanted: DeadFilter, everything: bool) -> Selection:
    from holdfast.status.dead import DeadFilter

    filtered = wanted != DeadFilter()
    if bool(ids) + filtered + everything != 1:
        raise typer.BadParameter("name ids, or filters, or --all (one of the three)")
    return ids or wanted


async def _confirmed(
    action: actions.Action[..., Any], by: actions.Operator, chosen: Selection, limit: int
) -> Selection:
    """Confirm exactly the letters that are then acted on."""
    found = [letter.id for letter in await by.dead.select(chosen, limit)]
    if found:
        await confirm_action(action, by, found)
    return found


def _report(done: Sequence[Replayed]) -> None:
    if given().json:
        emit(done)
    else:
        table(
            ("id", "run", "job", "result", "why"),
            [(d.id, d.run, d.job, d.result, d.why) for d in done],
            empty="no dead letters found",
        )
        counts = {d.result for d in done}
        note(", ".join(f"{sum(d.result == c for d in done)} {c}" for c in sorted(counts)))
    if any(d.result == "refused" for d in done):
        raise typer.Exit(REFUSED)
