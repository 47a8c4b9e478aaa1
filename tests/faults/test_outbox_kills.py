"""Writers, relays, workers and Postgres are killed; each committed row becomes one run."""

from __future__ import annotations

from holdfast.server import Server
from tests.faults.outbox_kills import Story, tell
from tests.postgres import Postgres


async def test_runs_are_the_commits(nats: Server, namespace: str) -> None:
    """Each committed row is queued once, in the order of its key, and has one effect."""
    postgres = Postgres()
    postgres.start()
    try:
        await tell(Story(nats, namespace, postgres), transactions=60, kills=5)
    finally:
        postgres.close()
