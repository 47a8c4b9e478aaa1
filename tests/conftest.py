"""Fixtures for every test: a nats-server for each module, one cluster for each process.

pytest-asyncio runs `async def test_…`, each in an event loop that is closed afterwards: the
standard library's loop, so that no test depends on uvloop. Fixtures are plain functions.

The shared `nats` and `cluster` are for tests that leave them as they found them. A test that kills,
stops or fills a server starts its own: `with Server(fast=True) as server: …`. Without a nats-server
binary these are errors, never skips.

`make test` runs several pytest processes at once (pytest-xdist). A file is the unit of work, so a
module's server and its namespaces belong to one process. `tests/spread.py` says in which order.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from holdfast.server import Cluster, Server
from tests.spread import SHORT, known, spread

_numbers = itertools.count(1)

MEMORY = Path("/dev/shm")
ROOM_BYTES = 4 * 2**30
"""The suite keeps less than 1 GiB of files at a time, and a machine needs the rest for its work."""


def _keep_files_in_memory() -> None:
    """Make temporary files, stores of servers above all, on a file system in memory.

    A disk costs a nats-server five times as much processor time, nearly all of it in the kernel.
    Containers often have only 64 MiB there, or allow no programs: their files stay on the disk.
    """
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return
    if shutil.disk_usage(MEMORY).free < ROOM_BYTES or os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
        return
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


_keep_files_in_memory()

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files so that computing and waiting ones run beside each other."""
    costs = known()
    files = {file: costs.get(file, SHORT) for file in map(_file, items)}
    order = spread(files, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    place = {file: number for number, file in enumerate(order)}
    items.sort(key=lambda item: place[_file(item)])


def _file(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]


@pytest.fixture(scope="module")
def nats() -> Iterator[Server]:
    """One running server, shared by a module's tests; keep to your own `namespace` on it.

    Not shared by the session: each namespace has a dozen streams, and the more streams a server
    has, the longer it takes to create the next one.
    """
    with Server(fast=True) as server:
        yield server
        server.kill()  # its store is deleted, and a clean stop with many streams takes seconds


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """One running cluster of three, shared by the session, started on first use."""
    with Cluster(fast=True) as cluster:
        yield cluster


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Record a measurement that is not asserted; all are printed below the results."""

    def write(text: str) -> None:
        request.node.user_properties.append(("measured", f"{request.node.name}: {text}"))

    return write


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [r for rs in terminalreporter.stats.values() for r in rs]
    measured = [
        text
        for report in reports
        if getattr(report, "when", "") == "teardown"
        for name, text in report.user_properties
        if name == "measured"
    ]
    if measured:
        terminalreporter.section("measured")
        for line in measured:
            terminalreporter.write_line(line)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory with a short path: a Unix socket's path has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="hf-") as folder:
        yield Path(folder)


@pytest.fixture
def namespace() -> str:
    """A short name, unique on this server: the prefix of all subjects."""
    return f"t{next(_numbers):x}{secrets.token_hex(2)}"
