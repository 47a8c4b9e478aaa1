"""A worker listens to loggers without changing what the program's own handlers show."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.worker import logs


class Shown(logging.Handler):
    """A handler of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def listener() -> Iterator[Any]:
    """What a worker attaches, without a worker."""
    one = logs.RunLogs("info", "node", lambda *_: None, lambda *_: None)  # type: ignore[arg-type]
    yield one
    one.detach()


def test_handlers_of_the_program_show_what_they_did(listener: Any) -> None:
    """Info lines of a logger without a level stay hidden; those of one with a level stay shown."""
    shown = Shown()
    root = logging.root
    before = root.level
    chatty, plain = logging.getLogger("log-levels.chatty"), logging.getLogger("log-levels.plain")
    root.addHandler(shown)
    root.setLevel(logging.WARNING)
    chatty.setLevel(logging.DEBUG)
    try:
        listener.attach()
        chatty.debug("a detail")
        plain.info("hidden")
        plain.warning("trouble")
        assert shown.lines == ["a detail", "trouble"]
        listener.detach()
        assert root.level == logging.WARNING
        plain.info("hidden")
        assert shown.lines == ["a detail", "trouble"]
    finally:
        root.removeHandler(shown)
        root.setLevel(before)
        chatty.setLevel(logging.NOTSET)


def test_level_that_the_program_chose_meanwhile_stays(listener: Any) -> None:
    """A worker that ends does not bring back a level from before the program's last word."""
    root = logging.root
    before = root.level
    try:
        root.setLevel(logging.ERROR)
        listener.attach()
        root.setLevel(logging.WARNING)
        listener.detach()
        assert root.level == logging.WARNING
    finally:
        root.setLevel(before)
