"""Claims: the exclusive right to execute a run, held by compare-and-swap.

The run's record is its claim. To claim, a worker writes the record as `running` with its node id
and a fresh token, expecting the revision it read (0 if there is none); the revision of that write
is the epoch. Every later write of the holder (progress, the settle) expects its own last revision,
so the server rejects a holder that has been replaced.

The outcome of a write without an answer is unknown: the record is read back from the leader, and
its token shows whether the write was applied. Nothing is acknowledged before that. A holder's
writes are serialized; one that was interrupted (a handler cancelled while reporting progress) is
also recognised by its token, and not mistaken for another holder's.

Each lost holder counts as a crash of the run, unless its node was ended because of another run
(`to_blame`): then the crash is subtracted before it counts.

A held run's record has no TTL, so a missing one was deleted with its bucket. A trusted holder
writes it again: nobody else can have received the run. An untrusted holder may have been replaced
by one whose record is gone too, and is rejected.

Not guaranteed: that a handler runs only once. After a crash between an effect and its settle, the
next holder runs it again with a higher epoch. On `ClaimLost`, stop, write nothing and leave the
message alone: its reply subject acts on the new holder's delivery.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec

from holdfast.clock import Clock
from holdfast.errors import (
    BrokerError,
    ClaimLost,
    Conflict,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    TryAgain,
    Unreadable,
)
from holdfast.model import run as runs
from holdfast.model.run import Outcome, Progress, RunRecord, State, Verdict
from holdfast.ownership.store import Store
from holdfast.retrying import retrying
from holdfast.telemetry import Telemetry

ALONE_SECONDS = 5.0
"""How long a process starts nothing else while it waits to be idle for a suspect: longer than most
runs, yet short enough to waste little when some are long."""
OVERDUE_SECONDS = 60.0
"""A process that is never idle executes a suspect beside other runs after this time: a minute of
waiting costs less than never executing it."""
MOST_CROWDED = 10_000
"""Suspects to remember: bounds memory, far above what a process meets."""

_AWAY = (TryAgain, NotFound)
"""NotFound means the bucket is missing: upkeep recreates it."""


class Claim:
    """A held run: its record, the epoch at which it was won, and its newest revision."""

    __slots__ = (
        "_turn",
        "epoch",
        "fresh",
        "lost",
        "record",
        "revision",
        "run",
        "settled",
        "tokens",
    )

    def __init__(self, run: str, record: RunRecord, revision: int, fresh: bool = False) -> None:
        self.fresh = fresh
        """The run had no record before."""
        self.run = run
        self.record = record
        self.epoch = revision
        self.revision = revision
        self.lost = False
        self.settled = False
        """Whether the attempt is over: its end is written, or being written."""
        self.tokens = {record.token}
        """Tokens of the newest applied write and of later writes with an unknown outcome."""
        self._turn: asyncio.Lock | None = None

    @property
    def turn(self) -> asyncio.Lock:
        """Held by whoever writes or reads the record while the handler runs.

        Most runs only have their settle, which comes after the handler, and need none.
        """
        if self._turn is None:
            self._turn = asyncio.Lock()
        return self._turn

    @property
    def shared(self) -> bool:
        """Whether the handler may be writing or reading the record now."""
        return self._turn is not None and self._turn.locked()

    async def wait(self) -> None:
        """Wait for what the handler has begun to write."""
        async with self.turn:
            pass


async def _no_grace(_: str) -> bool:
    return False


class Company:
    """The other runs of this process. This default, for tests, has none."""

    async def leave(self, limit: float) -> bool:
        """Wait for all other runs to end and let none start; False on timeout."""
        return True

    def join(self) -> None:
        """Let other runs start again."""


class Claims:
    """Claims and settles runs for one node."""

    def __init__(
        self,
        store: Store,
        node: str,
        clock: Clock,
        telemetry: Telemetry,
        *,
        now: Callable[[], float],
        node_alive: Callable[[str], Awaitable[bool]],
        in_grace: Callable[[str], Awaitable[bool]] = _no_grace,
        to_blame: Callable[[str, str], bool] = lambda node, run: True,
        on_lost: Callable[[str], None] = lambda run: None,
        trusted: Callable[[], bool] = lambda: False,
        crash_limit: int = 3,
        keyed_ttl: float = 86_400.0,
        keyless_ttl: float = 120.0,
    ) -> None:
        self._store = store
        self._node = node
        self._clock = clock
        self._telemetry = telemetry
        self._now = now
        self._node_alive = node_alive
        self._in_grace = in_grace
        self._to_blame = to_blame
        self._on_lost = on_lost
        self._trusted = trusted
        self._crash_limit = crash_limit
        self._ttl = {True: keyed_ttl, False: keyless_ttl}
        self._tokens = itertools.count(1)
        self.company = Company()
        self._suspect = ""
        """The run on its last chance that this process executes alone."""
        self._crowded: dict[str, float] = {}
        """When each suspect first found this process busy."""

    def ttl_of(self, record: RunRecord) -> float:
        """How long the record is kept after its run has ended."""
        return self._ttl[record.keyed]

    def _token(self) -> str:
        return f"{self._node}.{next(self._tokens)}"

    # ---- claiming

    async def claim(
        self, run: str, fresh: RunRecord, *, message: int, reply: str, careful: bool = False
    ) -> Claim | Verdict:
        """Claim a run whose message was delivered, or return what to do with the message instead.

        `fresh` describes the run if this is its first attempt, which nearly every claim is: then it
        takes one write, and no read. `careful` reads the record first, which saves a rejected write
        when the message is known to be a redelivery.
        """
        try:
            if not careful and not runs.is_suspect(fresh, self._crash_limit):
                record = self._claimed(fresh, message, reply)
                if won := await self._write(run, record, 0):
                    return Claim(run, record, won, fresh=True)
            return await self._claim(run, fresh, message, reply)
        except Unreadable:
            return Verdict.UNREADABLE

    async def _claim(self, run: str, fresh: RunRecord, message: int, reply: str) -> Claim | Verdict:
        found = await self.read(run)
        while True:
            record, revision = found or (None, 0)
            if record and (record.group, record.job) != (fresh.group, fresh.job):
                return Verdict.FOREIGN
            verdict = await self.decide(record, message, once=fresh.once)
            if record and record.state == "running" and not self._to_blame(record.node, run):
                record = msgspec.structs.replace(record, crashes=record.crashes - 1)
                verdict = await self.decide(record, message, once=fresh.once)
            if verdict not in (Verdict.CLAIM, Verdict.TAKE_OVER):
                return verdict
            base = _base(record, fresh)
            suspect = runs.is_suspect(base, self._crash_limit)
            alone = suspect and await self._alone(run)
            if suspect and not alone and not self._overdue(run):
                return Verdict.CROWDED
            claim = None
            try:
                claim = await self._try(run, base, revision, message, reply, alone)
            finally:
                if not claim:
                    self._let_go(run)
            if claim:
                claim.fresh = base is fresh
                if verdict is Verdict.TAKE_OVER:
                    self._telemetry.takeovers.inc()
                return claim
            found = await self.read(run)

    async def _alone(self, run: str) -> bool:
        """Reserve the process for a run on its last chance: such runs execute alone, one at a time.

        A run that kills its process then takes no other run with it, and is known to be the cause.
        The process is reserved before the claim is written, because several claims are in progress
        at once.
        """
        if self._suspect:
            return False
        self._suspect = run
        if await self.company.leave(ALONE_SECONDS):
            return True
        self._let_go(run)
        return False

    def _overdue(self, run: str) -> bool:
        """Whether a suspect has waited long enough to be executed beside others.

        A crash then proves nothing, and does not make it a dead letter.
        """
        now = self._clock.monotonic()
        since = self._crowded.setdefault(run, now)
        if len(self._crowded) > MOST_CROWDED:  # other processes have executed most of them by now
            del self._crowded[next(iter(self._crowded))]
        return now - since > OVERDUE_SECONDS

    def _let_go(self, run: str) -> None:
        if self._suspect == run:
            self._suspect = ""
            self.company.join()

    def release(self, claim: Claim) -> None:
        """The attempt has ended; let other runs start again."""
        self._crowded.pop(claim.run, None)
        self._let_go(claim.run)

    async def decide(
        self, record: RunRecord | None, message: int, *, once: bool = False
    ) -> Verdict:
        """What to do with a message whose run has this record, as of now."""
        alive, in_grace = True, False
        if record is not None and record.state == "running":
            alive = await self._node_alive(record.node)
            if not alive and record.restart == "after_grace":
                in_grace = await self._in_grace(record.node)
        return runs.decide(
            record,
            message=runs.believed(record, message),
            holder_alive=alive,
            crash_limit=self._crash_limit,
            in_grace=in_grace,
            once=once,
        )

    async def _try(
        self, run: str, base: RunRecord, revision: int, message: int, reply: str, alone: bool
    ) -> Claim | None:
        record = self._claimed(base, message, reply, alone)
        won = await self._write(run, record, revision)
        return Claim(run, record, won) if won else None

    def _claimed(self, base: RunRecord, message: int, reply: str, alone: bool = False) -> RunRecord:
        return runs.claimed(
            base,
            node=self._node,
            token=self._token(),
            reply=reply,
            message=runs.believed(base, message),
            now=self._now(),
            alone=alone,
        )

    # ---- the holder's writes

    async def settle(
        self,
        claim: Claim,
        state: State,
        outcome: Outcome,
        *,
        error: str = "",
        message: int | None = None,
        due: float = 0.0,
        result: bytes = b"",
        result_object: str = "",
        begun: bool = True,
        waits: str = "",
    ) -> None:
        """End the attempt; raises `ClaimLost` if another node holds the run now."""
        if claim.shared:
            await claim.wait()
        record = runs.settled(
            claim.record,
            state,
            outcome,
            epoch=claim.epoch,
            token=self._token(),
            now=self._now(),
            error=error,
            message=message,
            due=due,
            result=result,
            result_object=result_object,
            begun=begun,
            waits=waits,
        )
        await self._end(claim, record, self.ttl_of(record) if record.terminal else None)

    async def put_back(self, claim: Claim, ended: RunRecord) -> None:
        """Write back the record with which a run had ended before it was claimed again."""
        if claim.shared:
            await claim.wait()
        await self._end(claim, ended, self.ttl_of(ended))

    async def _end(self, claim: Claim, record: RunRecord, ttl: float | None) -> None:
        """Write the end of an attempt; from here on nothing else of it is written."""
        claim.settled = True
        try:
            await self._write_own(claim, record, ttl)
        except BaseException:
            claim.settled = False
            raise

    async def progress(self, claim: Claim, progress: Progress) -> None:
        """Record the handler's progress; raises `ClaimLost` if the attempt is over."""
        async with claim.turn:
            if claim.settled:
                raise ClaimLost(f"the attempt at run {claim.run} is over")
            record = msgspec.structs.replace(claim.record, progress=progress, token=self._token())
            await self._write_own(claim, record, None)

    async def restore(self, claim: Claim) -> None:
        """Write the record again if it was deleted with its bucket."""
        async with claim.turn:
            if claim.settled or claim.lost or await self.read(claim.run) is not None:
                return
            if won := await self._write(claim.run, claim.record, 0, None, claim.tokens):
                claim.revision = won

    async def give_up(
        self, run: str, record: RunRecord, revision: int, *, state: State, error: str
    ) -> RunRecord | None:
        """End a run that must not be executed (again): `dead` or `lost`.

        Does nothing if the run has changed since `revision`, at which that was decided.
        """
        ended = runs.ended(record, state, error=error, token=self._token(), now=self._now())
        won = await self._write(run, ended, revision, self.ttl_of(record))
        return ended if won else None

    async def owns(self, claim: Claim) -> bool:
        """Ask the leader whether the claim still holds. Advisory only; rely on a fenced write."""
        async with claim.turn:
            if claim.settled:
                return False
            try:
                found = await self.read(claim.run)
                mine = found[0].token in claim.tokens if found else self._trusted()
            except Unreadable:
                mine = False
            if not mine:
                self._lose(claim)
            return mine

    def _lose(self, claim: Claim) -> None:
        claim.lost = True
        self._on_lost(claim.run)

    async def read(self, run: str) -> tuple[RunRecord, int] | None:
        """A run's record and revision; waits while disconnected or while the bucket is missing."""
        entry: Any = await retrying(
            lambda: self._store.get(run), clock=self._clock, what="reading a run", on=_AWAY
        )
        if entry is None:
            return None
        record = self._store.read(runs.decode, entry)
        if record is None:
            raise Unreadable(f"the record of run {run} cannot be read: see 'holdfast doctor'")
        return record, entry.revision

    async def _write_own(self, claim: Claim, record: RunRecord, ttl: float | None) -> None:
        claim.tokens.add(record.token)
        won = 0
        if not claim.lost:
            won = await self._write(claim.run, record, claim.revision, ttl, claim.tokens)
        if not won:
            self._lose(claim)
            self._telemetry.fenced.labels("settle").inc()
            raise ClaimLost(f"run {claim.run} was taken over by another node")
        claim.record = record
        claim.revision = won
        claim.tokens = {record.token}

    # ---- writes with an unknown outcome

    async def _write(
        self,
        run: str,
        record: RunRecord,
        expected: int,
        ttl: float | None = None,
        own: Collection[str] = (),
    ) -> int:
        """Write until the write is known to be applied (returns its revision) or rejected (0).

        A conflict may be caused by this very write, if its first answer was lost, or by an
        interrupted write of the same holder (`own`): the token shows which. The record may also be
        unchanged: then an unconfirmed write, perhaps our own first copy, is pending on a leader
        that has not stored it yet. It may still be applied, so this one is repeated, with the same
        token, until the record shows which was first.
        """
        body = readable(record)
        try:  # nearly every write is confirmed at once, and a run makes several
            return await self._store.put(run, body, expected=expected, ttl=ttl)
        except BrokerError as error:
            return await self._write_again(run, record.token, body, expected, ttl, own, error)

    async def _write_again(
        self,
        run: str,
        token: str,
        body: bytes,
        expected: int,
        ttl: float | None,
        own: Collection[str],
        failure: BrokerError | None,
    ) -> int:
        """Continue a write whose first attempt failed."""

        async def step() -> int:
            nonlocal expected, failure
            while True:
                try:
                    if failure is not None:
                        raise failure
                    return await self._store.put(run, body, expected=expected, ttl=ttl)
                except Conflict:
                    try:
                        found = await self.read(run)
                    except Unreadable:
                        return 0  # its writer has replaced us
                finally:
                    failure = None
                revision = found[1] if found else 0
                if found and found[0].token == token:
                    return revision
                if revision == expected:
                    raise OutcomeUnknown(f"an unconfirmed write to run {run} is pending")
                if found and found[0].token in own:
                    expected = revision
                elif not found and own and self._trusted():
                    expected = 0
                else:
                    return 0

        # Before a run is held, only errors that pass by themselves are waited out; a held run must
        # be settled, even on a full disk.
        kinds = BrokerError if own else TryAgain
        return await retrying(step, clock=self._clock, what="writing a run's record", on=kinds)


def readable(record: RunRecord) -> bytes:
    """Encode a record; raises `InvalidInput` if nobody could decode it again.

    Checked here, where the caller who caused it still gets the error: those who later recover the
    runs of a dead worker could not repair it. A record without data from a handler is not decoded
    again: that costs more than encoding, and the rest was checked on input.
    """
    try:
        body = runs.encode(record)
        if (
            record.result is not runs.NO_RESULT
            or record.progress is not None
            or record.error
            or record.due
            or record.waits
            or record.result_object
            or record.body_object
        ):
            runs.decode(body)
    except (Unreadable, msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"the run's record could not be read again: {error}") from None
    return body


def _base(record: RunRecord | None, fresh: RunRecord) -> RunRecord:
    """The record that a claim builds on, updated from the job's definition and the message.

    The definition may have changed since, and the record of a replay has neither.
    """
    if record is None or record.vacant:
        return fresh
    return msgspec.structs.replace(
        record,
        restart=fresh.restart,
        once=fresh.once,
        body=fresh.body,
        body_object=fresh.body_object,
        generation=fresh.generation if runs.starts_over(record) else record.generation,
    )
