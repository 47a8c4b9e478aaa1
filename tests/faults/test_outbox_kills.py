"""Writers, relays, workers, Postgres and NATS are killed; each committed row becomes one run."""

from __future__ import annotations

from holdfast.server import Server
from tests.faults.outbox_kills import Story, tell
from tests.postgres import Postgres


async def test_runs_are_the_commits() -> None:
    """Each committed row is queued once, in the order of its key, and has one effect, also when it
    is sent again after its run has ended."""
    postgres = Postgres()
    postgres.start()
    try:
        with Server() as server:
            story = Story(server, "kills", postgres, minutes=5)
            await tell(story, transactions=60, kills=5)
    finally:
        postgres.close()
