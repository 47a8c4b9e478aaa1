"""Framing: several values as one run of bytes that can be read in one way only.

Each value is preceded by its length, and the whole by what it is for. So no two different lists of
values give the same bytes, and what was signed for one purpose is good for no other.
"""

from __future__ import annotations


def framed(purpose: bytes, *values: str | bytes) -> bytes:
    """The bytes to sign or to hash."""
    out = bytearray(len(purpose).to_bytes(4, "big") + purpose)
    for value in values:
        raw = value.encode() if isinstance(value, str) else value
        out += len(raw).to_bytes(4, "big") + raw
    return bytes(out)
