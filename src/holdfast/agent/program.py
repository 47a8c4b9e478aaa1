"""Runs a program on the host: its exit code and the start of its output.

A program is over when it exits, even if others still hold its output open: one that starts a daemon
returns at once, and the daemon lives on (and gets EPIPE if it writes to that output). The first 4
MiB of each output are kept and the rest is only counted, so memory stays bounded. On cancellation,
the program is killed with all its children.

The pipes are read here rather than by asyncio's subprocesses: those wait for the end of the output,
keep all of it, and under uvloop the program inherits more pipe ends than it should.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from typing import IO, Any, Final

from holdfast.errors import InvalidInput

MOST_OUTPUT: Final = 4 * 1024 * 1024
"""Bytes kept of each output: far more than a return holds, yet several programs fit into memory."""
READ_BYTES: Final = 64 * 1024
"""The size of a pipe on Linux: one read empties it."""
POLL_SECONDS: Final = 0.05
"""How often to check a program where the system cannot signal its end (no pidfd)."""


async def run_program(words: list[str], cwd: str | None, stdin: str | None) -> dict[str, Any]:
    """Run a program to its end; raises `InvalidInput` if it cannot be started."""
    starting = asyncio.ensure_future(asyncio.to_thread(_start, words, cwd, stdin))
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError:
        with await starting as process:  # cancelled while it was being started
            _kill(process)
        raise
    with process:
        try:
            out, err = _Output(process.stdout), _Output(process.stderr)
            with out.reading(), err.reading():
                await _exit_of(process)
        except asyncio.CancelledError:
            _kill(process)
            raise
    return {"code": process.returncode, "stdout": out.text, "stderr": err.text}


def _start(words: list[str], cwd: str | None, stdin: str | None) -> subprocess.Popen[bytes]:
    with contextlib.ExitStack() as stack:
        given: int | IO[bytes] = subprocess.DEVNULL
        try:
            if stdin is not None:  # a file takes all of it at once; a pipe would have to be fed
                given = stack.enter_context(tempfile.TemporaryFile())
                given.write(stdin.encode())
                given.seek(0)
            return subprocess.Popen(
                words,
                cwd=cwd,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{words[0]!r} cannot be started: {error}") from None


async def _exit_of(process: subprocess.Popen[bytes]) -> None:
    """Wait for the program itself, not for its children."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # macOS, old kernels
        while process.poll() is None:  # noqa: ASYNC110 - nobody announces its end
            await asyncio.sleep(POLL_SECONDS)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program with all its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Output:
    """The start of a program's output; the rest is read and dropped."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        self._descriptor = pipe.fileno()
        self._kept = bytearray()
        self._dropped = 0
        os.set_blocking(self._descriptor, False)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read while the program runs; at the end, read what is left in the pipe."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._descriptor, self._ready, loop)
        try:
            yield
        finally:
            loop.remove_reader(self._descriptor)
        for _ in range(MOST_OUTPUT // READ_BYTES):  # a child that still prints must not block us
            if not self._read():
                return

    def _ready(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._read() is False:
            loop.remove_reader(self._descriptor)

    def _read(self) -> bool | None:
        """True if something was read, None if nothing is available now, False at the end."""
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return False
        room = MOST_OUTPUT - len(self._kept)
        self._kept += data[:room]
        self._dropped += max(0, len(data) - room)
        return bool(data)

    @property
    def text(self) -> str:
        text = self._kept.decode("utf-8", "replace")
        return text if not self._dropped else f"{text}\n[{self._dropped:,} more bytes were cut off]"
