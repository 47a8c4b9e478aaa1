"""Dead letters: runs that were given up, with their bytes, headers, reason and attempts.

A letter's id is its sequence in the dead-letter stream. `replay` sends letters again, each guarded
by the run's claim (`replaying`): however many operators replay a letter, it becomes one run. `drop`
removes letters for good. Both take ids or a filter.

A page reads at most `PAGE_LOOK` letters, and groups cover the newest `GROUP_LOOK`, so the cost of a
listing does not grow with their number; totals come from the server and are complete.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from holdfast.broker.kv import direct_page, parse_time
from holdfast.client import Client
from holdfast.errors import InvalidInput, NotFound, Unreadable
from holdfast.model.codec import whole_number
from holdfast.model.dead import ATTEMPTS, TEXT
from holdfast.model.run import Attempt, fingerprint
from holdfast.names import (
    H_ATTEMPTS,
    H_CRASHES,
    H_DEAD_AT,
    H_ERROR,
    H_FAILURES,
    H_OBJECT,
    H_REASON,
    H_RUN,
    H_SUBJECT,
    H_TRACEBACK,
    Names,
)
from holdfast.ownership.history import first_since
from holdfast.status.actions import SELECT_MOST
from holdfast.status.messages import Kept, by_sequence, delete, newest, subject_counts
from holdfast.status.replaying import Replayer


class DeadLetter(msgspec.Struct, frozen=True):
    """A run that was given up."""

    id: int
    run: str
    group: str
    job: str
    reason: str
    """`failed`, `timeout`, `invalid`, `crashed` or `lost`."""
    error: str
    attempt: int
    """The number of the message that carried it."""
    failures: int
    crashes: int
    at: float
    size: int
    object: str = ""
    """Where its body is stored, when body and headers together were too large for a message."""
    subject: str = ""
    headers: dict[str, str] = {}
    attempts: tuple[Attempt, ...] = ()
    traceback: str = ""


class Body(msgspec.Struct, frozen=True):
    """A letter's bytes as text: as they are, or base64 when they are not UTF-8."""

    encoding: Literal["utf-8", "base64"]
    text: str


@dataclass(frozen=True, slots=True)
class DeadFilter:
    """Which letters to select; an empty member matches all."""

    job: str = ""
    group: str = ""
    reason: str = ""
    error: str = ""
    """Part of the error's text, ignoring case."""
    run: str = ""
    since: float = 0.0
    before: float = 0.0
    seen: Callable[[str], str] = field(default=str, compare=False)
    """Masks an error for this reader: what they may not see, they cannot search either."""

    def matches(self, letter: DeadLetter) -> bool:
        return (
            (not self.reason or letter.reason == self.reason)
            and (not self.error or self.error.lower() in self.seen(letter.error).lower())
            and (not self.run or letter.run == self.run)
            and (not self.before or letter.at < self.before)
            and letter.at >= self.since
        )


class Replayed(msgspec.Struct, frozen=True):
    """The outcome for one letter."""

    id: int
    run: str
    job: str
    result: Literal["replayed", "would replay", "refused", "dropped", "would drop", "gone"]
    why: str = ""


Selection = Sequence[int] | DeadFilter


class DeadLetters:
    """The dead letters of one namespace."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._broker = client.broker
        self._stream = client.broker.names.dead
        self._replayer = Replayer(client)

    # ---- reading

    async def list(self, wanted: DeadFilter | None = None, limit: int = 50) -> Sequence[DeadLetter]:
        """The newest letters that match."""
        found: list[DeadLetter] = []
        older = 0
        while True:
            page = await dead_page(self._client, wanted or DeadFilter(), limit - len(found), older)
            found, older = found + page.letters, page.older
            if not older or len(found) >= limit:
                return found

    async def show(self, id: int) -> DeadLetter:
        """One letter."""
        return read_letter(await self._kept(id), self._broker.names)

    async def body(self, id: int) -> bytes:
        """A letter's bytes as they were sent."""
        return await self._body_of(await self._kept(id))

    async def _kept(self, id: int) -> Kept:
        kept = await by_sequence(self._broker, self._stream, check_id(id))
        if kept is None:
            raise NotFound(f"dead letter {id} does not exist: see 'holdfast dead list'")
        return kept

    async def _body_of(self, kept: Kept) -> bytes:
        name = kept.headers.get(H_OBJECT)
        return await self._client.objects.get(name) if name else kept.body

    async def select(self, wanted: Selection, limit: int = SELECT_MOST) -> Sequence[DeadLetter]:
        """The letters selected by ids or a filter, oldest first; an unknown id is an error."""
        if isinstance(wanted, DeadFilter):
            return (await self.list(wanted, limit))[::-1]
        return [await self.show(id) for id in sorted(set(wanted))[:limit]]

    # ---- acting

    async def replay(
        self,
        wanted: Selection,
        *,
        dry_run: bool = False,
        rate: float = 0.0,
        limit: int = SELECT_MOST,
        edited: bytes | None = None,
        done: MutableSequence[Replayed] | None = None,
    ) -> Sequence[Replayed]:
        """Send letters again, at most `rate` per second (0: as fast as possible).

        `edited` replaces the payload and needs a single letter. `done` is filled during the replay,
        so an interrupted caller knows how far it got.
        """
        letters = await self.select(wanted, limit)
        if edited is not None and len(letters) != 1:
            raise InvalidInput("an edited payload belongs to one letter: replay the others without")
        done = [] if done is None else done
        for letter in letters:
            if done and rate > 0:
                await self._broker.clock.sleep(1 / rate)
            done.append(await self._replay(letter, dry_run, edited))
        return done

    async def _replay(
        self, letter: DeadLetter, dry_run: bool, edited: bytes | None = None
    ) -> Replayed:
        kept = await by_sequence(self._broker, self._stream, letter.id)
        if kept is None:
            return Replayed(letter.id, letter.run, letter.job, "gone")
        if H_RUN not in kept.headers:
            why = "it names no run, so no worker has written it"
            return Replayed(letter.id, letter.run, letter.job, "refused", why)
        if dry_run:
            why = await self._replayer.refusal(kept)
            result: Literal["refused", "would replay"] = "refused" if why else "would replay"
            return Replayed(letter.id, letter.run, letter.job, result, why)
        body = await self._body_of(kept) if edited is None else edited
        why = await self._replayer.replay(kept, letter.group, letter.job, body)
        if why:
            return Replayed(letter.id, letter.run, letter.job, "refused", why)
        await self._remove(letter)
        return Replayed(letter.id, letter.run, letter.job, "replayed")

    async def drop(
        self,
        wanted: Selection,
        *,
        dry_run: bool = False,
        limit: int = SELECT_MOST,
        done: MutableSequence[Replayed] | None = None,
    ) -> Sequence[Replayed]:
        """Remove letters for good; `done` as in `replay`."""
        done = [] if done is None else done
        for letter in await self.select(wanted, limit):
            if dry_run:
                done.append(Replayed(letter.id, letter.run, letter.job, "would drop"))
                continue
            existed = await self._remove(letter)
            result: Literal["dropped", "gone"] = "dropped" if existed else "gone"
            done.append(Replayed(letter.id, letter.run, letter.job, result))
        return done

    async def _remove(self, letter: DeadLetter) -> bool:
        there = await delete(self._broker, self._stream, letter.id)
        if letter.object:
            await self._client.objects.delete(letter.object)
        return there


def check_id(id: int) -> int:
    """Check that a letter's id is a valid sequence number."""
    if not 0 < id < 2**63:
        raise InvalidInput(f"{id} is not the id of a dead letter: 'holdfast dead list' shows them")
    return id


# ---- reading a letter


def read_letter(kept: Kept, names: Names) -> DeadLetter:
    """Parse a stored letter; missing or malformed headers leave their members empty."""
    headers = kept.headers
    group, job = names.parse_dead(kept.subject) or ("", "")
    return DeadLetter(
        kept.sequence,
        kept.run,
        group,
        job,
        headers.get(H_REASON, ""),
        _text(headers.get(H_ERROR, "")),
        kept.stamp,
        whole_number(headers.get(H_FAILURES)),
        whole_number(headers.get(H_CRASHES)),
        _time(headers.get(H_DEAD_AT, ""), kept.stored),
        len(kept.body),
        headers.get(H_OBJECT, ""),
        headers.get(H_SUBJECT, ""),
        kept.user_headers,
        _attempts(headers.get(H_ATTEMPTS, "")),
        _text(headers.get(H_TRACEBACK, "")),
    )


def as_text(body: bytes) -> Body:
    """Bytes for display: as text if they are UTF-8."""
    try:
        return Body("utf-8", body.decode())
    except UnicodeDecodeError:
        return Body("base64", base64.b64encode(body).decode())


def _text(header: str) -> str:
    """Decode a header that was written as JSON to fit on one line."""
    try:
        return TEXT.decode(header.encode("utf-8", "surrogateescape"))
    except Unreadable:
        return header


def _time(header: str, default: float) -> float:
    try:
        return parse_time(header) if header else default
    except ValueError:
        return default


def _attempts(header: str) -> tuple[Attempt, ...]:
    try:
        return ATTEMPTS.decode(header.encode("utf-8", "surrogateescape")) if header else ()
    except Unreadable:
        return ()


PAGE_LOOK: Final = 2_000
"""Letters that one page reads: bounds its response time."""


class DeadPage(msgspec.Struct, frozen=True):
    """One page of letters, newest first."""

    letters: list[DeadLetter]
    older: int
    """The next page holds letters before this id; 0: this is the last page."""


async def dead_page(
    client: Client, wanted: DeadFilter, limit: int = 50, before: int = 0, look: int = PAGE_LOOK
) -> DeadPage:
    """The letters that match from a position on; a page may be short when matches are rare."""
    names = client.broker.names
    subject = names.dead_letter(wanted.group or "*", wanted.job or "*")
    found: list[DeadLetter] = []
    looked, at = 0, 0
    async for kept in newest(client.broker, names.dead, subject, before):
        if kept.stored < wanted.since:
            return DeadPage(found, 0)
        if looked >= look or len(found) >= limit:
            return DeadPage(found, at)
        looked, at = looked + 1, kept.sequence
        letter = read_letter(kept, names)
        if wanted.matches(letter):
            found.append(letter)
    return DeadPage(found, 0)


GROUP_LOOK: Final = 1_000
"""Most letters that are grouped; also the most that a page can act on at once."""


class DeadGroup(msgspec.Struct, frozen=True):
    """Letters of one job with one kind of error, newest first."""

    group: str
    job: str
    kind: str
    """The error with numbers and quoted parts blanked."""
    letters: tuple[DeadLetter, ...]


class DeadGroups(msgspec.Struct, frozen=True):
    """The grouped letters, and the totals."""

    groups: list[DeadGroup]
    looked: int
    totals: dict[tuple[str, str], int]
    """By group and job."""

    @property
    def total(self) -> int:
        return sum(self.totals.values())


async def dead_groups(client: Client, wanted: DeadFilter, look: int = GROUP_LOOK) -> DeadGroups:
    """The newest letters that match, by job and kind, largest group first."""
    letters = await DeadLetters(client).list(wanted, look)
    found: dict[tuple[str, str, str], list[DeadLetter]] = {}
    for letter in letters:
        kind = fingerprint(letter.error) or letter.reason
        found.setdefault((letter.group, letter.job, kind), []).append(letter)
    groups = [DeadGroup(*key, tuple(group)) for key, group in found.items()]
    groups.sort(key=lambda one: (-len(one.letters), one.group, one.job, one.kind))
    return DeadGroups(groups, len(letters), await dead_totals(client))


async def dead_totals(client: Client) -> dict[tuple[str, str], int]:
    """How many letters each job has."""
    names = client.broker.names
    counts = await subject_counts(client.broker, names.dead, names.dead_letter("*", "*"))
    return {where: n for s, n in counts.items() if (where := names.parse_dead(s))}


async def dead_since(client: Client, since: float) -> int:
    """How many of the existing letters were stored at or after an instant."""
    broker, names = client.broker, client.broker.names
    subject = names.dead_letter("*", "*")
    first = await first_since(broker, names.dead, subject, since)
    if not first:
        return 0
    page = await direct_page(broker, names.dead, subject, first, 1)
    return len(page.messages) + page.left
