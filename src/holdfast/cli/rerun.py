"""`holdfast runs cancel`, `retry`, `edit` and `copy`: stop runs, or send them once more.

Many runs are chosen by filters, shown, confirmed, and acted on with a progress bar. Each is acted
on and audited by itself: one that cannot be found, or has ended meanwhile, is refused, and the
others are done.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from holdfast.cli import out
from holdfast.cli.command import command, operating, with_options
from holdfast.cli.options import (
    RUN_FILTERS,
    DryRunOption,
    MostOption,
    RunArgument,
    YesOption,
    argument,
    option,
)
from holdfast.cli.typed import edited, read_payload, run_filter
from holdfast.errors import HoldfastError, InvalidInput, RunError
from holdfast.status import actions
from holdfast.status.operators import Operator

if TYPE_CHECKING:
    from holdfast.status.finding import Found
    from holdfast.status.listing import RunFilter, RunInfo

TAKEN: Final = 1_000
"""How many runs one command acts on by default."""
SHOWN: Final = 10
"""Runs listed before the question: enough to recognise a wrong filter."""
AT_ONCE: Final = 20
"""Runs acted on at a time: hides the round trips without flooding the server."""
REFUSED: Final = 1
"""Exit code if at least one run was refused or had already ended."""

Act = Callable[[Operator, str], Awaitable[tuple[bool, str]]]
"""Acts on one run; returns whether that had an effect, and a note about it."""

SomeRuns = Annotated[list[str] | None, argument("Ids of runs; or use the filters.", "RUN", "runs")]


@command("runs cancel", help=actions.cancel_run.doc)
@with_options("filters", RUN_FILTERS)
async def cancel(
    filters: dict[str, Any],
    runs: SomeRuns = None,
    limit: MostOption = TAKEN,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    from holdfast.status.listing import CANCELLABLE

    async with operating() as by:
        wanted = run_filter(by.client, **filters)
        if runs and len(runs) == 1 and not dry_run:
            done, _ = await _cancel(by, runs[0])
            if not out.as_json({"run": runs[0], "cancelled": done}) and done:
                out.say(f"{runs[0]} is cancelled")
            if not done:
                out.note(f"{runs[0]} had ended already")
                raise typer.Exit(REFUSED)
            return
        found = await _chosen(by, runs, wanted, CANCELLABLE, limit)
        await _act_on_many(by, found, "cancel", _cancel, dry_run=dry_run, yes=yes)


async def _cancel(by: Operator, run: str) -> tuple[bool, str]:
    done = await actions.cancel_run(by, run)
    return done, "cancelled" if done else "had ended already"


@command("runs retry", help=actions.retry_run.doc)
@with_options("filters", RUN_FILTERS)
async def retry(
    filters: dict[str, Any],
    runs: SomeRuns = None,
    limit: MostOption = TAKEN,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    from holdfast.status.listing import SENT_AGAIN

    async with operating() as by:
        wanted = run_filter(by.client, **filters)
        if runs and len(runs) == 1 and not dry_run:
            done = await actions.retry_run(by, runs[0])
            out.result({"run": runs[0], "retried": True, "detail": done}, f"{runs[0]}: {done}")
            return
        found = await _chosen(by, runs, wanted, SENT_AGAIN, limit)
        await _act_on_many(by, found, "retry", _retry, dry_run=dry_run, yes=yes)


async def _retry(by: Operator, run: str) -> tuple[bool, str]:
    return True, await actions.retry_run(by, run)


# ---- many runs


async def _chosen(
    by: Operator, runs: Sequence[str] | None, wanted: RunFilter, states: Sequence[str], limit: int
) -> list[RunInfo]:
    """The named runs, or those that match and are in one of these states, the most recently changed
    first."""
    from dataclasses import replace

    from holdfast.status.listing import RunFilter, RunInfo

    if bool(runs) == (wanted != RunFilter()):
        raise typer.BadParameter("name runs, or filters (one of the two)")
    if wanted.state and wanted.state not in states:
        raise InvalidInput(f"--state is one of {', '.join(states)} here")
    found: dict[str, RunInfo] = {}
    for run in runs or ():
        try:
            found[run] = (await by.runs.show(run)).info
        except RunError:  # acting on it says why
            found[run] = RunInfo(run, "unknown", "", "", 0.0)
    for state in () if runs else (wanted.state,) if wanted.state else states:
        left = limit + 1 - len(found)
        for info in await by.runs.list(replace(wanted, state=state), left) if left else ():
            found.setdefault(info.run, info)
    if len(found) > limit:
        out.note(f"more than {limit:,} match: this takes {limit:,}; repeat it, or raise --limit")
    return list(found.values())[:limit]


async def _act_on_many(
    by: Operator, found: Sequence[RunInfo], verb: str, act: Act, *, dry_run: bool, yes: bool
) -> None:
    """Show the runs, ask, act on each, and report; exit code 1 if one was refused."""
    if dry_run or not found:
        _report([(run, f"would {verb}") for run in found])
        return
    if not yes:
        for run in found[:SHOWN]:
            out.note(f"{run.run}  {run.state}")
        if len(found) > SHOWN:
            out.note(f"… and {len(found) - SHOWN} more")
        out.confirm(f"{verb.capitalize()} {len(found)} run{'s' if len(found) > 1 else ''}?")
    refused = 0
    with out.ProgressList[tuple[Any, str]](len(found), verb) as done:
        for n in range(0, len(found), AT_ONCE):
            part = found[n : n + AT_ONCE]
            outcomes = await asyncio.gather(*(_one(by, act, run) for run in part))
            for run, (well, why) in zip(part, outcomes, strict=True):
                refused += not well
                done.append((run, why))
    _report(done)
    out.note(f"{len(found) - refused} done, {refused} refused")
    if refused:
        raise typer.Exit(REFUSED)


async def _one(by: Operator, act: Act, run: RunInfo) -> tuple[bool, str]:
    try:
        return await act(by, run.run)
    except HoldfastError as error:
        return False, str(error)


def _report(done: list[tuple[RunInfo, str]]) -> None:
    rows = [{"run": r.run, "job": r.job, "was": r.state, "result": why} for r, why in done]
    if not out.as_json(rows):
        table = [(run.run, run.group, run.job, run.state, why) for run, why in done]
        out.table(("run", "group", "job", "was", "result"), table, empty="no runs found")


# ---- one run, changed or elsewhere


@command("runs copy")
async def copy(
    run: RunArgument,
    form: Annotated[
        Literal["cli", "python", "curl", "payload"],
        option(
            "What to print: a command, a Python program, a curl line, or the payload alone.",
            None,
            "--as",
        ),
    ] = "cli",
    url: Annotated[
        str, option("Address of 'holdfast web', for curl.", "URL")
    ] = "http://127.0.0.1:8080",
) -> None:
    """Print a command or program that sends this run's payload again, elsewhere or changed.

    It is a new run. If the job computes its key, it replaces the run of that key.
    """
    from holdfast.status.copies import copies_of

    async with operating() as by:
        found = await copies_of(by.client, await by.runs.find(run), url.rstrip("/"))
    if not out.as_json(found):
        out.block(str(getattr(found, form)))


@command("runs edit")
async def edit(
    run: RunArgument,
    payload: Annotated[
        str | None,
        option("The new payload; without it, $EDITOR opens.", "JSON|@FILE|-", show_default=False),
    ] = None,
) -> None:
    """Run an ended run with another payload: edit the old one in $EDITOR; saving sends it.

    A dead run is sent again under its id; any other becomes a new run, unless its job computes
    its key.
    """
    async with operating() as by:
        found = await by.runs.find(run)
        if payload is not None:
            body = read_payload(payload)
            await by.jobs.check(found.job, found.group, body)
        else:
            body = await _by_hand(by, found)
        done = await actions.retry_run(by, found.run, body)
    out.result({"run": found.run, "detail": done}, f"{found.run}: {done}")


async def _by_hand(by: Operator, found: Found) -> bytes:
    """The payload from the editor, which opens again as long as it does not fit the job."""
    before = text = await _shown(by, found)
    while True:
        text = edited(text, "payload.json")
        if text.strip() == before.strip():
            raise InvalidInput(
                f"nothing was changed, and nothing was sent: 'holdfast runs retry {found.run}' "
                "runs it with the same payload"
            )
        try:
            body = read_payload(text.strip()) if text.strip() else b""
            await by.jobs.check(found.job, found.group, body)
        except InvalidInput as error:
            if not sys.stdin.isatty():
                raise
            out.note(str(error))
            typer.confirm("Edit it again?", default=True, abort=True, err=True)
        else:
            return body


async def _shown(by: Operator, found: Found) -> str:
    """The payload as text for the editor."""
    import msgspec

    from holdfast.status.finding import payload_of

    kept = await payload_of(by.client, found)
    missing = "" if kept else "not kept"
    try:
        if kept:
            return msgspec.json.format(kept[0], indent=2).decode() + "\n" if kept[0].strip() else ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        missing = "not JSON"
    raise RunError(
        f"run {found.run}: its payload is {missing}: pass a whole new one with --payload",
        run=found.run,
    )
