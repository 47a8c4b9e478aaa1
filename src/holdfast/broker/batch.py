"""Atomic batches: up to a thousand writes to one stream that all happen, or none.

Each write may name the revision that it expects of its own subject, or of another one (a fence).
One refusal refuses the whole batch, and the server does not say which: whoever asks reads what is
there. It is also a group commit: the stream syncs once for all of them.

A batch whose answer is lost is unknown as a whole; its parts never differ.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final, NamedTuple

from holdfast.broker.answers import Stored, read_ack
from holdfast.broker.connection import Broker
from holdfast.broker.wire import Headers
from holdfast.names import H_BATCH_COMMIT, H_BATCH_ID, H_BATCH_SEQUENCE

LARGEST_BATCH: Final = 1_000


class Write(NamedTuple):
    """One write of a batch."""

    subject: str
    body: bytes
    headers: Headers


async def store_batch(broker: Broker, writes: Sequence[Write]) -> Stored:
    """Write them all or none; the sequence is that of the last, the others lie right before it."""
    if not 0 < len(writes) <= LARGEST_BATCH:
        raise ValueError(f"a batch has 1 to {LARGEST_BATCH} writes, not {len(writes)}")
    batch = secrets.token_hex(8)
    for number, write in enumerate(writes, 1):
        headers = {**write.headers, H_BATCH_ID: batch, H_BATCH_SEQUENCE: str(number)}
        if number == len(writes):
            headers[H_BATCH_COMMIT] = "1"
            return await read_ack(await broker.send(write.subject, write.body, headers))
        await broker.publish(write.subject, write.body, headers)
    raise AssertionError("unreachable")
