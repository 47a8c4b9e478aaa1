"""Makes servers reload the logins of a folder after each change: by a signal, or by a command."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Final

from holdfast.errors import ConfigError

COMMAND_SECONDS: Final = 60.0
"""How long the command may take: typically it copies a file to a few machines."""


def send_reload(config: Path, pid_file: Path) -> None:
    """Make the server of a PID file reload its configuration."""
    try:
        os.kill(int(pid_file.read_text(encoding="ascii")), signal.SIGHUP)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{config} has changed, and the server of {str(pid_file)!r} could not be signalled: "
            f"{error}"
        ) from None


class Reloading:
    """Makes the servers of one configuration reload it when it has changed.

    A failure is retried at the next check. `at_once`: assume that it has just changed, since this
    process may have been killed between a change and its reload.
    """

    def __init__(
        self, config: Path, pid_file: Path | None, command: str, *, at_once: bool = False
    ) -> None:
        self._config = config
        self._pid_file = pid_file
        self._command = shlex.split(command)
        self._told = None if at_once else self._stamp()

    def _stamp(self) -> tuple[int, int]:
        found = self._config.stat()
        return found.st_mtime_ns, found.st_ino

    def look(self) -> None:
        """Reload the servers if the configuration has changed; raises `ConfigError`."""
        now = self._stamp()
        if now == self._told:
            return
        if self._pid_file is not None:
            send_reload(self._config, self._pid_file)
        if self._command:
            self._run()
        self._told = now

    def _run(self) -> None:
        what = f"{self._config} has changed, and {shlex.join(self._command)!r}"
        try:
            ended = subprocess.run(
                self._command, capture_output=True, timeout=COMMAND_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{what} could not be run: {error}") from None
        if ended.returncode:
            said = ended.stderr.decode("utf-8", "replace").strip()[-500:]
            raise ConfigError(f"{what} ended with code {ended.returncode}: {said or 'no message'}")
