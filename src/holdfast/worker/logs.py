"""Collects what handlers log and print, and sends it to the stream of log lines.

`RunLogs` is a handler of the root logger: what is logged while `current_attempt` is set belongs to
that attempt, whichever logger and thread it comes from. It only collects; `send` and `flush` encode
and publish, without waiting for an answer.

A lost line never fails or delays a run. A run that logs more than `RUN_BYTES` within
`FLUSH_SECONDS`, or a process that logs more than `PROCESS_BYTES`, loses lines, and so does a worker
without a connection; the next line that is stored says how many. A run that logs nothing costs
nothing.

`Printed` does the same for `print`. Not caught: what a handler's child processes print, and loggers
that do not propagate and are created while the worker runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, TextIO

from holdfast.errors import BrokerError
from holdfast.log_lines import (
    RUN_FIELDS,
    Attempted,
    current_attempt,
    extra_fields,
    traceback_in,
)
from holdfast.model.runlog import LEVELS, LOG_MESSAGE, Logged, LogMessage
from holdfast.redaction import told

FLUSH_SECONDS: Final = 0.25
"""How long a line waits for others: short enough for people who follow a run."""
LINE_CHARS: Final = 8_000
"""Characters kept of one line: more than a traceback of usual depth."""
MESSAGE_BYTES: Final = 16_000
"""Lines in one message. Together with the limit on messages, this limits the lines stored of a
run."""
RUN_BYTES: Final = 500_000
"""Bytes of one run between two flushes; the rest is dropped, to leave room for other runs."""
PROCESS_BYTES: Final = 8_000_000
"""Bytes of all runs of a process between two flushes, which it holds in memory."""
FIELDS_CHARS: Final = 2_000
"""Characters kept of a line's extra fields, as JSON: they are shown beside the line."""
STREAMS: Final = {"print": logging.INFO, "stderr": logging.WARNING}
"""Loggers and levels of what is printed: on standard output, and on standard error."""

Send = Callable[[Sequence[tuple[str, bytes]]], Awaitable[None]]
"""Publishes bodies by run, without waiting for an answer."""
Count = Callable[[str, int], None]
"""Counts lines by outcome."""


class _Pending:
    """The lines of one attempt that are not sent yet."""

    __slots__ = ("dropped", "fields", "lines", "size")

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.lines: list[Logged] = []
        self.size = 0
        self.dropped = 0


class RunLogs(logging.Handler):
    """Collects the lines of one node's runs, and sends them."""

    def __init__(
        self, level: str, node: str, send: Send, count: Callable[[str, int], None]
    ) -> None:
        super().__init__(LEVELS[level])
        self._pending: dict[tuple[str, int], _Pending] = {}
        self._size = 0
        self._node = node
        self._send = send
        self._count = count
        self._levels: list[tuple[logging.Logger, int]] = []
        """Levels to restore."""
        self._hidden: list[tuple[logging.Handler, _Hidden]] = []
        """Filters to remove."""

    # ---- collecting

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line if it belongs to a run. Called with the handler's lock."""
        try:
            self._keep(record)
        except Exception:  # noqa: BLE001 - what is logged is the user's, and may do anything
            self.handleError(record)

    def _keep(self, record: logging.LogRecord) -> None:
        attempt = current_attempt.get()
        if attempt is not None:
            fields = attempt.log_fields()
        elif record.name == "holdfast.worker" and hasattr(record, "run"):  # how an attempt ended
            fields = {name: getattr(record, name) for name in RUN_FIELDS}
        else:
            return
        if fields["node"] != self._node:
            return  # of another worker in this process
        place = str(fields["run"]), int(fields["attempt"])
        pending = self._pending.get(place)
        if pending is None:
            pending = self._pending[place] = _Pending(fields)
        if pending.size >= RUN_BYTES or self._size >= PROCESS_BYTES:
            pending.dropped += 1
            return
        line = self._line(record, attempt.conceal if attempt else str)
        size = len(line.text) + 100
        pending.lines.append(line)
        pending.size += size
        self._size += size

    def _line(self, record: logging.LogRecord, conceal: Callable[[str], str]) -> Logged:
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 - arguments that do not fit are the user's mistake
            text = str(record.msg)
        if trace := traceback_in(record):
            text += f"\n{trace}"
        own = {k: v for k, v in extra_fields(record).items() if k not in RUN_FIELDS}
        return Logged(
            record.created,
            told(conceal(text), LINE_CHARS),
            record.levelname.lower(),
            told(record.name, 200),
            _extra(own, conceal) if own else {},
        )

    def handleError(self, record: logging.LogRecord) -> None:
        """A line that cannot be kept is lost, and nothing else happens."""
        self._count("dropped", 1)

    # ---- sending

    async def flush_attempt(self, run: str, attempt: int) -> None:
        """Send the lines of one attempt now: before its end is written."""
        if (run, attempt) not in self._pending:
            return
        with self._locked():
            pending = self._pending.pop((run, attempt))
            self._size -= pending.size
        await self._flush({(run, attempt): pending})

    async def flush_all(self) -> None:
        """Send the lines of all attempts."""
        if self._pending:
            with self._locked():
                taken, self._pending, self._size = self._pending, {}, 0
            await self._flush(taken)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()

    async def _flush(self, taken: dict[tuple[str, int], _Pending]) -> None:
        lines = sum(len(pending.lines) for pending in taken.values())
        self._count("dropped", sum(pending.dropped for pending in taken.values()))
        try:
            await self._send([(run, body) for (run, _), p in taken.items() for body in _bodies(p)])
        except BrokerError:
            self._count("dropped", lines)
        else:
            self._count("sent", lines)

    # ---- being attached

    def attach(self) -> None:
        """Listen to the root logger, and to loggers that keep their lines to themselves.

        Called again and again, because a program may configure logging at any time. Loggers pass on
        what is at least of this handler's level; their other handlers see no more than before.
        """
        for logger in (logging.root, *_loggers()):
            alone = logger is logging.root or (not logger.propagate and logger.handlers)
            if alone and self not in logger.handlers:
                self._listen(logger)

    def _listen(self, logger: logging.Logger) -> None:
        before = logger.level
        if before > self.level:
            hidden = _Hidden(logger, before)
            for other in logger.handlers:
                other.addFilter(hidden)
                self._hidden.append((other, hidden))
            self._levels.append((logger, before))
            logger.setLevel(self.level)
        logger.addHandler(self)

    def detach(self) -> None:
        """Stop listening, and restore the levels, unless the program has changed them since."""
        for logger in (logging.root, *_loggers()):
            logger.removeHandler(self)
        for handler, hidden in self._hidden:
            handler.removeFilter(hidden)
        for logger, level in reversed(self._levels):
            if logger.level == self.level:
                logger.setLevel(level)
        self._hidden.clear()
        self._levels.clear()


class _Hidden(logging.Filter):
    """Filters the lines that a logger's own level used to keep from its other handlers.

    Child loggers with a level of their own were never affected by it.
    """

    def __init__(self, logger: logging.Logger, level: int) -> None:
        super().__init__()
        self._logger = logger
        self._level = level

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= self._level:
            return True
        one: logging.Logger | None = logging.getLogger(record.name)
        while one is not None and one is not self._logger:
            if one.level:
                return True
            one = one.parent
        return False


def _loggers() -> list[logging.Logger]:
    known = list(logging.root.manager.loggerDict.values())
    return [one for one in known if isinstance(one, logging.Logger)]


def _extra(fields: dict[str, Any], conceal: Callable[[str], str]) -> dict[str, Any]:
    """Extra fields as JSON values; too many become their beginning as text."""
    text = told(conceal(json.dumps(fields, default=str, skipkeys=True)), FIELDS_CHARS)
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        return {"extra": text}
    return found


def _bodies(pending: _Pending) -> Iterator[bytes]:
    """The messages for the lines of one attempt."""
    facts = {k: pending.fields[k] for k in ("job", "attempt", "node", "epoch")}
    part: list[Logged] = []
    size, dropped = 0, pending.dropped
    for line in pending.lines:
        if part and size + len(line.text) > MESSAGE_BYTES:
            yield LOG_MESSAGE.encode(LogMessage(tuple(part), **facts))
            part, size = [], 0
        part.append(line)
        size += len(line.text) + 100
    yield LOG_MESSAGE.encode(LogMessage(tuple(part), **facts, dropped=dropped))


# ---- what is printed

_inside = threading.local()
"""True while a printed line is being logged, so that what log handlers print is not logged
again."""


class Printed:
    """Standard output or error: what a handler prints becomes log lines of its run.

    Anything else goes where it went before. An unfinished line is kept until it ends, or until its
    attempt does (`finish_lines`).
    """

    def __init__(self, stream: TextIO, logger: str) -> None:
        self._stream = stream
        self._logger = logging.getLogger(logger)
        self._level = STREAMS[logger]

    def write(self, text: str) -> int:
        attempt = current_attempt.get()
        if attempt is None or getattr(_inside, "printing", False) or _is_logging():
            return self._stream.write(text)
        name = self._logger.name
        *lines, rest = (attempt.printed.get(name, "") + text).split("\n")
        if len(rest) > LINE_CHARS:
            lines, rest = [*lines, rest], ""
        if rest or attempt.printed:
            attempt.printed = {**attempt.printed, name: rest}
        _inside.printing = True
        try:
            for line in lines:
                self._logger.log(self._level, "%s", line)
        finally:
            _inside.printing = False
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_logging() -> bool:
    """Whether the writer is a handler of the logging module, which the program put there."""
    return sys._getframe(2).f_globals.get("__name__") == "logging"


@contextlib.contextmanager
def catching_prints() -> Iterator[None]:
    """Within the block, what handlers print becomes log lines."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Printed(sys.stdout, "print"), Printed(sys.stderr, "stderr")
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def finish_lines(attempt: Attempted) -> None:
    """Log what an attempt printed without ending the line."""
    token = current_attempt.set(attempt)
    for name, text in attempt.printed.items():
        if text:
            logging.getLogger(name).log(STREAMS[name], "%s", text)
    current_attempt.reset(token)
    attempt.printed = {}
