"""`holdfast doctor`: is this server, and this namespace on it, fit for production?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import (
    Cli,
    YesOption,
    confirm,
    connection_given,
    emit,
    given,
    note,
    say,
)
from holdfast.status import actions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.config import ConnectionConfig, RecordConfig
    from holdfast.status.probes import Finding

MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}
COLOURS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}


def register(app: Cli) -> None:
    """Add `holdfast doctor`."""
    app.command("doctor")(doctor)


async def doctor(
    monitor_url: Annotated[
        list[str] | None,
        typer.Option(
            "--monitor-url",
            metavar="URL",
            help="A server's monitor (http://host:8222), to see how it syncs; may be repeated.",
        ),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Correct drifted streams and repair stranded runs.")
    ] = False,
    yes: YesOption = False,
) -> None:
    """Check what production needs, and say what to do.

    Exit codes: 0 when nothing failed (warnings are allowed), 1 when something did.
    """
    import logging

    from holdfast.cli.common import log_to_stderr
    from holdfast.config import ConnectionConfig, LivenessConfig, RecordConfig, load
    from holdfast.status.doctor import examine

    log_to_stderr()
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)  # refusals become findings
    connection = load(ConnectionConfig, **connection_given())
    records = load(RecordConfig)
    if fix:
        await _fix(connection, records, yes)
    found = await examine(connection, records, monitor_url or (), load(LivenessConfig))
    if given().json:
        emit(found)
    else:
        _show(found)
    raise typer.Exit(1 if any(one.level == "fail" for one in found) else 0)


async def _fix(connection: ConnectionConfig, records: RecordConfig, yes: bool) -> None:
    from holdfast.broker import Broker
    from holdfast.client import Client
    from holdfast.errors import NotFound
    from holdfast.status.checks import is_safe, stranded

    async with Broker(connection, name="holdfast doctor") as broker:
        client = Client(broker, records)
        planned = [one for one in await client.topology.differences() if is_safe(one)]
        for one in planned:
            note(f"will change {one}")
        finder, cases = stranded(client), []
        try:
            await client.topology.measure_clock()
            cases = await finder.look()
        except NotFound:
            note("runs are not checked: streams are missing")
        for case in cases:
            note(f"will repair run {case.run}, whose message is gone")
        if not planned and not cases:
            note("nothing to fix")
            return
        if not yes:
            streams = len({one.stream for one in planned})
            confirm(f"Change {streams} streams and repair {len(cases)} runs?")
        changed, repaired = await actions.fix(actions.Operator(client), finder, cases)
        if changed:
            note(f"changed {', '.join(changed)}")
        for run, what in repaired.items():
            note(f"run {run}: {what}")


def _show(found: Sequence[Finding]) -> None:
    width = max(len(one.check) for one in found)
    for one in found:
        text = f"{MARKS[one.level]}  {one.check.ljust(width)}  {one.text}"
        say(text, colour=(len(MARKS[one.level]), COLOURS[one.level]))
        if one.todo:
            say(f"{' ' * (width + 8)}-> {one.todo}")
    failed = sum(one.level == "fail" for one in found)
    warned = sum(one.level == "warn" for one in found)
    say(f"{failed} failed, {warned} warnings, {len(found) - failed - warned} ok")
