"""Streams as files: what `holdfast backup` writes and `holdfast restore` reads.

    DIR/<stream>/backup.json     the stream's configuration, and its state when it was read
    DIR/<stream>/stream.tar.s2   its messages and consumers, as the server packs them

The layout follows the `nats` command line's; exchanging backups with it was not tested.

Guaranteed: a stream's folder has its final name only once it is complete, and each stream is
consistent as of one moment. Not guaranteed: that this moment is the same for all. What causes runs
is read first (slots, events), then the queue, then the records, and what runs leave behind last
(dead letters, results). So the effects of a run recorded as done are in the backup. For a run
recorded as open, its message is, or an older one that serves as well.

The queue is read without the state of its consumers: that is packed after the messages, and could
mark a message as acknowledged whose successor is not in the backup. Consumers are created again and
deliver everything in the queue; finished runs are detected by their records.

On failure nothing partial counts: after a restore the server removes a stream that was not
completely received; after a backup its folder keeps the name `<stream>.part`.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from holdfast.broker import Broker
from holdfast.broker.streams import Topology
from holdfast.broker.wire import Received
from holdfast.config import RecordConfig
from holdfast.errors import BrokerError, ConfigError, InvalidInput, NotConnected
from holdfast.names import (
    EPOCHS_RAISED,
    H_KV_OPERATION,
    H_TTL,
    Names,
    kv_stream,
    kv_subject,
    parse_consumer,
)

META: Final = "backup.json"
DATA: Final = "stream.tar.s2"
CHUNK_BYTES: Final = 128 * 1024
"""The server's default for snapshots; far below the smallest usual `max_payload`."""
SILENCE_SECONDS: Final = 60.0
"""With no chunk for this long, the server has given up or the stream has lost its leader."""
HEARD_SECONDS: Final = 10.0
"""For all servers of a cluster to know the listener of a restore."""
WINDOW: Final = 16
"""Unconfirmed chunks in a restore: hides the round trip, bounds memory."""
FURTHEST: Final = 100_000_000
"""Most writes used to raise epochs: they take about an hour."""
_MORE: Final = 1000  # writes in flight between two confirmations
_WELL: Final = ("", "204")


class StreamBackup(msgspec.Struct, frozen=True):
    """What a backup knows about a stream."""

    config: dict[str, Any]
    state: dict[str, Any]
    consumers: list[dict[str, Any]] = []
    """Configurations of consumers that are not in the data."""

    @property
    def messages(self) -> int:
        return int(self.state.get("messages", 0))


def belongs(names: Names, stream: str) -> bool:
    """Whether a stream belongs to this namespace, including buckets and object stores."""
    ns = names.namespace
    return stream.startswith((f"{ns.upper()}_", f"KV_{ns}_", f"OBJ_{ns}_"))


def rank(names: Names, stream: str) -> tuple[int, str]:
    """Causes first, then the queue, then records, then what runs leave behind.

    Limits before the queue: a gate that has served more of its line than the queue shows would drop
    the runs in between. Flows after the queue and before records: a child that ends meanwhile is
    still in the queue, and tells its flow again; a journal is never ahead of its flow's record.
    """
    causes = (kv_stream(names.schedules), kv_stream(names.slots), names.events)
    order = (*causes, kv_stream(names.limits), names.jobs, names.flows, kv_stream(names.runs))
    place = order.index(stream) if stream in order else len(order)
    return place, stream


async def streams_of(broker: Broker) -> list[str]:
    """The namespace's streams on the server, in backup order."""
    found: list[str] = []
    while True:
        page = await broker.api("STREAM.NAMES", {"offset": len(found)})
        found += page.get("streams") or []
        if not page.get("streams") or len(found) >= int(page.get("total", 0)):
            break
    own = (name for name in found if belongs(broker.names, name))
    return sorted(own, key=lambda name: rank(broker.names, name))


def in_folder(names: Names, folder: Path) -> dict[str, StreamBackup]:
    """The namespace's streams in a backup, in restore order: records before queues."""
    found = {}
    for path in folder.glob(f"*/{META}"):
        if path.parent.suffix == ".part" or not belongs(names, path.parent.name):
            continue
        try:
            found[path.parent.name] = msgspec.json.decode(path.read_bytes(), type=StreamBackup)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
    return dict(sorted(found.items(), key=lambda item: rank(names, item[0]), reverse=True))


# ---- backup


async def save(broker: Broker, stream: str, folder: Path) -> StreamBackup:
    """Write one stream into a new folder."""
    part = folder / f"{stream}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True, mode=0o700)
    queue = stream == broker.names.jobs
    consumers = await _consumers(broker, stream) if queue else []
    with (part / DATA).open("wb") as file:
        snapshot = await _receive(broker, stream, file, no_consumers=queue)
    snapshot = msgspec.structs.replace(snapshot, consumers=consumers)
    (part / META).write_bytes(msgspec.json.format(msgspec.json.encode(snapshot), indent=2))
    part.rename(folder / stream)
    return snapshot


async def _consumers(broker: Broker, stream: str) -> list[dict[str, Any]]:
    """The configurations of the jobs' consumers; a canary's is removed with its worker."""
    found = await Topology(broker, RecordConfig()).consumers(stream)
    return [info["config"] for info in found if parse_consumer(info.get("name", ""))]


async def _receive(
    broker: Broker, stream: str, file: IO[bytes], *, no_consumers: bool
) -> StreamBackup:
    chunks: asyncio.Queue[Received | None] = asyncio.Queue()
    inbox = broker.new_inbox()

    async def keep(chunk: Received) -> None:
        chunks.put_nowait(chunk)

    forget = broker.on_disconnect(lambda: chunks.put_nowait(None))
    subscription = await broker.subscribe(inbox, keep)
    try:
        wanted = {"deliver_subject": inbox, "chunk_size": CHUNK_BYTES, "no_consumers": no_consumers}
        answer = await broker.api(f"STREAM.SNAPSHOT.{stream}", wanted)
        while (chunk := await _next(chunks, stream)).body:
            file.write(chunk.body)
            if chunk.reply:
                await broker.publish(chunk.reply)
        if chunk.status not in _WELL:
            why = chunk.headers.get("Description", chunk.status)
            raise BrokerError(f"{stream} was not wholly read: {why}")
    finally:
        forget()
        await broker.unsubscribe(subscription)
    return StreamBackup(answer["config"], answer["state"])


async def _next(chunks: asyncio.Queue[Received | None], stream: str) -> Received:
    try:
        async with asyncio.timeout(SILENCE_SECONDS):
            chunk = await chunks.get()
    except TimeoutError:
        raise BrokerError(f"{stream} was not wholly read: the server stopped sending") from None
    if chunk is None:
        raise NotConnected(f"{stream} was not wholly read: the connection was lost; begin again")
    return chunk


# ---- restore


async def load(broker: Broker, stream: str, folder: Path, replicas: int) -> int:
    """Create a stream from a backup; returns how many messages it has."""
    snapshot = msgspec.json.decode((folder / stream / META).read_bytes(), type=StreamBackup)
    config = snapshot.config | {"num_replicas": replicas}
    begun = await broker.api(
        f"STREAM.RESTORE.{stream}", {"config": config, "state": snapshot.state}
    )
    target = begun["deliver_subject"]
    try:
        with (folder / stream / DATA).open("rb") as file:
            await _send(broker, target, lambda: file.read(CHUNK_BYTES))
    except OSError as error:
        raise ConfigError(f"{folder / stream / DATA} cannot be read: {error.strerror}") from None
    answer = await broker.request(target, timeout=SILENCE_SECONDS)
    made = msgspec.json.decode(answer.body) if answer.body else {}
    if refused := made.get("error"):
        raise BrokerError(f"{stream} was not restored: {refused.get('description', refused)}")
    topology = Topology(broker, RecordConfig())
    for consumer in snapshot.consumers:
        await topology.create_consumer(stream, consumer | {"num_replicas": 0})
    return int(made.get("state", {}).get("messages", 0))


async def _send(broker: Broker, target: str, read: Callable[[], bytes]) -> None:
    """Send the chunks, several in flight; the server confirms each."""
    await _send_first(broker, target, read())
    under_way: list[asyncio.Future[Received]] = []
    while chunk := read():
        under_way.append(await broker.send(target, chunk, timeout=SILENCE_SECONDS))
        if len(under_way) == WINDOW:
            await _confirmed(under_way.pop(0))
    for future in under_way:
        await _confirmed(future)


async def _send_first(broker: Broker, target: str, chunk: bytes) -> None:
    """Send the first chunk, retrying: our server may not yet know the listener on another one."""
    deadline = broker.clock.monotonic() + HEARD_SECONDS
    while True:
        future = await broker.send(target, chunk, timeout=SILENCE_SECONDS)
        if (await future).status != "503" or broker.clock.monotonic() > deadline:
            return await _confirmed(future)
        await broker.clock.sleep(0.1)


async def _confirmed(future: asyncio.Future[Received]) -> None:
    answer = await future
    if answer.status not in _WELL:
        raise BrokerError(f"the server refused a chunk: {answer.headers}")


async def raise_epochs(broker: Broker, epoch: int) -> int:
    """Raise the revisions of the bucket of runs above `epoch`; returns the last one.

    Each write is one revision, and the server has no faster way. It writes the marker of a deleted
    key, which expires on its own.
    """
    subject = kv_subject(broker.names.runs, EPOCHS_RAISED)
    headers = {H_KV_OPERATION: "PURGE", H_TTL: "1s"}
    reached = (await broker.store(subject, b"", headers)).seq
    if epoch - reached > FURTHEST:
        raise InvalidInput(
            f"epoch {epoch} is {epoch - reached:,} writes away: it was won in a bucket that is "
            f"younger than the backup. Delete {kv_stream(broker.names.runs)}: it is made again "
            "above every epoch there was. The claims and results of the backup go with it"
        )
    while reached < epoch:
        more = min(_MORE, epoch - reached) - 1
        await broker.publish_all([(subject, b"", headers)] * more)
        reached = (await broker.store(subject, b"", headers)).seq
    return reached
