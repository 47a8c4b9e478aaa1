"""`app.once(key)`: a guard that lets one process do a piece of work once.

    async with app.once("document-42", ttl="24h") as first:
        if first:
            await convert(document)    # here only if nobody has done it in the last 24 hours
    await message.ack()                # done, by us or by somebody else

For code that is no job: another consumer, a webhook, a script. The state of a key is a record:

    (none) ──► held ──► done, kept for `ttl`
      ▲          │
      └──────────┘  failed, or its holder died

Every arrow is one compare-and-swap, or the end of the record's lease. The holder renews its lease;
when it dies, the server removes the record after `HELD_SECONDS`, and the next caller takes over.
Whoever finds the key held waits until it is done, failed or free. So a caller that is not first
knows that the work is done.

Leaving the block completes the work, an exception fails it; `complete()` and `fail()` do the same
earlier. Not guaranteed: that the block runs once. A holder that hangs for longer than its lease is
replaced; completing then raises `ClaimLost`. While NATS is away, the end of the block retries for
as long as a lease lasts. Then completing raises `OutcomeUnknown`, and failing lets the lease
expire. `epoch` only grows from holder to holder: store it with the effect and reject smaller ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Protocol, TypeVar

import msgspec

from holdfast import errors
from holdfast.clock import Clock, SystemClock
from holdfast.durations import Duration, seconds
from holdfast.model.codec import Codec
from holdfast.names import encode
from holdfast.retrying import retrying

BUCKET: Final = "once-guard"
HELD_SECONDS: Final = 15.0
"""How long a dead holder blocks its key: longer than a stream's election, in which no lease can be
renewed."""
RENEW_SECONDS: Final = 4.0
"""Three renewals may be lost before the lease ends."""
LOOK_SECONDS: Final = 0.25
"""How often a waiting caller reads the record: one small request, and the caller may be a web
request."""

log = logging.getLogger("holdfast.once")

T = TypeVar("T")


class OnceRecord(msgspec.Struct, omit_defaults=True, frozen=True):
    """The state of one key."""

    state: str
    """`held`, `failed` or `done`; a newer version may know more."""
    token: str = ""
    """The holder's token: tells after a lost answer whether the write was ours."""


CODEC: Final = Codec[OnceRecord](OnceRecord, "a record of app.once")


class StoredOnce(Protocol):
    """A record as it is stored."""

    @property
    def value(self) -> bytes: ...
    @property
    def revision(self) -> int: ...


class OnceStore(Protocol):
    """Where the keys are: a bucket on NATS, or memory."""

    async def put(self, key: str, value: bytes, *, expected: int, ttl: float | None = None) -> int:
        """Write if the key is still at `expected` (0: absent), else raise `Conflict`."""
        ...

    async def get(self, key: str) -> StoredOnce | None:
        """The newest value, or None."""
        ...


class Once:
    """One use of the guard: true for the caller that has to do the work."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[OnceStore]],
        key: str,
        ttl: Duration = "24h",
        timeout: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not key:
            raise errors.InvalidInput("app.once needs a key that is not empty")
        self.key = key
        self.epoch = 0
        """The revision at which the key was won; 0 for a caller that is not first."""
        self._name = encode(key)
        self._ttl = seconds(ttl, "ttl")
        if self._ttl < 1:
            raise errors.InvalidInput("app.once: ttl is at least a second")
        self._timeout = timeout
        self._connect = connect
        self._clock = clock or SystemClock()
        self._token = secrets.token_hex(8)
        self._revision = 0
        self._turn = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None

    def __bool__(self) -> bool:
        return self.epoch > 0

    def __repr__(self) -> str:
        return f"<Once {self.key}: {'first' if self else 'not first'}>"

    async def __aenter__(self) -> Once:
        self._data = await self._connect()
        looked = False
        try:
            async with asyncio.timeout(self._timeout):
                while not await self._enter():
                    looked = True
                    await self._clock.sleep(LOOK_SECONDS)
        except TimeoutError:
            if not looked:
                raise errors.NotConnected(
                    f"whether {self.key!r} is done is unknown: NATS did not answer within "
                    f"{self._timeout:g} s"
                ) from None
            raise errors.StillHeld(
                f"{self.key!r} is held by somebody else, who has not finished within "
                f"{self._timeout:g} s"
            ) from None
        if self:
            self._renewing = asyncio.create_task(self._renew(), name=f"once {self.key}")
        return self

    async def _enter(self) -> bool:
        """Try to win the key; False: it is held."""
        found = await self._away(lambda: self._data.get(self._name))
        if found is None:
            won = await self._write("held", 0, HELD_SECONDS)
            self.epoch = self._revision = won
            return won > 0
        try:
            record = CODEC.decode(found.value)
        except errors.Unreadable as error:
            raise errors.Unreadable(
                f"whether {self.key!r} is done is unknown: {error}. 'holdfast doctor' names the "
                "command that removes the record; then the work is done again"
            ) from None
        if record.token == self._token:  # our own write, whose answer was lost
            self.epoch = self._revision = found.revision
            return True
        if record.state == "failed":
            self.epoch = self._revision = await self._write("held", found.revision, HELD_SECONDS)
            return self.epoch > 0
        return record.state == "done"

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if not self._renewing:
            return
        if kind is None:
            await self.complete()
        else:
            with contextlib.suppress(errors.BrokerError):  # the lease ends by itself
                await self.fail()

    async def complete(self) -> None:
        """The work is done: nobody does it again within `ttl`.

        `ClaimLost`: somebody took over. `OutcomeUnknown`: NATS is away.
        """
        if not await self._end():
            return
        async with self._turn:
            try:
                done = await self._write("done", self._revision, self._ttl, HELD_SECONDS)
            except errors.TryAgain as error:
                raise errors.OutcomeUnknown(
                    f"{self.key!r} could not be marked as done ({error}): somebody may do it again"
                ) from error
            if not done:
                raise errors.ClaimLost(
                    f"{self.key!r} was taken over by somebody else: the work may be done twice"
                )

    async def fail(self) -> None:
        """The work is not done: the next caller may do it at once."""
        if await self._end():
            async with self._turn:
                await self._write("failed", self._revision, HELD_SECONDS, HELD_SECONDS)

    async def _end(self) -> bool:
        """Stop renewing; False if the work has already ended, or was never ours."""
        task, self._renewing = self._renewing, None
        if task is None:
            return False
        task.cancel()
        await asyncio.wait([task])
        return True

    async def _renew(self) -> None:
        while True:
            await self._clock.sleep(RENEW_SECONDS)
            async with self._turn:
                won = await self._write("held", self._revision, HELD_SECONDS)
            if not won:
                log.warning("%r was taken over: this holder was too slow", self.key)
                return
            self._revision = won

    async def _write(self, state: str, expected: int, ttl: float, seconds: float = math.inf) -> int:
        """Write until the outcome is known: the new revision, or 0 if somebody else wrote."""
        body = CODEC.encode(OnceRecord(state, self._token))

        async def put() -> int:
            return await self._data.put(self._name, body, expected=expected, ttl=ttl)

        while True:
            try:
                return await self._away(put, seconds)
            except errors.Conflict:
                found = await self._away(lambda: self._data.get(self._name), seconds)
            if found is None or _token(found.value) != self._token:
                return 0
            if found.value == body:
                return found.revision
            expected = found.revision  # our own renewal, cancelled before its answer arrived

    async def _away(self, step: Callable[[], Awaitable[T]], seconds: float = math.inf) -> T:
        return await retrying(step, clock=self._clock, what=f"once {self.key!r}", seconds=seconds)


def _token(body: bytes) -> str:
    """Whose record it is; nobody's if it cannot be read."""
    try:
        return CODEC.decode(body).token
    except errors.Unreadable:
        return ""
