"""Atomic batches: up to a thousand writes to one stream that all happen, or none.

Each write may name the revision that it expects of its own subject, or of another one (a fence).
One refusal refuses the whole batch, and the server does not say which write was refused: the caller
has to read. It is also a group commit: the stream syncs once for all of them.

A batch whose answer is lost is unknown as a whole; its parts never differ.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Final, NamedTuple

from holdfast.broker.connection import Broker
from holdfast.broker.wire import Headers, Received, Stored, read_ack
from holdfast.names import H_BATCH_COMMIT, H_BATCH_ID, H_BATCH_SEQUENCE

LARGEST_BATCH: Final = 1_000
"""The server's limit."""


class Write(NamedTuple):
    """One write of a batch."""

    subject: str
    body: bytes
    headers: Headers


async def store_batch(broker: Broker, writes: Sequence[Write]) -> Stored:
    """Write all or none; returns the sequence of the last; the others directly precede it."""
    return await read_ack(await send_batch(broker, writes))


async def send_batch(broker: Broker, writes: Sequence[Write]) -> asyncio.Future[Received]:
    """Send a batch; the future gets its one answer. Many may be under way."""
    if not 0 < len(writes) <= LARGEST_BATCH:
        raise ValueError(f"a batch has 1 to {LARGEST_BATCH} writes, not {len(writes)}")
    batch = secrets.token_hex(8)
    numbered = [
        (w.subject, w.body, {**w.headers, H_BATCH_ID: batch, H_BATCH_SEQUENCE: str(number)})
        for number, w in enumerate(writes, 1)
    ]
    subject, body, headers = numbered.pop()
    await broker.publish_all(numbered)
    return await broker.send(subject, body, headers | {H_BATCH_COMMIT: "1"})
