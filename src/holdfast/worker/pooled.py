"""A process of the pool: executes handlers for a worker, one at a time (`worker.pool`).

    connect ──► (payload ──► handler ──► result or error) … until the worker closes the socket

Handlers are imported by name, from the module that defines them. Start-up hooks are not called.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
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
from holdfast.app import Job
from holdfast.context import Context, SyncContext, current_run
from holdfast.durations import seconds
from holdfast.errors import DefinitionError, HoldfastError, InvalidPayload, Signal
from holdfast.model.job import JobSpec
from holdfast.model.settings import Settings
from holdfast.payload import Signature, encode_result, encode_value
from holdfast.telemetry import configure_logging
from holdfast.worker.settling import traceback_of

T = TypeVar("T")

_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class _Worker:
    """The worker at the other end of the socket. Threads of a handler take turns."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._turn = threading.Lock()

    def send(self, frame: dict[str, Any]) -> None:
        body = _encode(frame)
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


class PooledContext(SyncContext):
    """A plain handler's context in a process of the pool."""

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            coroutine.send(None)
        except StopIteration as end:
            value: T = end.value
            return value
        raise AssertionError("asking the worker blocks, and never waits")


def main(number: int) -> None:
    """Serve the worker at a socket until it closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker
    worker = _Worker(socket.socket(fileno=number))
    setup = worker.receive()
    sys.path[:] = setup["path"]
    configure_logging(setup["log"]["level"], setup["log"]["style"])
    with contextlib.suppress(BaseException):  # raised again, and told, when the handler is called
        _find(setup["module"], setup["file"], setup["name"])
    worker.send({"ready": True})
    while True:
        worker.send(_outcome(worker, worker.receive()))


def _outcome(worker: _Worker, request: dict[str, Any]) -> dict[str, Any]:
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
    token = current_run.set(request["run"])
    try:
        return function(*bound.args, **kwargs)
    finally:
        current_run.reset(token)


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


if __name__ == "__main__":
    from holdfast.worker import pooled

    pooled.main(int(sys.argv[1]))  # under its own name: tracebacks leave our frames out
