"""Everything at once for 39 seconds: `make chaos` runs it for five minutes, with more processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = 15201
"""In 39 seconds it deals ten faults of nine kinds, one of them to a server of NATS."""


@pytest.mark.timeout(400)
def test_chaos_keeps_every_promise(tmp_path: Path) -> None:
    """Fixed seed: kills, freezes, cuts, lost answers, a wrong clock, a server down: all kept."""
    out = tmp_path / "chaos"
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "chaos", "--small", "--fast", "--minutes", "0.65"]
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
    dealt = found["plan"]["faults"]
    assert len(found["measures"]["faults"]) == len(dealt) > 8
    assert len({fault["kind"] for fault in dealt}) > 7
    assert found["operations"]["ok"] > 100
    assert found["measures"]["slots"] > 30
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert "http://www.w3.org/2000/svg" in page
    assert "<script" not in page
