"""The faults of the founding article: there in the unmodified libraries, and gone here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.faults.processes import ROOT

QUICK = ["lease", "pickle"]
"""What takes a few seconds; `make soak` shows all."""


@pytest.mark.timeout(600)
def test_story_of_each_bug_is_true() -> None:
    """The documented script ends with 0: it saw the bug there, and did not see it here."""
    stories = [] if os.environ.get("HOLDFAST_SOAK") else QUICK
    command = [sys.executable, "-W", "ignore", "examples/taskiq_bugs.py", *stories]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as they are:    BUG" in done.stdout
    assert "with Holdfast:  BUG" not in done.stdout
