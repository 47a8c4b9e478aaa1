"""A minute of everything at once: `make chaos` runs it for five, with more processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = 691


@pytest.mark.timeout(400)
def test_chaos_keeps_every_promise(tmp_path: Path) -> None:
    """60 s, fixed seed: kills, freezes, partitions, wrong clocks, servers down; 0 violations."""
    out = tmp_path / "chaos"
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "chaos", "--small", "--minutes", "1"]
    done = subprocess.run(
        [*command, "--seed", str(SEED), "--out", str(out)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "summary.json").read_text())
    assert found["ok"]
    assert len(found["measures"]["faults"]) == len(found["plan"]["faults"]) > 8
    assert found["operations"]["ok"] > 300
    assert found["measures"]["slots"] > 60
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert "http://www.w3.org/2000/svg" in page
    assert "<script" not in page
