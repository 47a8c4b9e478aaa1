"""`holdfast backup` and `holdfast restore`: everything that a namespace keeps on the server."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from holdfast.cli import out
from holdfast.cli.command import command, connected, log_to_stderr
from holdfast.cli.options import argument, connection_given, option
from holdfast.status import fleet_actions as actions
from holdfast.status.operators import Operator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.broker import Broker
    from holdfast.config import ConnectionConfig

PlaceArgument = Annotated[
    str, argument("A folder, or an object store: s3://BUCKET/PREFIX?endpoint=https://…", "PLACE")
]


@command("backup")
async def backup(
    place: PlaceArgument,
    keep: Annotated[
        int, option("In an object store: then delete all but the newest N.", "N", min=0)
    ] = 0,
) -> None:
    """Write every stream and bucket of the namespace to a new folder; nothing has to be stopped.

    In an object store, each backup has its own folder, named by the time; OBJECTS_KEY and
    OBJECTS_SECRET give access. It needs a login of the role 'snapshot' or 'backup'. Keep backups
    private: they hold every payload and result.
    """
    from holdfast.errors import ConfigError
    from holdfast.integrations.backups import SCHEME, BackupStore, check_place

    check_place(place)
    if not place.startswith(SCHEME):
        if keep:
            raise ConfigError("--keep is for backups in an object store")
        _tell("saved", place, await _save(_new_folder(place)))
        return
    store = BackupStore(place)
    with tempfile.TemporaryDirectory(prefix="holdfast-backup-") as temporary:
        saved = await _save(Path(temporary))
        name = await asyncio.to_thread(store.upload, Path(temporary), saved)
    for old in await asyncio.to_thread(store.keep, keep) if keep else []:
        out.note(f"deleted {old}")
    _tell("saved", name, saved)


def _new_folder(place: str) -> Path:
    from holdfast.errors import ConfigError

    folder = Path(place)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{place!r} is not empty: use a new folder for each backup")
    return folder


async def _save(folder: Path) -> dict[str, int]:
    from holdfast.broker.snapshots import save, streams_of

    saved: dict[str, int] = {}
    with _as_backup():
        async with connected() as client:
            await asyncio.to_thread(folder.mkdir, 0o700, parents=True, exist_ok=True)
            for stream in await streams_of(client.broker):
                saved[stream] = (await save(client.broker, stream, folder)).messages
                out.note(f"{stream}: {saved[stream]} messages")
    return saved


@command("restore")
async def restore(
    place: PlaceArgument,
    missing: Annotated[bool, option("Restore only streams that do not exist.")] = False,
    epochs_above: Annotated[
        int, option("Continue above EPOCH, the highest that your stores have seen.", "EPOCH")
    ] = 0,
    drill: Annotated[
        bool, option("Rehearse: restore into a temporary server, then discard it.")
    ] = False,
) -> None:
    """Restore the streams and buckets of a backup to a server that lacks them.

    In an object store, it restores the newest backup unless the address ends with the name of one.
    Stop workers and control services first. It needs a login of the role 'backup'. Streams get as
    many replicas as the servers allow, up to three, or HOLDFAST_REPLICAS.
    """
    from holdfast.config import ConnectionConfig
    from holdfast.config import load as configured
    from holdfast.integrations.backups import SCHEME, BackupStore, check_place

    log_to_stderr()
    check_place(place)
    connection = configured(ConnectionConfig, **connection_given())
    with contextlib.ExitStack() as stack:
        folder = Path(place)
        if place.startswith(SCHEME):
            temporary = tempfile.TemporaryDirectory(prefix="holdfast-restore-")
            folder = Path(stack.enter_context(temporary))
            place = await asyncio.to_thread(BackupStore(place).download, folder)
        if drill:
            await _rehearse(stack, connection.namespace, folder, place)
            return
        made = await _restore(connection, folder, missing=missing, epochs_above=epochs_above)
    _tell("restored", place, made)


async def _restore(
    connection: ConnectionConfig, folder: Path, *, missing: bool = False, epochs_above: int = 0
) -> dict[str, int]:
    from holdfast.broker import Broker
    from holdfast.broker.snapshots import load, raise_epochs
    from holdfast.broker.streams import Topology
    from holdfast.client import Client
    from holdfast.config import RecordConfig
    from holdfast.config import load as configured

    with _as_backup():
        async with Broker(connection, name="holdfast restore") as broker:
            wanted = await _to_restore(broker, folder, missing)
            replicas = await Topology(broker, configured(RecordConfig)).wanted_replicas()

            async def load_one(stream: str) -> int:
                count = await load(broker, stream, folder, replicas)
                out.note(f"{stream}: {count} messages")
                return count

            by = Operator(Client(broker, configured(RecordConfig)))
            made = await actions.restore(by, wanted, load_one)
            if epochs_above:
                out.note(f"the next epoch is above {await raise_epochs(broker, epochs_above)}")
            await _reconcile(broker)
    return made


async def _rehearse(stack: contextlib.ExitStack, namespace: str, folder: Path, name: str) -> None:
    """Restore into a new server, and compare each stream with what the backup says."""
    from holdfast.broker import Broker
    from holdfast.broker.snapshots import in_folder
    from holdfast.config import ConnectionConfig
    from holdfast.errors import BrokerError
    from holdfast.server import Server

    store = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-drill-"))
    server = stack.enter_context(Server(store=Path(store), fast=True))
    connection = ConnectionConfig(nats_url=server.url, namespace=namespace)
    made = await _restore(connection, folder)
    async with Broker(connection, name="holdfast drill") as broker:
        for stream, snapshot in in_folder(broker.names, folder).items():
            # Messages may have expired meanwhile; the sequence has not.
            state = (await broker.api(f"STREAM.INFO.{stream}"))["state"]
            if state["last_seq"] < snapshot.state["last_seq"]:
                raise BrokerError(
                    f"{stream} ends at {state['last_seq']} after the restore, and at "
                    f"{snapshot.state['last_seq']} in the backup: it is incomplete"
                )
    _tell("restored and compared", name, made)


@contextlib.contextmanager
def _as_backup() -> Iterator[None]:
    """Explain which login is needed if this one is refused."""
    from holdfast.errors import PermissionDenied

    try:
        yield
    except PermissionDenied as error:
        raise PermissionDenied(
            f"this login may not take or restore snapshots ({error}). Issue one for it with "
            "'holdfast auth user backup', let the servers reload, and name its file with "
            "--credentials; revoke it afterwards with 'holdfast auth revoke backup'"
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
        out.note(
            "records and queue are compared by the first coordinator: this login may not do it"
        )
        return
    for what, count in Counter(done.values()).most_common():
        out.note(f"{count} runs waited for a message that the backup does not have: {what}")


async def _to_restore(broker: Broker, folder: Path, missing: bool) -> list[str]:
    from holdfast.broker.snapshots import in_folder, streams_of
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


def _tell(what: str, place: str, streams: dict[str, int]) -> None:
    if not out.as_json({"folder": place, "streams": streams}):
        total = sum(streams.values())
        out.say(f"{what} {len(streams)} streams with {total} messages: {place}")
