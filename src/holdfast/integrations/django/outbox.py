"""Transactional enqueue for Django: a run that is sent if, and only if, the transaction commits.

    from holdfast.integrations.django import outbox

    with transaction.atomic():
        order.save()
        outbox.enqueue(charge, order.id)                  # a row of `holdfast_outbox`

`manage.py holdfast relay` sends the rows; what it guarantees is in `holdfast.integrations.relay`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, ParamSpec, TypeVar

from django.db import Error, connections, router, transaction

from holdfast.app import Holdfast
from holdfast.errors import TryAgain
from holdfast.integrations import relay
from holdfast.integrations.django.apps import project_app
from holdfast.integrations.django.models import OutboxRow
from holdfast.integrations.relay import ENTRY, STUCK_SECONDS, WaitingRow, entry_of
from holdfast.job import Sendable

__all__ = ["OutboxRow", "Relay", "enqueue", "ordered"]

T = TypeVar("T")
P = ParamSpec("P")


def enqueue(job: Sendable[P, Any], *args: P.args, **kwargs: P.kwargs) -> str:
    """Send a run when the transaction commits; returns its id.

    Takes what `job.enqueue` takes, except `on_duplicate`. The run waits for a worker, whatever the
    job's `fallback`.

        with transaction.atomic():
            order.save()
            outbox.enqueue(charge, order.id)
    """
    return _add(None, None, job, args, kwargs)


class ordered:
    """`enqueue` for runs that must reach the queue in the order in which they were written.

    `using` names the database if there are several.
    """

    def __init__(self, key: str | None, *, using: str | None = None) -> None:
        self._key = key
        self._using = using

    def enqueue(self, job: Sendable[P, Any], *args: P.args, **kwargs: P.kwargs) -> str:
        """Send a run when the transaction commits, after earlier ones with the same key."""
        return _add(self._key, self._using, job, args, kwargs)


@functools.cache
def _project_relay() -> Relay:
    return Relay(project_app())


def __getattr__(name: str) -> Relay:
    """`project_relay`, for the command line: made when asked for, since it needs the settings."""
    if name != "project_relay":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _project_relay()


def _add(
    key: str | None, using: str | None, job: Sendable[..., Any], args: Any, kwargs: Any
) -> str:
    entry = entry_of(job, args, kwargs)
    row = OutboxRow(job=entry.job, run=entry.run, order_key=key, entry=ENTRY.encode(entry))
    row.save(using=using, force_insert=True)
    return entry.run


class Relay(relay.Relay):
    """Sends the rows of `holdfast_outbox`: `manage.py holdfast relay`.

    With several databases, one for each: `manage.py holdfast relay shop.relays:orders`.

        orders = Relay(app, using="orders")
    """

    def __init__(
        self, app: Holdfast, *, using: str | None = None, batch: int = relay.BATCH
    ) -> None:
        super().__init__(app, _Table(using or router.db_for_write(OutboxRow)), batch=batch)


class _Table:
    """The table in one of the project's databases."""

    def __init__(self, using: str) -> None:
        self._using = using
        self._thread = ThreadPoolExecutor(1, "holdfast-outbox")
        """Django's connections belong to a thread."""

    @asynccontextmanager
    async def batch(self, most: int) -> AsyncIterator[_Batch]:
        """Lock the oldest rows until the end of the block."""
        block = transaction.atomic(using=self._using)
        try:
            await self._call(lambda: connections[self._using].close_if_unusable_or_obsolete())
            entered: list[None] = []
            try:
                await self._call(lambda: entered.append(block.__enter__()))
                rows = await self._call(lambda: _oldest(self._using, most))
                yield _Batch(rows, self._using, self._call)
            except BaseException as error:
                found = error
                # A cancelled call still ends in the thread, before this one.
                await self._call(lambda: entered and block.__exit__(type(found), found, None))
                raise
            await self._call(lambda: block.__exit__(None, None, None))
        except (Error, OSError) as error:
            await self._call(lambda: connections[self._using].close())
            raise TryAgain(f"the database of the outbox: {error}") from error

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


class _Batch:
    """Rows that are locked by an open transaction."""

    def __init__(
        self, rows: Sequence[WaitingRow], using: str, call: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self.rows = rows
        self._manager = OutboxRow.objects.using(using)
        self._call = call

    async def sent(self, ids: Sequence[int]) -> None:
        """Delete rows."""
        await self._call(lambda: self._manager.filter(id__in=ids).delete())

    async def refused(self, row: int, why: str) -> None:
        """Keep a row, with the reason why it cannot be sent."""
        await self._call(lambda: self._manager.filter(id=row).update(error=why))


def _oldest(using: str, most: int) -> Sequence[WaitingRow]:
    connection = connections[using]
    if connection.vendor == "postgresql":  # a relay that froze must not hold its rows forever
        with connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{STUCK_SECONDS}s'")
    waiting = OutboxRow.objects.using(using).filter(error=None).order_by("id")
    if connection.features.has_select_for_update:
        waiting = waiting.select_for_update()
    return [
        WaitingRow(number, key, bytes(entry))
        for number, key, entry in waiting.values_list("id", "order_key", "entry")[:most]
    ]
