"""Dead letters page by page: a page looks at no more than `LOOK`, however many there are."""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.client import Client
from holdfast.status.dead import DeadFilter, DeadLetter, read_letter
from holdfast.status.messages import newest

LOOK: Final = 2_000


class DeadPage(msgspec.Struct, frozen=True):
    """One page of letters, newest first."""

    letters: list[DeadLetter]
    older: int
    """The next page has what comes before this id; 0: this was the last."""


async def dead_page(
    client: Client, wanted: DeadFilter, limit: int = 50, before: int = 0, look: int = LOOK
) -> DeadPage:
    """The letters that match from a place on; fewer than `limit` when few of many match."""
    names = client.broker.names
    subject = names.dead_letter(wanted.group or "*", wanted.job or "*")
    found: list[DeadLetter] = []
    looked, at = 0, 0
    async for kept in newest(client.broker, names.dead, subject, before):
        if kept.stored < wanted.since:
            return DeadPage(found, 0)
        if looked >= look or len(found) >= limit:
            return DeadPage(found, at)
        looked, at = looked + 1, kept.sequence
        letter = read_letter(kept, names)
        if wanted.matches(letter):
            found.append(letter)
    return DeadPage(found, 0)
