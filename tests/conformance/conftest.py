"""Every test of this suite runs twice: in memory and on a real server."""

from __future__ import annotations

import pytest

from tests.conformance.places import MemoryPlace, Place, ServerPlace


@pytest.fixture(params=["memory", "server"])
def place(request: pytest.FixtureRequest, namespace: str) -> Place:
    """A store in memory, or a bucket on the shared server."""
    if request.param == "memory":
        return MemoryPlace()
    return ServerPlace(request.getfixturevalue("nats").url, namespace)
