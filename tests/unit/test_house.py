"""`tools/house.py` counts what it says it counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PASSAGE = "\n".join(f"    total = total + number_{n} * {n}" for n in range(6))
ONE = f'''"""A module."""
import os

WAIT_SECONDS = 5.0
# Two heartbeats.
LEASE_SECONDS = 6.0
GRACE_SECONDS = 7.0
"""As long as Kubernetes waits."""


class Plan:
    pass


def first(total):
{PASSAGE}
    return total
'''
TWO = f'''"""Another."""


class Plan:
    """One more."""


def second(total):
    # The same again.
{PASSAGE}
    return total + 1
'''


def test_house_counts_by_its_rules(tmp_path: Path) -> None:
    """Lines, files, repeats, comments and reasons of a tree that is known."""
    package = tmp_path / "src" / "holdfast" / "model"
    package.mkdir(parents=True)
    (package / "one.py").write_text(ONE)
    (package / "two.py").write_text(TWO)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("def test_a(): ...\nasync def test_b(): ...\n")
    command = [sys.executable, str(ROOT / "tools" / "house.py"), "--no-flows", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = dict(line.strip().split("  ", 1) for line in done.stdout.splitlines()[1:])
    found = {name: value.strip() for name, value in rows.items()}
    lines = ONE.count("\n") + TWO.count("\n")
    assert found == {
        "lines": f"{lines}",
        "files": "2",
        "duplicated passages": "1 (6 lines)",
        "class names used twice": "1",
        "own-line comments": "2",
        "*_SECONDS without a reason": "1 of 3",
        "test functions": "2",
        "model": f"{lines} in 2",
    }


def test_house_refuses_what_is_no_tree(tmp_path: Path) -> None:
    """A directory without the package is an error that says what to name."""
    command = [sys.executable, str(ROOT / "tools" / "house.py"), "--no-flows", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "has no src/holdfast: name a commit or a clone" in done.stderr
