"""Stored messages for operators: list newest first, read, delete.

Reads are direct gets, which any replica may answer: advisory only, never a basis for a decision.
Nothing here creates a consumer, so reading costs the server no state and takes no message from a
worker.

Listing newest first reads back through the sequence numbers in windows that start small and grow,
faster the sparser the stream, so the first page costs about the same for a stream of any length.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Final, NamedTuple

from holdfast import errors
from holdfast.broker import Broker, Received
from holdfast.broker.kv import direct_batch, direct_get, direct_page
from holdfast.clock import rfc3339
from holdfast.model.message import due_of, number_of, read_heading, user_headers

PAGE: Final = 1_000
"""Messages per request: a page of any list fits into one."""
FIRST: Final = 128
"""The first window: most callers want one screenful."""
CROWDED: Final = 5_000
"""A window with more messages than this is shrunk, to bound memory."""
MARGIN_SECONDS: Final = 5.0
"""How much later than its event a message may be stored, since clocks differ."""

_FRACTION = re.compile(r"\.(\d{1,9})")


class Kept(NamedTuple):
    """A message stored in a stream."""

    sequence: int
    subject: str
    stored_ns: int
    body: bytes
    headers: dict[str, str]

    @property
    def stored(self) -> float:
        """When the server stored it, in seconds since the epoch."""
        return self.stored_ns / 1e9

    @property
    def run(self) -> str:
        """The run it carries."""
        return read_heading(self.headers, self.sequence, self.stored_ns).run

    @property
    def stamp(self) -> int:
        """The message number: 1 unless it was published again."""
        return number_of(self.headers)

    @property
    def due(self) -> float:
        """When a delayed or parked message is due; 0 for any other."""
        return due_of(self.headers)

    @property
    def user_headers(self) -> dict[str, str]:
        """The headers that are neither Holdfast's nor the server's."""
        return user_headers(self.headers)


def _kept(message: Received) -> Kept:
    headers = message.headers
    return Kept(
        int(headers["Nats-Sequence"]),
        headers["Nats-Subject"],
        _nanoseconds(headers["Nats-Time-Stamp"]),
        message.body,
        headers,
    )


def _nanoseconds(text: str) -> int:
    """The server's time, exact because run ids are derived from it."""
    fraction = _FRACTION.search(text)
    whole = _FRACTION.sub("", text).replace("Z", "+00:00")
    digits = fraction[1].ljust(9, "0") if fraction else "0"
    return int(datetime.fromisoformat(whole).timestamp()) * 1_000_000_000 + int(digits)


# ---- reading


async def oldest(broker: Broker, stream: str, subject: str, start: int = 1) -> AsyncIterator[Kept]:
    """The stored messages of a subject, oldest first."""
    async for message in direct_batch(broker, stream, subject, start):
        yield _kept(message)


async def newest(
    broker: Broker, stream: str, subject: str, before: int = 0, until: float = 0.0
) -> AsyncIterator[Kept]:
    """The stored messages of a subject, newest first.

    `before`: those with a lower sequence. `until`: without those that were certainly stored later.
    """
    if until:
        later = {"next_by_subj": subject, "start_time": rfc3339(until + MARGIN_SECONDS)}
        first_later = await _direct(broker, stream, later)
        if first_later and (not before or first_later.sequence < before):
            before = first_later.sequence
    state = await stream_state(broker, stream)
    first, high = int(state["first_seq"]), int(state["last_seq"])
    high = min(high, before - 1) if before else high
    span = FIRST
    while high >= first:
        low = max(first, high - span + 1)
        found = await _between(broker, stream, subject, low, high)
        if found is None:
            span = max(PAGE, span // 8)
            continue
        for kept in reversed(found):
            yield kept
        crowded = len(found) >= span // 2
        span = max(span, min(4 * span, PAGE)) if crowded else 4 * span
        high = low - 1


async def _between(
    broker: Broker, stream: str, subject: str, low: int, high: int
) -> list[Kept] | None:
    """The messages in a range of sequences; None when there are too many to hold."""
    found: list[Kept] = []
    while True:
        page = await direct_page(broker, stream, subject, low, min(PAGE, high - low + 1))
        found += [kept for m in page.messages if (kept := _kept(m)).sequence <= high]
        if not page.more or page.last >= high:
            return found
        if len(found) > CROWDED and high - low >= PAGE:
            return None
        low = page.last + 1


async def by_sequence(broker: Broker, stream: str, sequence: int) -> Kept | None:
    """One stored message."""
    return await _direct(broker, stream, {"seq": sequence})


async def last_of(broker: Broker, stream: str, subject: str) -> Kept | None:
    """The last stored message of a subject without wildcards."""
    return await _direct(broker, stream, {"last_by_subj": subject})


async def next_of(broker: Broker, stream: str, subject: str, start: int) -> Kept | None:
    """The first stored message of a subject at or after a sequence."""
    return await _direct(broker, stream, {"seq": start, "next_by_subj": subject})


async def _direct(broker: Broker, stream: str, request: dict[str, Any]) -> Kept | None:
    found = await direct_get(broker, stream, request)
    return _kept(found) if found else None


async def stream_state(broker: Broker, stream: str) -> dict[str, Any]:
    """A stream's counts, from its leader."""
    info = await broker.api(f"STREAM.INFO.{stream}")
    state: dict[str, Any] = info["state"]
    return state


async def subject_counts(broker: Broker, stream: str, subject: str) -> dict[str, int]:
    """How many messages each matching subject of a stream has."""
    counts: dict[str, int] = {}
    while True:
        request = {"subjects_filter": subject, "offset": len(counts)}
        info = await broker.api(f"STREAM.INFO.{stream}", request)
        page: dict[str, int] = info["state"].get("subjects") or {}
        counts |= page
        if not page or len(counts) >= int(info.get("total", 0)):
            return counts


async def in_line(broker: Broker) -> set[tuple[tuple[str, str], str]]:
    """Every run that waits for a place in a limit, with the gate it waits for."""
    names = broker.names
    subjects = await subject_counts(broker, names.jobs, names.line("*", "*", "*"))
    return {where for subject in subjects if (where := names.parse_line(subject)) is not None}


# ---- deleting


async def delete(broker: Broker, stream: str, sequence: int) -> bool:
    """Delete one message; False when it does not exist."""
    try:
        await broker.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})
    except errors.BrokerError:  # the server has several errors for "no such message"
        if await by_sequence(broker, stream, sequence) is None:
            return False
        raise
    return True
