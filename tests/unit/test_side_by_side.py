"""`make test` runs two sessions of pytest at the same time, and hides nothing of either."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "side_by_side.py"


def run(*lines: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, TOOL, *lines], capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_commands_run_at_the_same_time(tmp_path: Path) -> None:
    """Two that wait for each other both end, and are shown one after the other, whole."""
    one, two = tmp_path / "one", tmp_path / "two"
    wait = "sh -c 'echo {0}; touch {1}; until [ -e {2} ]; do sleep 0.01; done; echo over >&2'"
    first, second = wait.format("first", one, two), wait.format("second", two, one)
    assert run(first, second) == (0, [first, "first", "over", second, "second", "over"])


def test_failure_of_any_is_the_exit_code_and_ends_no_other(tmp_path: Path) -> None:
    """Whichever fails, the others run to their end, and the whole has failed."""
    mark = tmp_path / "mark"
    for lines in (["sh -c 'exit 3'", f"touch {mark}"], [f"touch {mark}", "sh -c 'exit 3'"]):
        assert run(*lines)[0] == 3
        assert mark.exists()
        mark.unlink()
    assert run("sh -c 'kill -9 $$'", "true")[0] != 0
    assert run("true", "true")[0] == 0
