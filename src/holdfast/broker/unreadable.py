"""Records that this process could not read: skipped, counted, and logged once each.

Such a record is damaged, or written by a newer version or by somebody else. It must not stop its
reader, hide the records beside it, or fill the log on each poll. Every reader of records that
others wrote uses `read`; the count by bucket is `holdfast_unreadable_records_total`, and `holdfast
doctor` lists the records with the command that removes each of them unread.

Not guaranteed: exact counts. A record that is damaged again, in another way, is counted again; a
process that has seen very many forgets the oldest and may count one twice.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from holdfast.errors import Unreadable

if TYPE_CHECKING:
    from prometheus_client import Counter

log = logging.getLogger("holdfast.unreadable")

T = TypeVar("T")

REMEMBERED: Final = 4_096
"""Unreadable records remembered: a flood of them must not use up memory."""
LINES: Final = 20
"""Log lines per bucket in `WINDOW_SECONDS`: anybody who writes records could fill the disk."""
WINDOW_SECONDS: Final = 60.0
"""Short enough that new damage is logged soon after a flood."""


class Unreadables:
    """Reports unreadable records, for one connection."""

    def __init__(self) -> None:
        self.counter: Counter | None = None
        """Counts them; a process without metrics has none."""
        self._seen: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lines: dict[str, tuple[float, int]] = {}
        self._turn = threading.Lock()  # facts of a large fleet are read in a thread

    def read(self, decode: Callable[[bytes], T], bucket: str, key: str, body: bytes) -> T | None:
        """Decode a record; an unreadable one is reported and gives None."""
        try:
            return decode(body)
        except Unreadable as error:
            self.note(bucket, key, error, body)
            return None

    def note(self, bucket: str, key: str, error: Exception, body: bytes = b"") -> bool:
        """Count and log a record, unless it is known already; True if it was new."""
        place, digest = (bucket, key), hashlib.blake2s(body, digest_size=16).digest()
        with self._turn:
            if self._seen.get(place) == digest:
                return False
            self._seen[place] = digest
            self._seen.move_to_end(place)
            if len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)
        if self.counter is not None:
            self.counter.labels(bucket).inc()
        self._say(bucket, key, error)
        return True

    def _say(self, bucket: str, key: str, error: Exception) -> None:
        now = time.monotonic()
        since, count = self._lines.get(bucket, (now, 0))
        if now - since >= WINDOW_SECONDS:
            since, count = now, 0
        self._lines[bucket] = (since, count + 1)
        if count < LINES:
            log.warning("%s/%s is skipped: %s", bucket, key, error)
        elif count == LINES:
            log.warning(
                "%s has many records that cannot be read: no more of them are logged for %.0f s; "
                "see 'holdfast doctor'",
                bucket,
                WINDOW_SECONDS,
            )
