"""Transactional enqueue for SQLAlchemy: a run that is sent if, and only if, the session commits.

    from holdfast.integrations import outbox

    with Session(engine) as session, session.begin():
        session.add(Order(id=42))
        outbox.enqueue(session, charge, 42)               # a row of `holdfast_outbox`

    relay = outbox.Relay(app, engine)                     # holdfast relay shop.db:relay

`enqueue` works with `Session` and `AsyncSession`, and needs no connection to NATS. A relay sends
the rows; what it guarantees is in `holdfast.integrations.relay`. The table is part of `metadata`,
for Alembic's `target_metadata`; `create(engine)` creates it without Alembic.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from typing import Any, Final, ParamSpec, TypeVar, overload

from sqlalchemy import (
    BigInteger,
    DateTime,
    Engine,
    Integer,
    LargeBinary,
    String,
    Text,
    delete,
    func,
    select,
    text,
    update,
)
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from holdfast.app import Holdfast
from holdfast.errors import TryAgain
from holdfast.integrations import relay
from holdfast.integrations.relay import ENTRY, STUCK_SECONDS, WaitingRow, entry_of
from holdfast.job import Sendable

__all__ = ["OutboxRow", "Relay", "create", "enqueue", "metadata", "ordered"]

T = TypeVar("T")
P = ParamSpec("P")
Call = Callable[[Callable[[Connection], Any]], Awaitable[Any]]

TABLE: Final = "holdfast_outbox"
KEY_CHARS: Final = 400
"""The longest run id."""


class _Base(DeclarativeBase):
    pass


class OutboxRow(_Base):
    """A run that waits to be sent. Rows are deleted once they are sent.

    Those that the server refused stay, with the reason in `error`:

        refused = select(OutboxRow).where(OutboxRow.error.is_not(None))
        for row in session.scalars(refused):
            print(row.id, row.job, row.error)
            row.error = None  # have it sent again
    """

    __tablename__ = TABLE

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    )
    job: Mapped[str] = mapped_column(String(128))
    run: Mapped[str] = mapped_column(String(KEY_CHARS))
    order_key: Mapped[str | None] = mapped_column(String(KEY_CHARS))
    entry: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    error: Mapped[str | None] = mapped_column(Text)
    """Why it cannot be sent; such a row is left alone until this is set to NULL."""


metadata = _Base.metadata


@overload
def create(engine: Engine | Connection) -> None: ...
@overload
def create(engine: AsyncEngine) -> Awaitable[None]: ...
def create(engine: Engine | Connection | AsyncEngine) -> Awaitable[None] | None:
    """Create the table if it is missing, for a project without migrations.

    With an async engine: `await outbox.create(engine)`.
    """
    if isinstance(engine, AsyncEngine):
        return _create_async(engine)
    metadata.create_all(engine)
    return None


async def _create_async(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)


def enqueue(
    session: Session | AsyncSession, job: Sendable[P, Any], *args: P.args, **kwargs: P.kwargs
) -> str:
    """Send a run when the session commits; returns its id.

    Takes what `job.enqueue` takes, except `on_duplicate`. The run waits for a worker, whatever the
    job's `fallback`.

        with Session(engine) as session, session.begin():
            session.add(Order(id=42))
            outbox.enqueue(session, charge.options(key="42"), 42)
    """
    return _add(session, None, job, args, kwargs)


class ordered:
    """`enqueue` for runs that go to the queue in the order in which they were written.

    The order holds per key:

        outbox.ordered("order-42").enqueue(session, ship, 42)
    """

    def __init__(self, key: str) -> None:
        self._key = key

    def enqueue(
        self,
        session: Session | AsyncSession,
        job: Sendable[P, Any],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> str:
        """Send a run when the session commits, after earlier ones with the same key."""
        return _add(session, self._key, job, args, kwargs)


def _add(
    session: Session | AsyncSession,
    key: str | None,
    job: Sendable[..., Any],
    args: Any,
    kwargs: Any,
) -> str:
    entry = entry_of(job, args, kwargs)
    row = OutboxRow(job=entry.job, run=entry.run, order_key=key, entry=ENTRY.encode(entry))
    session.add(row)
    return entry.run


class Relay(relay.Relay):
    """Sends the rows of `holdfast_outbox`, from a database with a sync or an async engine.

    Run it as a separate process (`holdfast relay shop.db:relay`), or inside the workers:
    `app.on_startup(relay.start)` and `app.on_shutdown(relay.aclose)`.
    """

    def __init__(
        self, app: Holdfast, engine: Engine | AsyncEngine, *, batch: int = relay.BATCH
    ) -> None:
        super().__init__(app, _Table(engine), batch=batch)


class _Table:
    """The table behind an engine."""

    def __init__(self, engine: Engine | AsyncEngine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "holdfast-outbox")
        """For an engine that blocks: everything that one transaction does happens in one thread."""

    @asynccontextmanager
    async def batch(self, most: int) -> AsyncIterator[_Batch]:
        """Lock the oldest rows until the end of the block."""
        try:
            async with self._connection() as call:
                batch = _Batch(call)
                batch.rows = await call(lambda connection: _oldest(connection, most))
                yield batch
        except (SQLAlchemyError, OSError) as error:
            raise TryAgain(f"the database of the outbox: {error}") from error

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Call]:
        """A transaction, as a way to call a function with its connection."""
        engine = self._engine
        if isinstance(engine, AsyncEngine):
            async with AsyncExitStack() as ending:
                connection = await _connected(ending.enter_async_context(engine.connect()))
                async with connection.begin():
                    yield connection.run_sync
            return
        held: list[Connection] = []
        try:
            await _connected(self._in_thread(lambda: held.append(engine.connect())))
            yield lambda function: self._in_thread(lambda: function(held[0]))
            await self._in_thread(lambda: held[0].commit())
        finally:
            # A cancelled connect still ends in the thread; the thread closes it afterwards.
            await self._in_thread(lambda: _close(held))

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


async def _connected(connecting: Awaitable[T]) -> T:
    """Errors to wait out; some drivers raise errors of their own while they connect."""
    try:
        return await connecting
    except Exception as error:
        raise TryAgain(f"no connection to the database of the outbox: {error}") from error


def _close(held: list[Connection]) -> None:
    """Close a connection, if there is one; rolls back what was not committed."""
    for connection in held:
        connection.close()


class _Batch:
    """Rows that are locked by an open transaction."""

    def __init__(self, call: Call) -> None:
        self.rows: Sequence[WaitingRow] = ()
        self._call = call

    async def sent(self, ids: Sequence[int]) -> None:
        """Delete rows."""
        gone = delete(OutboxRow).where(OutboxRow.id.in_(ids))
        await self._call(lambda connection: connection.execute(gone))

    async def refused(self, row: int, why: str) -> None:
        """Keep a row, with the reason why it cannot be sent."""
        change = update(OutboxRow).where(OutboxRow.id == row).values(error=why)
        await self._call(lambda connection: connection.execute(change))


def _oldest(connection: Connection, most: int) -> Sequence[WaitingRow]:
    if connection.dialect.name == "postgresql":  # a relay that froze must not hold its rows forever
        limit = f"SET LOCAL idle_in_transaction_session_timeout = '{STUCK_SECONDS}s'"
        connection.execute(text(limit))
    columns = (OutboxRow.id, OutboxRow.order_key, OutboxRow.entry)
    rows = select(*columns).where(OutboxRow.error.is_(None)).order_by(OutboxRow.id).limit(most)
    return [WaitingRow(*row) for row in connection.execute(rows.with_for_update())]
