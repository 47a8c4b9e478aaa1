"""The worker's side of its keeper: starts it, informs it, replaces it when it dies.

The keeper (`holdfast.keeper`) sends heartbeats, answers pings and extends messages for the worker,
over its own connection. The worker only provides a tick of the event loop, a tick of a thread (to
distinguish a blocked loop from a held interpreter), and a place on the board for each message. It
reads the keeper's findings from the board; `Keeping` is the heartbeat's `Deputy`.

A keeper that dies is restarted; until then, and where none can be started, the worker sends
heartbeats from its loop. The thread also detects a blocked loop, with or without a keeper: it logs
the run, the job and the stack, and informs the keeper, which shows it in the node's record.

The keeper ends with the worker, whose process it watches. A program that embeds a worker keeps its
signal handlers: the signal that makes a thread write its stack is one that nobody else handles.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.broker import Broker
from holdfast.config import ConnectionConfig
from holdfast.forks import closed_in_children
from holdfast.keeper import board as words
from holdfast.keeper.board import Board
from holdfast.keeper.vitals import Blockage
from holdfast.log_lines import JsonFormatter
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.keeper")

TICK_SECONDS: Final = 0.25
"""Four ticks fit into `LATE_SECONDS`, so a single late tick raises no alarm."""
LATE_SECONDS: Final = 1.0
"""A loop that has not moved for this long is reported; shorter blocks are common and harmless."""
DEAD_SECONDS: Final = 2.0
"""A keeper that has not moved for this long is not relied on; the worker sends heartbeats
itself."""
STUCK_SECONDS: Final = 10.0
"""A keeper that has not moved for this long is replaced; a busy machine may stop it for seconds."""
MISSED: Final = 1.6
"""Heartbeat intervals without a confirmation, plus a second, after which the worker sends its own:
well within the timeout of four heartbeats."""
WAIT_SECONDS: Final = 0.25
WAIT_MOST_SECONDS: Final = 60.0
"""First and longest wait before a keeper is restarted; doubles while keepers die at once."""
QUIET_SECONDS: Final = 10.0
"""The shortest interval between logs of a blocked loop: computing threads block it repeatedly."""
STOP_SECONDS: Final = 2.0
"""How long the worker's end waits for the thread, which ticks every 0.25 s."""
PIPE_BYTES: Final = 1 << 20
"""Room for the stacks of many threads: a signal handler must not wait for a reader."""
SPARE_PLACES: Final = 2_048
"""Places on the board beyond those that can run: for messages delivered in advance."""

_START: Final = """
import sys
sys.path.append(sys.argv.pop(1))  # behind the standard library: nothing there may replace it
from holdfast.keeper.process import main
main()
"""

Plan = dict[str, Any]


class Keeping:
    """Maintains a keeper for one worker while the worker runs."""

    def __init__(
        self,
        broker: Broker,
        board: Board,
        telemetry: Telemetry,
        *,
        plan: Callable[[], Plan],
        facts: Callable[[], dict[str, Any]],
        culprit: Callable[[asyncio.Task[Any] | None], tuple[str, str]],
        heartbeat_seconds: float,
    ) -> None:
        """`culprit` returns the run and the job that a task of the loop executes."""
        self.board = board
        self.process: subprocess.Popen[bytes] | None = None
        self._broker = broker
        self._telemetry = telemetry
        self._plan = plan
        self._facts = facts
        self._culprit = culprit
        self._heartbeat = heartbeat_seconds
        self._control: socket.socket | None = None
        self._stacks = (-1, -1)
        self._signal = 0
        self._stop = threading.Event()
        self._said = b""
        self._next_start = 0.0
        self._wait = WAIT_SECONDS
        self._started = 0.0
        self._blockage: Blockage | None = None
        self._blocked_at = 0.0
        self._next_log = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None
        self._plan_now: Plan = {}
        self._facts_now: dict[str, Any] = {}

    # ---- as `heartbeat.Deputy`

    @property
    def active(self) -> bool:
        process, now = self.process, time.monotonic()
        return (
            process is not None
            and process.returncode is None
            and now - self.board.times[words.KEEPER] < DEAD_SECONDS
            and now - self.board.times[words.ACKNOWLEDGED] < self._heartbeat * MISSED + 1
            and not self.lost
        )

    @property
    def acknowledged(self) -> float:
        return self.board.times[words.ACKNOWLEDGED]

    @property
    def steady_since(self) -> float:
        return self.board.times[words.STEADY]

    @property
    def revision(self) -> int:
        return self.board.numbers[words.REVISION]

    @property
    def lost(self) -> bool:
        return bool(self.board.numbers[words.LOST])

    @property
    def gap(self) -> bool:
        return self.board.numbers[words.GAP] != self.board.numbers[words.VERIFIED]

    @property
    def blocked(self) -> bool:
        return self._blockage is not None

    def verified(self) -> None:
        self.board.numbers[words.VERIFIED] = self.board.numbers[words.GAP]

    def proved(self) -> None:
        self.board.times[words.PROVED] = time.monotonic()

    # ---- on the event loop

    def start(self) -> None:
        """Start ticking, and start the keeper; does not block."""
        self.proved()
        self._loop = asyncio.get_running_loop()
        self._loop_ident = threading.get_ident()
        self._loop_thread = threading.get_native_id()
        self._tick()
        closed_in_children(self)
        if why := unavailable(self._broker.config):
            log.warning(
                "%s: this worker sends heartbeats from its event loop, which handlers can block",
                why,
            )
        self._alone = bool(why)
        if not why:
            self._open_stacks()
        self._thread = threading.Thread(target=self._run, name="holdfast-keeper", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the keeper: from here on the worker sends its own heartbeats."""
        self.board.numbers[words.ENDING] = 1
        self._stop.set()
        if self._timer:
            self._timer.cancel()
        self._kill()
        deadline = time.monotonic() + STOP_SECONDS
        while self._thread and self._thread.is_alive() and time.monotonic() < deadline:  # noqa: ASYNC110 - a thread sets no event of the loop's
            await asyncio.sleep(0.005)

    def _tick(self) -> None:
        self.board.times[words.LOOP] = time.monotonic()
        if self.board.leaving:
            self.board.reclaim()
        self._plan_now = self._plan() if self.process is None else self._plan_now
        self._facts_now = self._facts()
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def filenos(self) -> list[int]:
        """Descriptors that a forked child must not keep."""
        found = [self._control.fileno()] if self._control is not None else []
        return [*found, *(d for d in self._stacks if d >= 0)]

    # ---- on the thread

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                now, before = time.monotonic(), self.board.times[words.THREAD]
                self.board.times[words.THREAD] = now
                if not self._alone:
                    self._keep()
                if (
                    now - before < LATE_SECONDS
                ):  # otherwise the whole process was frozen: the loop will move next
                    self._watch_loop()
                self._tell()
                self._stop.wait(TICK_SECONDS)
        except Exception:
            log.exception(
                "the keeper cannot be supervised: this worker sends heartbeats from its event loop"
            )
        finally:
            self._close()

    def _keep(self) -> None:
        """Start the keeper, or replace one that has died or does not move."""
        now = time.monotonic()
        if self.process is not None and self.process.poll() is None:
            moved = max(self.board.times[words.KEEPER], self._started)
            if now - moved > STUCK_SECONDS:
                log.warning("the keeper (pid %d) does not move: replaced", self.process.pid)
                self._kill()
            return
        if self.process is not None:
            self._died(now)
        if now < self._next_start or self.lost or not self._plan_now or self._stop.is_set():
            return
        try:
            self._spawn(now)
        except OSError as error:
            self._next_start = now + WAIT_MOST_SECONDS
            log.warning(
                "no keeper can be started (%s): this worker sends heartbeats from its event loop",
                error,
            )

    def _died(self, now: float) -> None:
        assert self.process is not None
        if not self._stop.is_set() and not self.lost:
            code = self.process.returncode
            log.warning("the keeper (pid %d) ended (%d): started again", self.process.pid, code)
        lived = now - self._started
        self._wait = (
            WAIT_SECONDS if lived > STUCK_SECONDS else min(self._wait * 2, WAIT_MOST_SECONDS)
        )
        self._next_start = now + (0 if lived > STUCK_SECONDS else self._wait)
        self.process = None
        self._plan_now = {}
        self.board.forget_keeper()

    def _spawn(self, now: float) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[2])
        command = [sys.executable, "-I", "-S", "-c", _START, root, str(theirs.fileno())]
        descriptors = [theirs.fileno(), self.board.descriptor]
        descriptors += [d for d in self._stacks[:1] if d >= 0]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        old, self._control = self._control, ours
        if old is not None:
            old.close()
        ours.settimeout(1.0)
        self._started, self._said = now, b""
        self._telemetry.keeper_starts.inc()
        self._say(self._whole_plan())
        if self._stop.is_set():
            self._kill()

    def _whole_plan(self) -> Plan:
        return {
            **self._plan_now,
            "pid": os.getpid(),
            "board": self.board.descriptor,
            "places": self.board.places,
            "stacks": self._stacks[0],
            "signal": self._signal,
            "loop_thread": self._loop_thread,
            "log_style": _log_style(),
        }

    def _say(self, said: dict[str, Any]) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):  # the keeper died: noticed at the next tick
                self._control.sendall(json.dumps(said).encode() + b"\n")

    def _tell(self) -> None:
        """Send the keeper the worker's new facts."""
        facts = self._facts_now
        said = json.dumps(facts).encode()
        if said != self._said and self.process is not None:
            self._said = said
            ahead = self._broker.server_now() - time.monotonic()
            self._say({"facts": facts, "ahead": ahead})

    def _kill(self) -> None:
        process = self.process
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()

    def _close(self) -> None:
        self._kill()
        if self.process is not None:
            self.process.wait()
        if self._signal:
            faulthandler.unregister(self._signal)
        if self._control is not None:
            self._control.close()
        for descriptor in self._stacks:
            if descriptor >= 0:
                os.close(descriptor)
        self._stacks, self._control = (-1, -1), None

    # ---- a blocked loop

    def _open_stacks(self) -> None:
        """Let a signal write a thread's stack into a pipe, even while the interpreter is held."""
        self._signal = _free_signal()
        if not self._signal:
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        with contextlib.suppress(OSError, AttributeError, ImportError):
            import fcntl

            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._stacks = (reading, writing)
        faulthandler.register(self._signal, file=writing, all_threads=False, chain=False)

    def _watch_loop(self) -> None:
        now, moved = time.monotonic(), self.board.times[words.LOOP]
        if now - moved >= LATE_SECONDS:
            if self._blockage is None:
                self._blocked_at = moved
                self._blockage = self._name()
                self._log_blocked(now)
                self._say({"blocked": self._blockage._asdict()})
        elif self._blockage is not None:
            lasted = moved - self._blocked_at
            self._telemetry.loop_blocked.inc(max(0.0, lasted))
            if self._logged:
                log.warning(
                    "the event loop moves again after %.1f s: %s",
                    lasted,
                    self._blockage.describe(),
                )
            self._blockage = None
            self._say({"blocked": None})

    def _name(self) -> Blockage:
        frame = sys._current_frames().get(self._loop_ident)
        task = asyncio.current_task(self._loop)
        run, job = self._culprit(task)
        if frame is None:
            return Blockage(job, (run,) if run else ())
        code = frame.f_code
        where = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        stack = "".join(traceback.format_stack(frame)[-12:])
        return Blockage(job, (run,) if run else (), where, stack)

    def _log_blocked(self, now: float) -> None:
        found = self._blockage
        self._logged = found is not None and now >= self._next_log
        if found is None or not self._logged:
            return
        self._next_log = now + QUIET_SECONDS
        fields = {"run": found.runs[0], "job": found.job} if found.runs else {}
        log.warning(
            "the event loop has not moved for %.1f s: %s\n%s",
            now - self._blocked_at,
            found.describe(),
            found.stack.rstrip(),
            extra=fields,
        )


def login_of(config: ConnectionConfig) -> dict[str, Any]:
    """How a keeper connects: like the worker."""
    return {
        "servers": config.servers,
        "tls": config.encrypted,
        "tls_first": config.tls_handshake == "first",
        "paths": [path for path in sys.path if path],
        **{
            name: getattr(config, name)
            for name in (
                *("user", "password", "token", "credentials_file", "nkey_seed_file", "creds_file"),
                *("tls_ca", "tls_cert", "tls_key", "tls_hostname"),
            )
        },
    }


def unavailable(config: ConnectionConfig) -> str:
    """Why there can be no keeper here; empty if there can."""
    if sys.platform == "win32":
        return "a keeper needs a kind of shared memory that Windows lacks"
    if any(url.startswith(("ws://", "wss://")) for url in config.servers):
        return "a keeper cannot connect over websockets"
    if not sys.executable or getattr(sys, "frozen", False):
        return "there is no Python to start a keeper with"
    return ""


def _free_signal() -> int:
    """A real-time signal that nobody handles; 0 if there is none."""
    if not hasattr(signal, "SIGRTMAX"):
        return 0
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            return int(number)
    return 0


def _log_style() -> str:
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    return "json" if any(isinstance(f, JsonFormatter) for f in formatters) else "text"
