"""A lease: a renewable, expiring right to a role, and how long its holder may trust it.

The trust window counts from *before* the last acknowledged renewal was sent, on the holder's own
monotonic clock, and is a little shorter than the TTL: neither a slow answer nor a clock that runs a
few per cent slow can stretch it. The server counts from when it stored the renewal, which is later;
so the holder has stopped trusting itself before anybody can see the lease expire.
"""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.model.codec import Codec, Count, Instant, Name

TRUSTED_PART = 0.9
"""Trusted fraction of the TTL: the holder's clock may run up to a tenth slow, far more than any
real clock does."""


class LeaseRecord(msgspec.Struct, omit_defaults=True, frozen=True):
    """The record of a lease, written by its holder."""

    holder: Name
    token: str
    """One per tenure: tells after a lost answer, or a refusal, whether the write was ours."""
    since: Instant = 0.0
    renewed: Count = 0


class TermRecord(msgspec.Struct, omit_defaults=True, frozen=True):
    """A leader's term; the revision of this record is the epoch."""

    holder: Name
    token: str
    since: Instant = 0.0


class TrustWindow:
    """How long the holder may act on its lease."""

    __slots__ = ("_sent", "_ttl")

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._sent: float | None = None

    def confirmed(self, sent: float) -> None:
        """A renewal that left at `sent` was acknowledged. Answers may come out of order."""
        self._sent = sent if self._sent is None else max(self._sent, sent)

    def ended(self) -> None:
        """The lease is lost or was given back."""
        self._sent = None

    def open(self, now: float) -> bool:
        """Whether the holder may still act."""
        return self._sent is not None and now - self._sent < self._ttl * TRUSTED_PART

    def left(self, now: float) -> float:
        """Seconds until the holder must stop; 0 when it must not act."""
        if self._sent is None:
            return 0.0
        return max(0.0, self._sent + self._ttl * TRUSTED_PART - now)


LEASE: Final = Codec[LeaseRecord](LeaseRecord, "a lease")
TERM: Final = Codec[TermRecord](TermRecord, "a term")
decode_lease = LEASE.decode
decode_term = TERM.decode


def encode(record: LeaseRecord | TermRecord) -> bytes:
    """A record as it is stored."""
    return msgspec.json.encode(record)
