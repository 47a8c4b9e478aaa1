"""A line of history: how one run ended.

A run's record is its claim and its guard against repeats; it expires soon after the end. For later
look-ups, a line is appended to a stream, on `<namespace>.ended.<group>.<job>.<state>`. A message
holds one line, or several that were appended at the same time; its header `Hf-Run` names their
runs, so a reader can look for one without decoding the others.

Not guaranteed: one line for each end. A worker that dies between the line and its acknowledgement
may cause a second, identical one; `Ended.identity` is the same for both, and readers keep one. A
run that is sent again after its end ends again, and that is another line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from holdfast.errors import Unreadable
from holdfast.model.codec import Codec, Count, Headers, RunId
from holdfast.model.run import RunRecord

SEPARATOR: Final = " "
"""Separates the runs in a header; no id contains it."""


class Ended(msgspec.Struct, omit_defaults=True, frozen=True):
    """One run that ended. Unknown members of newer versions are ignored."""

    run: RunId
    record: RunRecord
    """The record with which it ended."""
    payload: bytes | None = None
    """The body of its message; None if payloads are not kept, or if nobody had the message when the
    run ended."""
    headers: Headers = {}
    """The sender's own headers."""
    size: Count = 0
    """The length of a payload that was too large to be kept."""

    @property
    def identity(self) -> tuple[str, float]:
        """An identity that two lines about the same end share."""
        return self.run, self.record.ended


CODEC: Final = Codec[Ended](Ended, "a line of history")
_HEADERS: Final = Codec[Headers](Headers, "the headers of a run")


def decode(line: bytes) -> Ended:
    """The run in one line; `Unreadable` when it is not one that ended."""
    found = CODEC.decode(line)
    if not found.run or not found.record.ended:
        raise CODEC.unreadable("it names no run, or not when it ended")
    return found


def line(
    run: str,
    record: RunRecord,
    payload: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    largest: int = 0,
) -> bytes:
    """The line for an ended record; a payload of more than `largest` bytes is only counted."""
    size = len(payload) if payload else 0
    if size > largest:
        payload = None
    else:
        size = 0
    return CODEC.encode(Ended(run, record, payload, _readable(headers) if headers else {}, size))


def _readable(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that can be read back; other clients may send any."""
    try:
        return _HEADERS.decode(_HEADERS.encode(dict(headers)))
    except (Unreadable, ValueError):
        return {}
