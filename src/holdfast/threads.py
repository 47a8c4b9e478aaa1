"""Carries the result or exception of a user's function from a thread to the event loop.

Futures reject `StopIteration`, which would leave the awaiting coroutine waiting forever. So the
thread returns its exception as a value, and the coroutine raises it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Outcome = tuple[Any, BaseException | None]


def caught(call: Callable[[], Any]) -> Outcome:
    """Call it; return the exception if it raises."""
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 - raised again by `given`
        return None, error


def given(outcome: Outcome) -> Any:
    """The value the call returned; raises what it raised.

    `StopIteration` becomes `RuntimeError`, as in any coroutine. So does `KeyboardInterrupt`: Ctrl-C
    is for the main thread, and a function in a thread that raises it has merely failed.
    """
    value, error = outcome
    if isinstance(error, StopIteration | KeyboardInterrupt):
        raise RuntimeError(f"a plain function raised {type(error).__name__}") from error
    if error is not None:
        raise error
    return value
