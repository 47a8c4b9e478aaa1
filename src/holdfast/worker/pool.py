"""Processes for handlers that compute (`execution="process"`).

A process of the pool executes one handler at a time. It gets the payload as JSON and imports the
handler by name; nothing is pickled. Calls of the handler's context go to the worker over the same
socket.

Guaranteed: cancelling a call kills its process, with everything the handler started in it. A
process that dies under a handler fails only that attempt, and the error names the signal. No
process outlives its worker (`holdfast.child`).

Not guaranteed: that a handler can clean up when cancelled. Startup hooks are not called in the
processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import logging
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast import errors
from holdfast.child import Child
from holdfast.context import Context, SyncContext, current_run
from holdfast.durations import seconds
from holdfast.errors import (
    DefinitionError,
    Discard,
    HandlerError,
    HoldfastError,
    InvalidPayload,
    Retry,
    Signal,
    Snooze,
)
from holdfast.job import Job
from holdfast.log_lines import (
    Attempted,
    JsonFormatter,
    configure_logging,
    current_attempt,
    extra_fields,
    traceback_in,
)
from holdfast.model.job import JobSpec
from holdfast.model.settings import Settings
from holdfast.payload import Bound, Signature, encode_result, encode_value
from holdfast.projects import set_up_django
from holdfast.worker.logs import Printed, catching_prints, finish_lines
from holdfast.worker.settling import traceback_of

T = TypeVar("T")

EXIT_SECONDS = 5.0
"""How long to wait for the exit code of a process that closed its socket: the kernel needs
milliseconds, unless it writes a core dump."""
CALLS = ("publish", "still_owner", "progress")
"""The methods of a context that a handler may call."""

_START = "from holdfast.worker.pool import main; main()"
"""The program of a process of the pool."""

_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class ProcessDied(HoldfastError):
    """A handler's process ended while executing it."""


class ResultRefused(InvalidPayload):
    """The handler's return value cannot be encoded as JSON."""

    def __init__(self, message: str, story: str) -> None:
        super().__init__(message)
        self.story = story


class ProcessPool:
    """At most `size` processes, created on demand."""

    def __init__(self, size: int) -> None:
        self._free = asyncio.Semaphore(size)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()

    async def prepare(self, job: Job[Any]) -> None:
        """Prepare a process that has imported a job's handler, which takes a second or more."""
        self._idle.append(self._alive() or await self._start(job))

    async def run(
        self,
        job: Job[Any],
        bound: Bound,
        run: str,
        ctx: Context | None,
        attempt: Attempted | None = None,
    ) -> Any:
        """Call a job's handler in a process; returns its result as JSON values."""
        fields = attempt.log_fields() if attempt else {}
        async with self._free:
            process = self._alive() or await self._start(job)
            try:
                value = await process.call(_request(job, bound, run, ctx, fields), ctx)
            except (HandlerError, errors.Signal, ResultRefused):
                self._idle.append(process)
                raise
            except BaseException:
                self._all.discard(process)
                process.kill()
                raise
            self._idle.append(process)
            return value

    def _alive(self) -> _Process | None:
        """An idle process, discarding those that have died."""
        while self._idle:
            process = self._idle.pop()
            if not process.gone:
                return process
            self._all.discard(process)
            process.kill()
        return None

    async def _start(self, job: Job[Any]) -> _Process:
        process = _Process()
        self._all.add(process)
        try:
            await process.open(job)
        except BaseException:
            self._all.discard(process)
            process.kill()
            raise
        return process

    def close(self) -> None:
        """Kill all processes."""
        while self._all:
            self._all.pop().kill()
        self._idle.clear()


class _Process:
    """One process of the pool, seen from its worker."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-c", _START, str(number)]
            self._child = Child(command, name="holdfast-pooled", pass_fds=(number,))

    @property
    def gone(self) -> bool:
        return self._child.exited.is_set()

    async def open(self, job: Job[Any]) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._ours)
        self._send({"path": sys.path, "log": _log_settings(), **_where(job)})
        await self._receive()

    def _send(self, frame: dict[str, Any]) -> None:
        body = _encode(frame)
        self._writer.write(len(body).to_bytes(4, "big") + body)

    async def call(self, request: dict[str, Any], ctx: Context | None) -> Any:
        self._send(request)
        while True:
            frame = await self._receive()
            if "logged" in frame:
                _log_again(frame["logged"])
            elif "call" in frame:
                self._send(await _answer(frame, ctx))
            else:
                return _outcome(frame)

    async def _receive(self) -> dict[str, Any]:
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            frame: dict[str, Any] = _decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError):
            raise ProcessDied(f"the process of the handler {await self._ending()}") from None
        return frame

    async def _ending(self) -> str:
        await asyncio.to_thread(self._child.exited.wait, EXIT_SECONDS)
        code = self._child.code
        if code is None:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def kill(self) -> None:
        """Kill it with everything it started: it leads a session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        if hasattr(self, "_writer"):
            self._writer.close()
        else:
            self._ours.close()


def _where(job: Job[Any]) -> dict[str, str]:
    """How another process finds a job's handler."""
    module, file = job.func.__module__, ""
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        module, file = (spec.name, "") if spec else ("", str(getattr(main, "__file__", "")))
    return {"module": module, "file": file, "name": job.func.__qualname__}


def _request(
    job: Job[Any], bound: Bound, run: str, ctx: Context | None, fields: dict[str, Any]
) -> dict[str, Any]:
    return {
        "fields": fields,
        **_where(job),
        "body": job.signature.encode(bound.args, bound.kwargs),
        "run": run,
        "context": _facts(ctx) if ctx else None,
    }


def _facts(ctx: Context) -> dict[str, Any]:
    settings = getattr(ctx._settings, "path", "")
    return {
        "job": ctx.job,
        "group": ctx.group,
        "node": ctx.node,
        "attempt": ctx.attempt,
        "epoch": ctx._epoch,
        "headers": ctx.headers,
        "deadline": ctx.deadline.timestamp() if ctx.deadline else None,
        "settings": str(settings),
    }


async def _answer(frame: dict[str, Any], ctx: Context | None) -> dict[str, Any]:
    """Execute a call of the handler's context."""
    name = frame["call"]
    try:
        if ctx is None or name not in CALLS:
            raise errors.InvalidInput(f"a handler cannot call {name!r}")
        return {"value": await getattr(ctx._execution, name)(*frame["args"])}
    except HoldfastError as error:
        return {"error": type(error).__name__, "message": str(error)}


def _outcome(frame: dict[str, Any]) -> Any:
    if "result" in frame:
        return msgspec.json.decode(frame["result"])
    name, message, story = frame["error"], frame["message"], frame["story"]
    if frame["kind"] == "refused":
        raise ResultRefused(message, story)
    if frame["kind"] == "signal":
        if name == "Discard":
            raise Discard(message)
        if name == "Snooze":
            raise Snooze(frame["delay"] or 0.0, message)
        raise Retry(message, delay=frame["delay"])
    kind = type(name, (HandlerError,), {})
    raise kind(message, story)


def _log_settings() -> dict[str, Any]:
    """How this process logs, so that its children do the same."""
    root = logging.getLogger()
    styles = [isinstance(handler.formatter, JsonFormatter) for handler in root.handlers]
    return {
        "level": logging.getLevelName(root.level),
        "style": "json" if any(styles) else "text",
        "prints": isinstance(sys.stdout, Printed),
    }


def _log_again(line: dict[str, Any]) -> None:
    """Log what a handler logged in its process, in the context of its attempt."""
    facts = {**msgspec.json.decode(line.pop("extra")), **line}
    record = logging.makeLogRecord(facts)
    record.msecs = (record.created % 1) * 1000
    logging.getLogger(record.name).handle(record)


# ---- inside a process of the pool


class _Worker:
    """The worker at the other end of the socket. A handler's threads take turns."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._turn = threading.Lock()
        self._sending = threading.Lock()

    def send(self, frame: dict[str, Any]) -> None:
        body = _encode(frame)
        with self._sending:  # a thread may log while another one asks
            self._connection.sendall(len(body).to_bytes(4, "big") + body)

    def receive(self) -> dict[str, Any]:
        frame: dict[str, Any] = _decode(self._read(int.from_bytes(self._read(4), "big")))
        return frame

    def _read(self, size: int) -> bytes:
        parts, left = [], size
        while left:
            part = self._connection.recv(min(left, 1 << 20))
            if not part:
                os._exit(0)  # the worker closed the socket
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def ask(self, call: str, *args: Any) -> Any:
        with self._turn:
            self.send({"call": call, "args": args})
            answer = self.receive()
        if name := answer.get("error"):
            kind = getattr(errors, name, HoldfastError)
            error = kind.__new__(kind)
            Exception.__init__(error, answer["message"])
            raise error
        return answer["value"]

    # ---- as `context.Attempting`

    async def publish(self, event: str, data: Any) -> None:
        self.ask("publish", event, msgspec.json.decode(encode_value(data)))

    async def still_owner(self) -> bool:
        return bool(self.ask("still_owner"))

    async def progress(self, fraction: float | None, note: str) -> None:
        self.ask("progress", fraction, note)


class _Attempt:
    """The attempt in a process of the pool; the worker removes secrets from its log lines."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.printed: dict[str, str] = {}
        self._fields = fields

    def log_fields(self) -> dict[str, Any]:
        return self._fields

    def conceal(self, text: str) -> str:
        return text


class _Forward(logging.Handler):
    """Gives the lines of an attempt to the worker; lets other lines pass."""

    def __init__(self, worker: _Worker) -> None:
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        if current_attempt.get() is not None:
            with contextlib.suppress(Exception):  # a line that cannot be sent is lost
                self._forward(record)

    def _forward(self, record: logging.LogRecord) -> None:
        extra = json.dumps(extra_fields(record), default=str, skipkeys=True)
        line = {
            "name": record.name,
            "levelno": record.levelno,
            "levelname": record.levelname,
            "msg": record.getMessage().encode("utf-8", "backslashreplace").decode(),
            "exc_text": traceback_in(record).encode("utf-8", "backslashreplace").decode(),
            "created": record.created,
            "extra": extra,
        }
        self._worker.send({"logged": line})


def _is_outside(_: logging.LogRecord) -> bool:
    """For the process's own handlers: the worker logs the lines of attempts."""
    return current_attempt.get() is None


class PooledContext(SyncContext):
    """A plain handler's context in a process of the pool."""

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            coroutine.send(None)
        except StopIteration as end:
            value: T = end.value
            return value
        raise AssertionError("a call to the worker blocks the thread, and never awaits")


def main() -> None:
    """Serve the worker until it closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker
    worker = _Worker(socket.socket(fileno=int(sys.argv[1])))
    setup = worker.receive()
    sys.path[:] = setup["path"]
    configure_logging(setup["log"]["level"], setup["log"]["style"])
    with contextlib.suppress(BaseException):  # raised again when the handler is called
        _find(setup["module"], setup["file"], setup["name"])
    root = logging.getLogger()
    for handler in root.handlers:
        handler.addFilter(_is_outside)
    root.addHandler(_Forward(worker))
    worker.send({"ready": True})
    with catching_prints() if setup["log"]["prints"] else contextlib.nullcontext():
        while True:
            worker.send(_executed(worker, worker.receive()))


def _executed(worker: _Worker, request: dict[str, Any]) -> dict[str, Any]:
    try:
        function = _find(request["module"], request["file"], request["name"])
        value = _call(function, worker, request)
    except BaseException as error:  # noqa: BLE001 - a handler may raise anything
        return _failure(error)
    try:
        return {"result": encode_result(value)}
    except InvalidPayload as error:
        return {**_failure(error), "kind": "refused"}


@functools.cache
def _find(module: str, file: str, name: str) -> Callable[..., Any]:
    set_up_django()
    outer, _, rest = name.partition(".")
    if file:
        found: Any = runpy.run_path(file, run_name="__holdfast_pooled__").get(outer)
    else:
        found = getattr(importlib.import_module(module), outer, None)
    for part in filter(None, rest.split(".")):
        found = getattr(found, part, None)
    if isinstance(found, Job):
        found = found.func
    if not callable(found):
        raise DefinitionError(
            f"a process of the pool finds no {name} in {file or module}: define the handler at the "
            "top level of a module"
        )
    function: Callable[..., Any] = found
    return function


def _call(function: Callable[..., Any], worker: _Worker, request: dict[str, Any]) -> Any:
    signature = Signature.of(function, (Context, SyncContext))
    bound = signature.decode(request["body"])
    kwargs = dict(bound.kwargs)
    if facts := request["context"]:
        ctx = PooledContext(
            worker,
            run=request["run"],
            spec=JobSpec(facts["job"], facts["group"]),
            group=facts["group"],
            node=facts["node"],
            attempt=facts["attempt"],
            epoch=facts["epoch"],
            headers=facts["headers"],
            deadline=facts["deadline"],
            settings=_settings_of(facts["settings"]),
        )
        kwargs |= dict.fromkeys(signature.contexts, ctx)
    attempt = _Attempt(request["fields"])
    tokens = current_run.set(request["run"]), current_attempt.set(attempt)
    try:
        return function(*bound.args, **kwargs)
    finally:
        if attempt.printed:
            finish_lines(attempt)
        current_run.reset(tokens[0])
        current_attempt.reset(tokens[1])


def _settings_of(path: str) -> Callable[[], Settings] | None:
    if not path:
        return None
    from holdfast.settings.resolving import SettingsFile

    return SettingsFile(Path(path))


def _failure(error: BaseException) -> dict[str, Any]:
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - the user's own __str__ may do anything
        message = "(which cannot be shown)"
    delay = getattr(error, "delay", None)
    return {
        "kind": "signal" if isinstance(error, Signal) else "raised",
        "error": type(error).__name__,
        "message": message.encode("utf-8", "backslashreplace").decode(),
        "story": traceback_of(error).encode("utf-8", "backslashreplace").decode(),
        "delay": seconds(delay, "delay") if isinstance(error, Signal) and delay else None,
    }
