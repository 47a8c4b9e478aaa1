"""What every test may use: coroutines as tests, a shared server, one shared cluster.

`async def test_…` runs in a loop of its own, closed afterwards; it is the standard library's loop,
so that a test does not depend on uvloop. Fixtures are plain functions.

The shared `nats` and `cluster` are for tests that leave them as they found them. A test that kills,
stops or fills a server starts its own: `with Server(fast=True) as server: …`. Without a nats-server
binary every one of these is an error, never a skip.

On a build server (`CI` is set) a test that fails is tried once more, at most four in a session, and
named with its error under "failed at first": machines there are shared, and may stall for longer
than any limit. Nowhere else: a test that needs it is a defect, and to be found as one.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import os
import secrets
import sys
from collections.abc import Callable, Iterator

import pytest
from _pytest.runner import runtestprotocol

from holdfast.server import Cluster, Server

SECOND_TRIES = 4 if os.environ.get("CI") else 0

_numbers = itertools.count(1)
_failed_at_first: list[str] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test; on a build server once more when it fails."""
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    failures = [r for r in reports if r.failed]
    if failures and len(_failed_at_first) < SECOND_TRIES:
        _failed_at_first.append(f"{item.nodeid}\n{failures[0].longreprtext}")
        _forget_leftovers()
        item._initrequest()  # type: ignore[attr-defined]  # as the test had never run
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for found in reports:
        hook.pytest_runtest_logreport(report=found)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _forget_leftovers() -> None:
    """What a failed test left open is no fault of the next one."""
    told, sys.unraisablehook = sys.unraisablehook, lambda _: None
    gc.collect()
    sys.unraisablehook = told


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


@pytest.fixture(scope="module")
def nats() -> Iterator[Server]:
    """One running server, shared by a module's tests; keep to your own `namespace` on it.

    Not by the session: each namespace has a dozen streams, and a server makes the next stream the
    more slowly the more it has.
    """
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
    """Print what the tests have measured, and what went wrong on the way."""
    if _failed_at_first:
        terminalreporter.section("failed at first")
        for text in _failed_at_first:
            terminalreporter.write_line(text)
    if _reports:
        terminalreporter.section("measured")
        for line in _reports:
            terminalreporter.write_line(line)


@pytest.fixture
def namespace() -> str:
    """A short name that no other test of this server has: the prefix of all subjects."""
    return f"t{next(_numbers):x}{secrets.token_hex(2)}"
