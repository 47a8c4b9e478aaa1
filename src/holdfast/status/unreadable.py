"""Finds records that cannot be read, in every bucket and in the streams of ledger, run logs and
history.

`decoders` says which kind of record each key of each bucket holds. Listing decodes what it finds
and keeps nothing; removing never needs to decode. A readable record is not removed here: its own
command does that, with the right checks.

Not covered: payloads of runs and events, which belong to the user and become dead letters when they
do not fit; buckets of programs, whose types only the program knows; and records beyond the newest
`LOOKED` of a bucket.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from holdfast.broker import Bucket
from holdfast.client import Client, once
from holdfast.client.schedules import REFUSED, REGISTRATION
from holdfast.errors import InvalidInput, NotFound, SettingsError, Unavailable, Unreadable
from holdfast.identity.credentials import Credentials
from holdfast.identity.grants import ROLES, covers
from holdfast.model import fleet, history, join, lease, limit, node, run, schedule, slot
from holdfast.model.codec import JSON
from holdfast.model.journal import CHILD_END, ENTRIES
from holdfast.model.runlog import LOG_MESSAGE
from holdfast.names import (
    APPS,
    GATES,
    REFUSALS,
    SETTINGS_REVISION,
    Names,
    is_literal,
    kv_key,
    kv_stream,
    kv_subject,
    parse_return_key,
)
from holdfast.settings import records as settings
from holdfast.status.audit import LINE
from holdfast.status.messages import by_sequence, delete, newest

LOOKED: Final = 20_000
"""Records read per bucket: keeps `holdfast doctor` to seconds, however many there are."""
LISTED: Final = 1_000
"""Records shown by one listing; a person has to look at each."""

Decode = Callable[[str, bytes], object]
"""Decodes the record of a key, or raises `Unreadable`; keys of other kinds are ignored."""


class Damaged(msgspec.Struct, frozen=True):
    """A record that cannot be read."""

    bucket: str
    """The bucket, or the stream."""
    key: str
    """The key; for a message in a stream, its sequence."""
    reason: str
    size: int
    stored: float

    @property
    def remedy(self) -> str:
        """The command that removes it, quoted for a shell: the key may come from anyone."""
        option = "-- " if self.key.startswith("-") else ""
        return f"holdfast unreadable remove {option}{self.bucket} {shlex.quote(self.key)}"


class UnreadableRecords:
    """Finds and removes the unreadable records of a namespace."""

    def __init__(self, client: Client) -> None:
        self._broker = client.broker
        self._names = client.broker.names

    async def list(self) -> Sequence[Damaged]:
        """Unreadable records of every bucket and stream, at most `LISTED`."""
        found: list[Damaged] = []
        for bucket, decode in decoders(self._names).items():
            if not self._may_read(bucket):
                continue
            async for one in self._look(bucket, decode):
                found.append(one)
                if len(found) >= LISTED:
                    return found
        return found

    def _may_read(self, bucket: str) -> bool:
        """Whether this login may read a bucket; an operator, for one, may not read sessions."""
        file = self._broker.config.credentials_file
        grant = ROLES.get(Credentials.load(file).role) if file else None
        stream = bucket if self._is_stream(bucket) else kv_stream(bucket)
        asked = f"$JS.API.STREAM.INFO.{stream}"
        return grant is None or any(covers(g, asked) for g in grant(self._names).publish)

    def _is_stream(self, bucket: str) -> bool:
        names = self._names
        return bucket in (names.ledger, names.run_logs, names.history, names.flows)

    async def _look(self, bucket: str, decode: Decode) -> AsyncIterator[Damaged]:
        plain = self._is_stream(bucket)
        stream = bucket if plain else kv_stream(bucket)
        subject = ">" if plain else kv_subject(bucket, ">")
        looked = 0
        try:
            async for kept in newest(self._broker, stream, subject):
                place = kept.subject if plain else kv_key(bucket, kept.subject)
                looked += 1
                if reason := _reason(decode, place, kept.body):
                    key = str(kept.sequence) if plain else place
                    yield Damaged(bucket, key, reason, len(kept.body), kept.stored)
                if looked >= LOOKED:
                    return
        except (NotFound, Unavailable):
            return  # the bucket has not been created yet

    async def remove(self, bucket: str, key: str) -> None:
        """Remove a record that cannot be read; a readable one is refused."""
        decode = decoders(self._names).get(bucket)
        if decode is None:
            known = ", ".join(decoders(self._names))
            raise InvalidInput(f"{bucket!r} is not a bucket of this namespace: {known}")
        if self._is_stream(bucket):
            await self._remove_message(bucket, key, decode)
        else:
            await self._remove_key(Bucket(self._broker, bucket), key, decode)

    async def _remove_key(self, bucket: Bucket, key: str, decode: Decode) -> None:
        if not is_literal(key):
            await self._remove_stray(bucket, key)
            return
        revision, entry = await bucket.last(key)
        if entry is None:
            raise NotFound(f"bucket {bucket.name} has no record {key!r}")
        _refuse_readable(decode, entry.key, entry.value)
        if bucket.name == self._names.returns:
            await bucket.delete(entry.key)  # returns refuse a second write, even a marker
        else:
            await bucket.remove(entry.key, expected=revision)

    async def _remove_stray(self, bucket: Bucket, key: str) -> None:
        """Check by listing that it exists: reading a wildcard key would match others."""
        if key not in {entry.key async for entry in bucket.entries()}:
            raise NotFound(f"bucket {bucket.name} has no record {key!r}")
        await bucket.remove_stray(key)

    async def _remove_message(self, stream: str, key: str, decode: Decode) -> None:
        kept = None
        if key.isascii() and key.isdigit() and len(key) < 19:
            kept = await by_sequence(self._broker, stream, int(key))
        if kept is None:
            raise NotFound(f"stream {stream} has no message {key!r}")
        _refuse_readable(decode, kept.subject, kept.body)
        await delete(self._broker, stream, kept.sequence)


def _reason(decode: Decode, key: str, body: bytes) -> str:
    if not is_literal(key):
        return "its key is a wildcard: it cannot be read back"
    try:
        decode(key, body)
    except Unreadable as error:
        return str(error)
    return ""


def _refuse_readable(decode: Decode, key: str, body: bytes) -> None:
    if not _reason(decode, key, body):
        raise InvalidInput(
            f"{key} can be read, so nothing was removed: its own command does that (schedules "
            "remove, agents forget, jobs purge, …)"
        )


# ---- which record is where


def decoders(names: Names) -> Mapping[str, Decode]:
    """The decoder of each bucket's records, by bucket; the last four are streams."""
    return {
        names.runs: _plain(run.decode),
        names.nodes: node.decode_at,
        names.schedules: _schedule,
        names.slots: _slot,
        names.leases: _lease,
        names.limits: _limit,
        names.fleet: _fleet,
        names.returns: _return,
        names.facts: _plain(fleet.FACTS.decode),
        names.agents: _plain(node.decode),
        names.joins: _join,
        names.settings: _settings,
        names.secrets: _of_settings(settings.Sealed),
        names.applied: _of_settings(settings.Report),
        names.bucket("sessions"): _plain(JSON.decode),
        names.data(once.BUCKET): _plain(once.CODEC.decode),
        names.ledger: _ledger(names),
        names.run_logs: _plain(LOG_MESSAGE.decode),
        names.history: _history,
        names.flows: _flow(names),
    }


def _flow(names: Names) -> Decode:
    """Journals and the ends of children; events are anybody's."""

    def decode(subject: str, body: bytes) -> object:
        if names.parse_flow(subject):
            return ENTRIES.decode(body)
        told = subject.startswith(names.flow("")) and not subject.endswith(".stop")
        return CHILD_END.decode(body) if told else None

    return decode


def _plain(decode: Callable[[bytes], Any]) -> Decode:
    return lambda _, body: decode(body)


def _history(_: str, body: bytes) -> object:
    return [history.decode(line) for line in body.split(b"\n")]


def _schedule(key: str, body: bytes) -> object:
    kind, _, name = key.partition(".")
    if kind == "schedule":
        return schedule.usable(name, body)
    if kind == REFUSALS:
        return REFUSED.decode(body)
    return REGISTRATION.decode(body) if kind == APPS else None


def _slot(key: str, body: bytes) -> object:
    kind = key.partition(".")[0]
    if kind == "progress":
        return slot.decode_progress(body)
    return lease.decode_term(body) if kind == "term" else slot.decode_at(key, body)


def _lease(key: str, body: bytes) -> object:
    return lease.decode_term(body) if key.startswith("term.") else lease.decode_lease(body)


def _limit(key: str, body: bytes) -> object:
    return (limit.GATE if key.startswith(f"{GATES}.") else limit.RULE).decode(body)


def _fleet(key: str, body: bytes) -> object:
    return fleet.decode_active(body) if key.startswith("active.") else fleet.decode(body)


def _return(key: str, body: bytes) -> object:
    found = fleet.decode_return(body)
    if parse_return_key(key) != (found.run, found.agent):
        raise fleet.RETURN.unreadable("it names another run or agent than its key")
    return found


def _join(key: str, body: bytes) -> object:
    return join.TOKEN.decode(body) if key.startswith("token.") else join.RECORD.decode(body)


def _settings(key: str, body: bytes) -> object:
    if key == SETTINGS_REVISION or key.startswith("history."):
        return _settled(lambda: settings.claimed(body))
    if key.startswith("manifest."):
        return _settled(lambda: settings.decode(settings.Manifest, body, "the manifest"))
    return None  # a file is verified by its hash


def _of_settings(kind: type[Any]) -> Decode:
    return lambda _, body: _settled(lambda: settings.decode(kind, body, "the record"))


def _settled(read: Callable[[], object]) -> object:
    try:
        return read()
    except SettingsError as error:
        raise Unreadable(str(error)) from None


def _ledger(names: Names) -> Decode:
    kinds = {
        names.log("node", ""): node.decode_transition,
        names.log("fleet", ""): fleet.decode_ledger,
        names.log("operator", ""): LINE.decode,
    }

    def decode(subject: str, body: bytes) -> object:
        for prefix, read in kinds.items():
            if subject.startswith(prefix):
                return read(body)
        return None

    return decode
