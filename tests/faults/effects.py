"""An effect store outside the system, as a user would write one: unique by run id.

Files only, so that it survives kill -9 of any writer at any point: starts are lines appended in one
write each; an effect is a complete file that can be created once.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any


class Effects:
    """Starts and effects under one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._done = root / "done"
        self._done.mkdir(parents=True, exist_ok=True)
        self._starts = root / "starts.jsonl"

    def started(self, **facts: Any) -> None:
        """Append a line for a started handler."""
        line = json.dumps({**facts, "pid": os.getpid(), "at": time.time()}) + "\n"
        handle = os.open(self._starts, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)

    def apply(self, run: str, **facts: Any) -> bool:
        """Record the effect, once per run id; False if it was already recorded."""
        path = self._done / hashlib.sha256(run.encode()).hexdigest()
        draft = self.root / f"draft-{os.getpid()}-{path.name}"
        draft.write_text(json.dumps({"run": run, "at": time.time(), **facts}))
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def open(self, gate: str) -> None:
        """Let the runs that wait for a gate end."""
        (self.root / gate).touch()

    def starts(self) -> list[dict[str, Any]]:
        """Every start, in order."""
        if not self._starts.exists():
            return []
        return [json.loads(line) for line in self._starts.read_text().splitlines() if line]

    def done(self) -> list[dict[str, Any]]:
        """Every effect."""
        return [json.loads(p.read_text() or "{}") for p in self._done.iterdir()]

    def count(self) -> int:
        """How many effects there are."""
        return sum(1 for _ in self._done.iterdir())

    def starts_per_run(self) -> Counter[str]:
        """How often each run was started."""
        return Counter(start["run"] for start in self.starts())
