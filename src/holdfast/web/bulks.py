"""Bulk actions: one verb applied to many runs, with its progress on the server.

The runs are read page by page while they are acted on, newest first, each with the same action as a
single one, so the audit names every run. The set of runs does not grow meanwhile: runs that were
created after the confirmation page stay untouched, and so do those that have ended since, unless
they are to be cancelled.

The web process that was asked does the work and writes its progress every second, so every process
shows it, and any can continue it after the first one stopped. Runs that were handled since the last
write are then tried again and reported as refused, since a run cannot be cancelled twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import msgspec

from holdfast.broker import Bucket
from holdfast.durations import DAY
from holdfast.errors import Conflict, HoldfastError, NotFound, PermissionDenied, RunError
from holdfast.model.codec import Codec, Count, Instant
from holdfast.status import actions as table
from holdfast.status.listing import CANCELLABLE, SENT_AGAIN, RunFilter, RunPage, RunPages
from holdfast.web.auth import SESSIONS
from holdfast.web.services import Access

log = logging.getLogger("holdfast.web")

MOST: Final = 10_000
"""Most runs of one bulk action, after which it pauses, so that an operator can check the result
before continuing."""
AT_ONCE: Final = 20
"""Runs acted on at a time: hides the round trips without flooding the server."""
PAGE: Final = 200
"""Runs read at a time, which is also how many may be tried again after a stop."""
REFUSALS: Final = 100
"""Refused runs that are listed by name: the record has to fit one message."""
SAVE_SECONDS: Final = 1.0
"""How often progress is written: its page refreshes about as often."""
SILENT_SECONDS: Final = 15.0
"""How long without progress until it counts as interrupted: far longer than a slow page of runs."""
KEPT_SECONDS: Final = 30 * DAY
"""How long its outcome is kept: as long as the history of runs."""


class Verb(msgspec.Struct, frozen=True):
    """What can be done with many runs."""

    name: str
    states: tuple[str, ...]
    """The states of runs that it applies to."""
    button: str
    effect: str
    admin: bool = False


VERBS: Final = {
    verb.name: verb
    for verb in (
        Verb(
            "cancel",
            CANCELLABLE,
            "Cancel them",
            "Waiting runs will not start; running handlers are interrupted. None is retried.",
        ),
        Verb(
            "retry",
            SENT_AGAIN,
            "Run them again",
            "Dead letters are sent again under the same run id, failed runs start their next "
            "attempt now.",
        ),
        Verb(
            "delete",
            ("dead", "lost"),
            "Remove for good",
            "Their dead letters are removed with their payloads; the history of the runs stays.",
            admin=True,
        ),
    )
}


class BulkRecord(msgspec.Struct, omit_defaults=True):
    """One bulk action and how far it is."""

    verb: str = ""
    who: str = ""
    started: Instant = 0.0
    asked: Instant = 0.0
    """When the runs were counted: later ones are not included."""
    filters: dict[str, str] = {}
    """The filter, with absolute times; or `runs`."""
    runs: list[str] = []
    """The selected runs that are left."""
    states: list[str] = []
    """The states that are left to search, the first one from `cursor` on."""
    cursor: str = ""
    expected: Count = 0
    """How many runs the confirmation page counted."""
    limit: Count = 0
    """Pause after this many."""
    done: Count = 0
    refused: Count = 0
    reasons: list[tuple[str, str]] = []
    """The first refused runs, and why."""
    at: Instant = 0.0
    """When this was written."""
    stopped: bool = False
    """Whether its process stopped before the end."""
    ended: Instant = 0.0

    @property
    def handled(self) -> int:
        return self.done + self.refused

    @property
    def over(self) -> bool:
        """Whether no run is left."""
        return not (self.runs or self.states)

    def state(self, now: float) -> str:
        """`running`, `complete`, `paused` at its limit, or `interrupted`."""
        if self.ended:
            return "complete" if self.over else "paused"
        silent = self.stopped or now - self.at >= SILENT_SECONDS
        return "interrupted" if silent else "running"


RECORD: Final = Codec[BulkRecord](BulkRecord, "a bulk action")

Filters = Callable[[Access, BulkRecord, str], RunFilter]
"""What to list for a bulk action in one state."""


class Bulks:
    """The bulk actions of one namespace; those under way in this process are its tasks."""

    def __init__(self, filters: Filters) -> None:
        self._filters = filters
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, by: Access, record: BulkRecord) -> str:
        """Begin one; returns its id."""
        id, record.who, record.limit = secrets.token_hex(6), by.user.name, MOST
        record.started = record.at = by.client.broker.server_now()
        revision = await _bucket(by).put(
            _key(id), RECORD.encode(record), expected=0, ttl=KEPT_SECONDS
        )
        self._run(by, id, record, revision)
        return id

    async def resume(self, by: Access, id: str) -> None:
        """Continue one that was interrupted, or that paused at its limit."""
        record, revision = await self._read(by, id)
        now = by.client.broker.server_now()
        if VERBS[record.verb].admin and not by.user.may("admin"):
            raise PermissionDenied("only an admin may remove dead letters for good")
        if (state := record.state(now)) not in ("paused", "interrupted"):
            raise RunError(f"the bulk action is {state}: there is nothing to continue")
        if record.ended:
            record.limit = record.handled + MOST
        record.ended, record.at, record.stopped = 0.0, now, False
        revision = await _write(by, id, record, revision)
        self._run(by, id, record, revision)

    async def find(self, by: Access, id: str) -> BulkRecord:
        """How far it is, whichever process does it."""
        return (await self._read(by, id))[0]

    async def _read(self, by: Access, id: str) -> tuple[BulkRecord, int]:
        bucket = _bucket(by)
        entry = await bucket.get(_key(id)) if id.isalnum() and id.isascii() else None
        record = bucket.read(RECORD.decode, entry) if entry else None
        if entry is None or record is None or record.verb not in VERBS:
            raise NotFound("no such bulk action: see the audit for what was done")
        return record, entry.revision

    def _run(self, by: Access, id: str, record: BulkRecord, revision: int) -> None:
        work = _Work(by, id, record, revision, self._filters)
        task = asyncio.create_task(work.run(), name="holdfast-bulk")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Stop the actions of this process: the connection is about to be closed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Work:
    """The work on one bulk action, in one process."""

    def __init__(
        self, by: Access, id: str, record: BulkRecord, revision: int, filters: Filters
    ) -> None:
        self._by = by
        self._id = id
        self._record = record
        self._revision = revision
        self._filters = filters
        self._saved = by.client.broker.clock.monotonic()

    async def run(self) -> None:
        """Act on all of them; when it fails, the record shows an interrupted action."""
        try:
            async for runs in self._parts():
                await self._act(runs)
            self._record.ended = self._by.client.broker.server_now()
            await self._save()
        except Conflict:
            log.info("bulk action %s is continued by another web process", self._id)
        except Exception:
            log.exception("bulk action %s is interrupted", self._id)
            raise
        finally:
            if not self._record.ended:
                with contextlib.suppress(HoldfastError):
                    self._record.stopped = True
                    await _write(self._by, self._id, self._record, self._revision)

    async def _parts(self) -> AsyncIterator[list[str]]:
        """The runs that are left, a few at a time; progress is saved between them."""
        record = self._record
        while record.runs and record.handled < record.limit:
            yield record.runs[:AT_ONCE]
            record.runs = record.runs[AT_ONCE:]
            await self._save_sometimes()
        while record.states and record.handled < record.limit:
            page = await self._page(record)
            found = [info.run for info in page.runs if info.created <= record.asked]
            for n in range(0, len(found), AT_ONCE):
                yield found[n : n + AT_ONCE]
            record.cursor = page.older
            if not page.older:
                record.states = record.states[1:]
            await self._save_sometimes()

    async def _page(self, record: BulkRecord) -> RunPage:
        services = self._by.services
        pages = RunPages(self._by.client, index=services.run_index, ends=services.ended_index)
        wanted = self._filters(self._by, record, record.states[0])
        return await pages.page(wanted, PAGE, record.cursor)

    async def _act(self, runs: list[str]) -> None:
        for run, why in zip(runs, await asyncio.gather(*map(self._one, runs)), strict=True):
            if why:
                self._record.refused += 1
                if len(self._record.reasons) < REFUSALS:
                    self._record.reasons.append((run, why))
            else:
                self._record.done += 1

    async def _one(self, run: str) -> str:
        """Act on one; returns why it was refused."""
        try:
            return await _ACTS[self._record.verb](self._by, run)
        except HoldfastError as error:
            return str(error)
        except Exception as error:  # an unexpected failure of one run must not stop the others
            log.exception("%s of run %s failed", self._record.verb, run)
            return f"unexpected error: {type(error).__name__}"

    async def _save_sometimes(self) -> None:
        if self._by.client.broker.clock.monotonic() - self._saved >= SAVE_SECONDS:
            await self._save()

    async def _save(self) -> None:
        self._record.at = self._by.client.broker.server_now()
        self._revision = await _write(self._by, self._id, self._record, self._revision)
        self._saved = self._by.client.broker.clock.monotonic()


async def _cancel(by: Access, run: str) -> str:
    return "" if await table.cancel_run(by, run) else "it had already ended"


async def _retry(by: Access, run: str) -> str:
    await table.retry_run(by, run)
    return ""


async def _delete(by: Access, run: str) -> str:
    letter = (await by.runs.find(run)).letter
    if letter is None:
        raise RunError("it has no dead letter", run=run)
    (done,) = await table.drop_dead(by, [letter.sequence])
    return "" if done.result == "dropped" else done.why or "already gone"


_ACTS: Final[dict[str, Callable[[Access, str], Awaitable[str]]]] = {
    "cancel": _cancel,
    "retry": _retry,
    "delete": _delete,
}


def _bucket(by: Access) -> Bucket:
    return Bucket(by.client.broker, by.client.broker.names.bucket(SESSIONS))


def _key(id: str) -> str:
    return f"bulk.{id}"


async def _write(by: Access, id: str, record: BulkRecord, revision: int) -> int:
    body = RECORD.encode(record)
    return await _bucket(by).put(_key(id), body, expected=revision, ttl=KEPT_SECONDS)
