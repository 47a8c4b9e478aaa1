"""What a user's function in a thread returned or raised, brought back to the event loop.

An exception set on a future is not always an exception: a future refuses `StopIteration`, so that
whoever waits for it waits for ever. So a thread returns what it raised, and the coroutine that
waits for it raises it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Outcome = tuple[Any, BaseException | None]


def caught(call: Callable[[], Any]) -> Outcome:
    """Call it; whatever it raises is returned."""
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 - raised again by `given`
        return None, error


def given(outcome: Outcome) -> Any:
    """What the call returned; raises what it raised.

    `StopIteration` becomes a `RuntimeError`, as in any coroutine. So does `KeyboardInterrupt`:
    Ctrl-C is for the main thread, and a function in a thread that raises it has only failed.
    """
    value, error = outcome
    if isinstance(error, StopIteration | KeyboardInterrupt):
        raise RuntimeError(f"a plain function raised {type(error).__name__}") from error
    if error is not None:
        raise error
    return value
