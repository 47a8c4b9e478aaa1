"""A child process that does not outlive its parent.

A dedicated thread spawns each child and waits for it to exit. The kernel's parent-death signal is
tied to the *thread* that spawned, so that thread must live as long as the child. If the process
dies, however it dies, the kernel kills the child.

Every child runs in a new session: Ctrl-C reaches only the parent, which stops its children in the
order it wants. Not guaranteed: outside Linux a child survives a parent killed by SIGKILL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import IO

# PR_SET_PDEATHSIG must be set in the child. A preexec_fn would run Python between fork and exec,
# which can deadlock in a threaded process; this launcher has no threads and execs the command.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent died before its child had started")
os.execv(sys.argv[2], sys.argv[2:])
"""


class Child:
    """One running process; `exited` is set once it has ended and was reaped."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str = "child",
        env: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
        on_exit: Callable[[], None] | None = None,
    ) -> None:
        """Start it. Without `output` it inherits ours; `on_exit` runs in the waiting thread."""
        self.exited = threading.Event()
        self._on_exit = on_exit
        spawned: Future[subprocess.Popen[bytes]] = Future()
        keeper = threading.Thread(
            target=self._hold,
            args=(list(command), env, output, pass_fds, spawned),
            name=name,
            daemon=True,
        )
        keeper.start()
        self._popen = spawned.result()
        self.pid = self._popen.pid

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while running."""
        return self._popen.returncode if self.exited.is_set() else None

    def signal(self, number: int) -> None:
        """Send a signal; does nothing once the process has exited."""
        if not self.exited.is_set():
            self._popen.send_signal(number)

    def terminate(self) -> None:
        """Ask it to shut down cleanly."""
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and wait until it has exited."""
        self.signal(signal.SIGKILL)
        self.exited.wait()

    def _hold(
        self,
        command: list[str],
        env: Mapping[str, str] | None,
        output: IO[bytes] | None,
        pass_fds: Sequence[int],
        spawned: Future[subprocess.Popen[bytes]],
    ) -> None:
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
        try:
            popen = subprocess.Popen(
                command,
                env=dict(env) if env is not None else None,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except BaseException as error:  # noqa: BLE001 - the caller raises it, from result()
            spawned.set_exception(error)
            return
        spawned.set_result(popen)
        popen.wait()
        self.exited.set()
        if self._on_exit:
            self._on_exit()


def ending(code: int) -> str:
    """How a process ended, for messages."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
