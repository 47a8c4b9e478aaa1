"""A separate app for each test, on the shared server."""

from __future__ import annotations

import pytest

from holdfast import Holdfast
from holdfast.server import Server
from tests.integration.support import Seen


@pytest.fixture
def app(nats: Server, namespace: str) -> Holdfast:
    """An app in its own namespace; a worker closes its connection when it ends."""
    return Holdfast("shop", nats_url=nats.url, namespace=namespace)


@pytest.fixture
def seen() -> Seen:
    """Where handlers report."""
    return Seen()
