"""Framing: encodes several values as bytes that parse in exactly one way.

Each value is preceded by its length, and the whole by its purpose. So different lists of values
never give the same bytes, and a signature for one purpose is invalid for any other.
"""

from __future__ import annotations


def framed(purpose: bytes, *values: str | bytes) -> bytes:
    """The bytes to sign or hash."""
    out = bytearray(len(purpose).to_bytes(4, "big") + purpose)
    for value in values:
        raw = value.encode() if isinstance(value, str) else value
        out += len(raw).to_bytes(4, "big") + raw
    return bytes(out)
