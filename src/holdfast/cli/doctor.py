"""`holdfast doctor`: is this server, and this namespace on it, fit for production?

`holdfast unreadable` lists and removes the records that no process can read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli import out
from holdfast.cli.command import command, log_to_stderr, operating
from holdfast.cli.options import YesOption, argument, connection_given, option
from holdfast.status import fleet_actions as actions
from holdfast.status.operators import Operator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.config import ConnectionConfig, RecordConfig
    from holdfast.status.probes import Finding

MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}
COLOURS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}


@command("doctor")
async def doctor(
    monitor_url: Annotated[
        list[str] | None,
        option(
            "A server's monitor (http://host:8222), to check how it syncs; may be repeated.", "URL"
        ),
    ] = None,
    fix: Annotated[bool, option("Correct drifted streams and repair stranded runs.")] = False,
    yes: YesOption = False,
) -> None:
    """Check whether server and namespace are fit for production, and say what to do.

    Exit codes: 0 when nothing failed (warnings are allowed), 1 when something did.
    """
    import logging

    from holdfast.config import ConnectionConfig, LivenessConfig, RecordConfig, load
    from holdfast.status.doctor import examine

    log_to_stderr()
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)  # refusals become findings
    connection = load(ConnectionConfig, **connection_given())
    records = load(RecordConfig)
    if fix:
        await _fix(connection, records, yes)
    found = await examine(connection, records, monitor_url or (), load(LivenessConfig))
    if not out.as_json(found):
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
            out.note(f"will change {one}")
        finder, cases = stranded(client), []
        try:
            await client.topology.measure_clock()
            cases = await finder.look()
        except NotFound:
            out.note("runs are not checked: streams are missing")
        for case in cases:
            out.note(f"will repair run {case.run}, whose message is gone")
        by = Operator(client)
        leaked = await by.limits.leaked()
        for place in leaked:
            out.note(f"will free the place of a run that is over ({place})")
        if not planned and not cases and not leaked:
            out.note("nothing to fix")
            return
        if not yes:
            streams = len({one.stream for one in planned})
            count = len(cases) + len(leaked)
            out.confirm(f"Change {streams} streams and repair {count} runs?")
        changed, repaired = await actions.fix(by, finder, cases)
        if changed:
            out.note(f"changed {', '.join(changed)}")
        for run, what in repaired.items():
            out.note(f"run {run}: {what}")


def _show(found: Sequence[Finding]) -> None:
    width = max(len(one.check) for one in found)
    for one in found:
        text = f"{MARKS[one.level]}  {one.check.ljust(width)}  {one.text}"
        out.say(text, colour=(len(MARKS[one.level]), COLOURS[one.level]))
        if one.todo:
            out.say(f"{' ' * (width + 8)}-> {one.todo}")
    failed = sum(one.level == "fail" for one in found)
    warned = sum(one.level == "warn" for one in found)
    out.say(f"{failed} failed, {warned} warnings, {len(found) - failed - warned} ok")


# ---- unreadable records


@command("unreadable list")
async def list_unreadable() -> None:
    """List the records that cannot be read: where they are, and why."""
    async with operating() as by:
        found = await by.unreadable.list()
    out.listing(
        found,
        "bucket",
        "key",
        ("stored", lambda one: out.clock_time(one.stored)),
        ("bytes", lambda one: one.size),
        ("why", lambda one: one.reason),
        empty="every record can be read",
    )


@command("unreadable remove")
async def remove(
    bucket: Annotated[str, argument("The bucket, as `unreadable list` shows it.", "BUCKET")],
    key: Annotated[str, argument("The record's key, or its number in the ledger.", "KEY")],
    yes: YesOption = False,
) -> None:
    """Remove one record that cannot be read.

    Records that can be read are refused: use the command of their kind. A record of a newer version
    is better left to the processes of that version.
    """
    async with operating() as by:
        if not yes:
            await out.confirm_action(actions.remove_unreadable, by, bucket, key)
        await actions.remove_unreadable(by, bucket, key)
    out.result({"bucket": bucket, "key": key, "removed": True}, f"removed {bucket}/{key}")
