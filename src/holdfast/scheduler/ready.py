"""A file that exists while a process is ready, for probes that can only look at files."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger("holdfast.scheduler")


class ReadyFile:
    """Made when ready, removed when not, and at the end; without a path it does nothing."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._there: bool | None = None

    def set(self, ready: bool) -> None:
        """Make the file or remove it; also one that a killed process left behind."""
        if self._path is None or ready == self._there:
            return
        try:
            if ready:
                self._path.write_text(f"{os.getpid()}\n")
            else:
                self._path.unlink(missing_ok=True)
            self._there = ready
        except OSError as error:
            log.error("ready file %s cannot be written: %s", self._path, error.strerror)
