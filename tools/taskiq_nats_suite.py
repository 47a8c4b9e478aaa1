"""Run taskiq-nats' own test suite against Holdfast's classes: `… taskiq_nats_suite.py CHECKOUT`.

CHECKOUT is a clone of taskiq-nats. The package on the index has no tests, and nothing is copied
here. Only its tests are used; the library is the installed one. `tests/integration/
test_taskiq_like_nats.py` tests the same behaviour in our own words in every build.

The pull broker, the schedule source and the result backend in the suite are ours. Skipped, by name:
the core and the push broker, which have no counterpart (`ResilientPullBroker` is the one to use).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from holdfast.server import Server

LEFT_OUT = ("test_success_broadcast", "test_success_queued", "test_push_based_broker_success")

OPTIONS = "[pytest]\nasyncio_mode = strict\n"  # the suite uses anyio's plugin
CONFTEST = """
import taskiq_nats
from holdfast.integrations import taskiq as ours

taskiq_nats.PullBasedJetStreamBroker = ours.ResilientPullBroker
taskiq_nats.NATSKeyValueScheduleSource = ours.ResilientNATSScheduleSource
taskiq_nats.NATSObjectStoreResultBackend = ours.ResilientNATSResultBackend
"""


def main(checkout: Path) -> int:
    """Run it on a fresh server; returns pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder, Server(fast=True) as server:
        (Path(folder) / "holdfast_swap.py").write_text(CONFTEST, encoding="utf-8")
        (Path(folder) / "pytest.ini").write_text(OPTIONS, encoding="utf-8")
        shutil.copytree(checkout / "tests", Path(folder) / "tests")
        command = [sys.executable, "-m", "pytest", "-v", "-p", "holdfast_swap"]
        command += ["-p", "no:cacheprovider", "-k", " and ".join(f"not {n}" for n in LEFT_OUT)]
        command += ["--rootdir", folder, "tests"]
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"NATS_URLS": server.url, "PYTHONPATH": path}
        return subprocess.run(command, cwd=folder, env=env, check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("which checkout? python tools/taskiq_nats_suite.py PATH")
    sys.exit(main(Path(sys.argv[1]).resolve()))
