"""Framing: encodes several values as bytes that parse in exactly one way.

Each value is preceded by its length, and the whole sequence by its purpose. So different lists of
values never give the same bytes, and a signature for one purpose is invalid for any other.
"""

from __future__ import annotations

import struct
from typing import Final

_LENGTH: Final = struct.Struct(">I").pack


def framed(purpose: bytes, *values: str | bytes) -> bytes:
    """The bytes to sign or hash."""
    out = [_LENGTH(len(purpose)), purpose]
    for value in values:
        raw = value.encode() if isinstance(value, str) else value
        out += (_LENGTH(len(raw)), raw)
    return b"".join(out)
