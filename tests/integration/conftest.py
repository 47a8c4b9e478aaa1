"""A separate app for each test, on the shared server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast import Holdfast
from holdfast.server import Server
from tests.integration.support import Seen
from tests.postgres import Postgres


@pytest.fixture
def app(nats: Server, namespace: str) -> Holdfast:
    """An app in its own namespace; a worker closes its connection when it ends."""
    return Holdfast("shop", nats_url=nats.url, namespace=namespace)


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    """A database server for the tests of one file."""
    server = Postgres()
    server.start()
    yield server
    server.close()


@pytest.fixture
def seen() -> Seen:
    """Where handlers report."""
    return Seen()
