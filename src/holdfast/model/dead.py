"""A dead letter's headers: why a run was given up, beside its unchanged body."""

from __future__ import annotations

import json
from typing import Final

import msgspec

from holdfast.clock import rfc3339
from holdfast.model.codec import Codec
from holdfast.model.run import Attempt
from holdfast.names import (
    H_ATTEMPT,
    H_ATTEMPTS,
    H_CRASHES,
    H_DEAD_AT,
    H_ERROR,
    H_FAILURES,
    H_MSG_ID,
    H_REASON,
    H_RUN,
    H_SUBJECT,
    H_TRACEBACK,
)

TEXT: Final = Codec[str](str, "a text of the dead letter")
ATTEMPTS: Final = Codec[tuple[Attempt, ...]](tuple[Attempt, ...], "the attempts of the dead letter")
LONGEST_TEXT = 1_000
LONGEST_TRACEBACK = 7_000
"""Limits in characters. A character may take six bytes as ASCII JSON, and the server limits the
headers of a message to 64 kB. The end of a traceback is the most useful part, so its beginning is
cut."""


def dead_headers(
    *,
    run: str,
    message: int,
    subject: str,
    reason: str,
    error: str,
    now: float,
    traceback: str = "",
    failures: int = 0,
    crashes: int = 0,
    attempts: tuple[Attempt, ...] = (),
) -> dict[str, str]:
    """The headers; texts are JSON strings in ASCII, so that each is one line."""
    headers = {
        H_RUN: run,
        H_MSG_ID: f"{run}.dead.{message}",
        H_ATTEMPT: str(message),
        H_REASON: reason,
        H_ERROR: _text(error, LONGEST_TEXT),
        H_FAILURES: str(failures),
        H_CRASHES: str(crashes),
        H_SUBJECT: subject,
        H_DEAD_AT: rfc3339(now),
    }
    if traceback:
        headers[H_TRACEBACK] = _text(traceback, LONGEST_TRACEBACK)
    if attempts:
        lean = [msgspec.structs.replace(a, error=a.error[:120]) for a in attempts[-10:]]
        headers[H_ATTEMPTS] = json.dumps(msgspec.to_builtins(lean), separators=(",", ":"))
    return headers


def _text(text: str, longest: int) -> str:
    return json.dumps(text if len(text) <= longest else "…" + text[-longest:])
