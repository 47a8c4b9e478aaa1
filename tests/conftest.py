"""What every test may use: coroutines as tests, one shared server, one shared cluster.

`async def test_…` runs in a loop of its own, closed afterwards; it is the standard library's loop,
so that a test does not depend on uvloop. Fixtures are plain functions.

The shared `nats` and `cluster` are for tests that leave them as they found them. A test that kills,
stops or fills a server starts its own: `with Server(fast=True) as server: …`. Without a nats-server
binary every one of these is an error, never a skip.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import secrets
from collections.abc import Callable, Iterator

import pytest

from holdfast.server import Cluster, Server

_numbers = itertools.count(1)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine function to its end; leave every other test to pytest."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(scope="session")
def nats() -> Iterator[Server]:
    """One running server, shared by the session; keep to your own `namespace` on it."""
    with Server(fast=True) as server:
        yield server
        server.kill()  # its store goes too, and an orderly end of so many streams takes seconds


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """One running cluster of three, shared by the session, started by the first who asks."""
    with Cluster(fast=True) as cluster:
        yield cluster


_reports: list[str] = []


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Tell a figure that was measured and is not asserted; all of them stand below the results."""

    def write(text: str) -> None:
        _reports.append(f"{request.node.name}: {text}")

    return write


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the tests have measured."""
    if _reports:
        terminalreporter.section("measured")
        for line in _reports:
            terminalreporter.write_line(line)


@pytest.fixture
def namespace() -> str:
    """A short name that no other test of this server has: the prefix of all subjects."""
    return f"t{next(_numbers):x}{secrets.token_hex(2)}"
