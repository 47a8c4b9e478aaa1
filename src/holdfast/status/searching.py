"""Searches runs by payload and headers: `customer=7` finds payloads with that member and headers
with that name.

A member matches at any depth, so nobody needs to remember a payload's shape in an emergency. Values
are compared as text: `7` finds 7 and "7". Bytes that are not JSON match nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

DEEPEST: Final = 20
"""Levels of a payload that are searched; nobody writes deeper ones by hand."""


class Member(NamedTuple):
    """A name and the value it should have."""

    name: str
    value: str

    def matches(self, body: bytes, headers: Mapping[str, str]) -> bool:
        """Whether a message has such a header, or such a member in its payload."""
        name = self.name.casefold()
        if any(h.casefold() == name and v == self.value for h, v in headers.items()):
            return True
        if self.name.encode() not in body:
            return False  # most payloads end here, without being decoded
        try:
            value = json.loads(body)
            return self._inside(value, DEEPEST) if self.name else _text(value) == self.value
        except (ValueError, RecursionError):
            return False

    def _inside(self, value: Any, depth: int) -> bool:
        if not depth:
            return False
        if isinstance(value, dict):
            if self.name in value and _text(value[self.name]) == self.value:
                return True
            value = list(value.values())
        return isinstance(value, list) and any(self._inside(one, depth - 1) for one in value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def member(search: str) -> Member | None:
    """The member that a search names; None if it is plain text. `=7` means a payload that is 7."""
    name, equals, value = search.partition("=")
    return Member(name.strip(), value.strip()) if equals and value.strip() else None
