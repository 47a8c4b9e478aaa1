"""What `outbox.enqueue` adds to a transaction, beside a plain insert; on a real Postgres.

    python -m benchmarks.outbox

Each kind of transaction inserts an order: alone, with a second plain row of the same size, and with
a row of the outbox. The kinds alternate in one process, so that a busy machine slows all of them
down. No relay runs: it works beside the transactions, in its own process.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from holdfast import Holdfast
from holdfast.integrations import outbox
from tests.postgres import Postgres

TRANSACTIONS = 2_000
"""Of each kind: the medians of two runs on a busy machine then differ by a few percent."""

app = Holdfast("outbox-cost")


@app.job
async def charge(order: int) -> None:
    """Never executed."""


def order(session: Session) -> int:
    """The row that every transaction writes."""
    return session.scalar(text("INSERT INTO orders (total) VALUES (5) RETURNING id")) or 0


def alone(session: Session) -> None:
    """One insert."""
    order(session)


def with_row(session: Session) -> None:
    """Two inserts, the second of about the size of a row of the outbox."""
    note = {"o": order(session), "n": "x" * 150}
    session.execute(text("INSERT INTO notes (order_id, note) VALUES (:o, :n)"), note)


def with_run(session: Session) -> None:
    """An insert and a run."""
    outbox.enqueue(session, charge, order(session))


KINDS: dict[str, Callable[[Session], None]] = {
    "insert": alone,
    "insert + plain row": with_row,
    "insert + outbox.enqueue": with_run,
}
SCHEMA = (
    "CREATE TABLE orders (id bigserial PRIMARY KEY, total int NOT NULL)",
    "CREATE TABLE notes (id bigserial PRIMARY KEY, order_id bigint NOT NULL, note text NOT NULL)",
)


def main() -> None:
    """Measure and print one line for each kind."""
    postgres = Postgres()
    postgres.start()
    try:
        engine = create_engine(postgres.url)
        with engine.begin() as connection:
            for statement in SCHEMA:
                connection.execute(text(statement))
        outbox.create(engine)
        taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(TRANSACTIONS):
            for kind, write in KINDS.items():
                began = time.perf_counter()
                with Session(engine) as session, session.begin():
                    write(session)
                taken[kind].append(1e3 * (time.perf_counter() - began))
        for kind, times in taken.items():
            line = f"{kind:24} median {statistics.median(times):.2f} ms"
            sys.stdout.write(f"{line}, mean {statistics.fmean(times):.2f} ms\n")
        engine.dispose()
    finally:
        postgres.close()


if __name__ == "__main__":
    main()
