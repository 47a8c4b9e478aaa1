"""The payload of a run, from wherever it still is.

It travels in the run's message and is kept nowhere else: while the run waits or is running it is in
the stream (a running run's record says where, in the subject of its acknowledgement), of a run that
was given up in its dead letter, of one that starts at most once in its record. A run that has ended
otherwise has none any more.
"""

from __future__ import annotations

from holdfast.client import Client
from holdfast.model.codec import whole_number
from holdfast.names import H_OBJECT
from holdfast.status.finding import Found
from holdfast.status.messages import Kept, by_sequence

_ACK = "$JS.ACK."


async def payload_of(client: Client, found: Found) -> tuple[bytes, dict[str, str]] | None:
    """A run's payload and the sender's own headers; None when they are gone."""
    record = found.record
    if record and (record.body or record.body_object):
        name = record.body_object
        return (await client.objects.get(name) if name else record.body), {}
    kept = await _message(client, found)
    if kept is None:
        return None
    name = kept.headers.get(H_OBJECT, "")
    body = await client.objects.get(name) if name else kept.body
    return body, kept.user_headers


async def _message(client: Client, found: Found) -> Kept | None:
    if found.carrier:
        return found.carrier.kept
    if found.letter:
        return found.letter
    reply = found.record.reply if found.record else ""
    place = place_of(reply) if client.broker.names.takes_acks(reply) else None  # not any stream's
    return await by_sequence(client.broker, *place) if place else None


def place_of(reply: str) -> tuple[str, int] | None:
    """Stream and sequence of a message, from where it is acknowledged.

    `$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>…`, or with domain and account in front.
    """
    if not reply.startswith(_ACK):
        return None
    parts = reply.removeprefix(_ACK).split(".")
    parts = parts[2:] if len(parts) > 8 else parts
    sequence = whole_number(parts[3]) if len(parts) >= 7 else 0
    return (parts[0], sequence) if sequence else None
