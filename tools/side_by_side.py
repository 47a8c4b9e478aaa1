"""Run commands at the same time: `side_by_side.py 'pytest tests/a' 'pytest tests/b'`.

`make test` runs the tests that mostly wait beside those that mostly compute. What the first command
prints is shown as it comes; what another one prints is kept until those before it have ended, and
shown from its beginning. All of them run to their end, whichever fails; the exit code is the first
that is not 0. Ctrl-C reaches them all by the terminal, and each ends in its own way.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

PACE_SECONDS = 0.1


class Command:
    """One that runs; what it prints, on either stream, goes to a file."""

    def __init__(self, line: str, log: Path) -> None:
        self.line = line
        self._log = log
        with log.open("wb") as out:
            command = ["/bin/sh", "-c", f"exec {line}"]
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def show(self) -> int:
        """Show what it has printed, and what it prints from now on; returns its exit code."""
        _write(f"{self.line}\n".encode())
        with self._log.open("rb") as printed:
            while True:
                try:
                    code = self._process.poll()  # before the last look: nothing comes after it
                    _write(printed.read())
                    if code is not None:
                        return code
                    time.sleep(PACE_SECONDS)
                except KeyboardInterrupt:
                    continue  # it has heard the same, and is ending


def _write(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def main(lines: list[str]) -> int:
    """Run them all; returns the first exit code that is not 0."""
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as folder:
        running = [Command(line, Path(folder) / str(n)) for n, line in enumerate(lines)]
        codes = [command.show() for command in running]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
