"""`holdfast unreadable`: records that no process can read, and removing them."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.common import (
    Cli,
    YesOption,
    clock_time,
    confirm_action,
    connected,
    emit,
    given,
    operating,
    say,
    table,
)
from holdfast.status import actions

BucketArgument = Annotated[
    str, typer.Argument(metavar="BUCKET", help="The bucket, as `unreadable list` shows it.")
]
KeyArgument = Annotated[
    str, typer.Argument(metavar="KEY", help="The record's key, or its number in the ledger.")
]


def register(app: Cli) -> None:
    """Add `holdfast unreadable`."""
    unreadable = app.noun("unreadable", "Find and remove records that cannot be read.")
    unreadable.command("list")(list_unreadable)
    unreadable.command("remove")(remove)


async def list_unreadable() -> None:
    """List the records that cannot be read: where they are, and why."""
    from holdfast.status.unreadable import UnreadableRecords

    async with connected() as client:
        found = await UnreadableRecords(client).list()
    if given().json:
        emit(found)
        return
    table(
        ("bucket", "key", "stored", "bytes", "why"),
        [(d.bucket, d.key, clock_time(d.stored), d.size, d.reason) for d in found],
        empty="every record can be read",
    )


async def remove(bucket: BucketArgument, key: KeyArgument, yes: YesOption = False) -> None:
    """Remove one record that cannot be read.

    Records that can be read are refused: use the command of their kind. A record of a newer version
    is better left to the processes of that version.
    """
    async with operating() as by:
        if not yes:
            await confirm_action(actions.remove_unreadable, by, bucket, key)
        await actions.remove_unreadable(by, bucket, key)
    say(f"removed {bucket}/{key}")
