"""`holdfast backup` and `holdfast restore`: everything that a namespace keeps on the server."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import (
    Cli,
    connected,
    connection_given,
    emit,
    given,
    log_to_stderr,
    note,
    say,
)
from holdfast.status import actions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.broker import Broker

FolderArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of the backup.", file_okay=False)
]


def register(app: Cli) -> None:
    """Add `holdfast backup` and `holdfast restore`."""
    app.command("backup")(backup)
    app.command("restore")(restore)


async def backup(folder: FolderArgument) -> None:
    """Write every stream and bucket of the namespace into a new folder; nothing has to stop.

    It needs a login of the role 'backup'. Keep the folder private: it holds every payload
    and result.
    """
    from holdfast.cli.snapshots import save, streams_of
    from holdfast.errors import ConfigError

    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{str(folder)!r} is not empty: use a new folder for each backup")
    saved: dict[str, int] = {}
    with _as_backup():
        async with connected() as client:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for stream in await streams_of(client.broker):
                saved[stream] = (await save(client.broker, stream, folder)).messages
                note(f"{stream}: {saved[stream]} messages")
    _tell("saved", folder, saved)


async def restore(
    folder: FolderArgument,
    missing: Annotated[
        bool,
        typer.Option("--missing", help="Restore only streams that do not exist."),
    ] = False,
    epochs_above: Annotated[
        int,
        typer.Option(
            metavar="EPOCH",
            help="Continue above EPOCH, the highest that your stores have seen.",
        ),
    ] = 0,
) -> None:
    """Make the streams and buckets of a backup on a server that does not have them.

    Stop workers and control services first. It needs a login of the role 'backup'. Replicas are as
    many as the servers here allow, up to three, or HOLDFAST_REPLICAS.
    """
    from holdfast.broker import Broker
    from holdfast.broker.streams import Topology
    from holdfast.cli.snapshots import load, raise_epochs
    from holdfast.client import Client
    from holdfast.config import ConnectionConfig, RecordConfig
    from holdfast.config import load as configured

    log_to_stderr()
    connection = configured(ConnectionConfig, **connection_given())
    with _as_backup():
        async with Broker(connection, name="holdfast restore") as broker:
            wanted = await _to_restore(broker, folder, missing)
            replicas = await Topology(broker, configured(RecordConfig)).wanted_replicas()

            async def load_one(stream: str) -> int:
                count = await load(broker, stream, folder, replicas)
                note(f"{stream}: {count} messages")
                return count

            by = actions.Operator(Client(broker, configured(RecordConfig)))
            made = await actions.restore(by, wanted, load_one)
            if epochs_above:
                note(f"the next epoch is above {await raise_epochs(broker, epochs_above)}")
            await _reconcile(broker)
    _tell("restored", folder, made)


@contextlib.contextmanager
def _as_backup() -> Iterator[None]:
    """When the login is refused, say which one is needed."""
    from holdfast.errors import PermissionDenied

    try:
        yield
    except PermissionDenied as error:
        raise PermissionDenied(
            f"this login may not take or restore snapshots ({error}). Issue one for it with "
            "'holdfast auth user backup', let the servers take it, and name its file with "
            "--credentials; take it back afterwards with 'holdfast auth revoke backup'"
        ) from None


async def _reconcile(broker: Broker) -> None:
    """Repair runs whose message is not in the restored queue; say what could not be repaired."""
    from collections import Counter

    from holdfast.client import Client
    from holdfast.config import RecordConfig
    from holdfast.config import load as configured
    from holdfast.errors import NotFound, PermissionDenied
    from holdfast.status.stranded import Stranded, repair_all

    async def alive(_: str) -> bool:
        return False  # the holders were nodes of another server

    client = Client(broker, configured(RecordConfig))
    try:
        await client.topology.measure_clock()
        stranded = Stranded(client, alive)
        done = await repair_all(stranded, await stranded.look(quiet=0.0))
    except NotFound:
        return  # without runs or a queue there is nothing to compare
    except PermissionDenied:
        note("records and queue are compared by the first coordinator: this login may not do it")
        return
    for what, count in Counter(done.values()).most_common():
        note(f"{count} runs waited for a message that the backup does not have: {what}")


async def _to_restore(broker: Broker, folder: Path, missing: bool) -> list[str]:
    from holdfast.cli.snapshots import in_folder, streams_of
    from holdfast.errors import ConfigError, Conflict

    saved = in_folder(broker.names, folder)
    if not saved:
        raise ConfigError(
            f"{str(folder)!r} holds no backup of the namespace {broker.names.namespace!r}: name "
            "the folder of 'holdfast backup', or the namespace with --namespace"
        )
    there = set(await streams_of(broker))
    if there & saved.keys() and not missing:
        raise Conflict(
            f"{', '.join(sorted(there & saved.keys()))} are on this server, and nothing is "
            "overwritten: restore into an empty one, or restore the others with --missing"
        )
    return [stream for stream in saved if stream not in there]


def _tell(what: str, folder: Path, streams: dict[str, int]) -> None:
    if given().json:
        emit({"folder": str(folder), "streams": streams})
    else:
        total = sum(streams.values())
        say(f"{what} {len(streams)} streams with {total} messages: {folder}")
