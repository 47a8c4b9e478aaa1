"""A child process that does not outlive its parent.

A child is spawned by a thread of its own, which then waits for its end. The kernel's "kill me when
my parent dies" counts the *thread* that spawned: so the thread must live as long as the child,
whoever started it. If the thread's process dies, in whatever way, the kernel kills the child.

Every child has a session of its own: Ctrl-C in the terminal is for the parent, which stops its
children in the order it wants. Not guaranteed: on systems other than Linux a child outlives a
parent that was killed outright.
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

# PR_SET_PDEATHSIG has to be set in the child. A preexec_fn would run Python between fork and exec,
# which may deadlock in a process with threads; this small program has none, and becomes the child.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent died before its child had started")
os.execv(sys.argv[2], sys.argv[2:])
"""


class Child:
    """One running process; `exited` is set when it is gone and reaped."""

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
        """Starts it; output goes to `output`, else where ours goes. `on_exit` runs in a thread."""
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
        """The exit code, negative for a signal; None while it runs."""
        return self._popen.returncode if self.exited.is_set() else None

    def signal(self, number: int) -> None:
        """Send it a signal; one that is gone gets none."""
        if not self.exited.is_set():
            self._popen.send_signal(number)

    def terminate(self) -> None:
        """Ask it to end in order."""
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once; returns when it is gone."""
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
    """How a process ended, in words."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
