"""A live copy of a bucket's keys: every live view of a bucket is one of these.

It subscribes to the server's notification of each write, then reads the bucket page by page, and
remembers the newest revision below which nothing is missing (`seen`). A notification with the next
revision advances it. After a gap, after a reconnect, and whenever the regular comparison with the
stream's state differs, it reads on from there: a lost notification costs seconds, never a record.

A key is reported as gone only if the stream's leader confirms it: its newest write is a marker, or
the bucket has fewer keys than the mirror and this one is not among them. A lagging replica is
recognised, because the leader still has something after what the replica returned.

If the bucket was deleted and recreated, `on_deleted` may restore its content; nothing is reported
as gone for that reason. Records are passed on undecoded: their reader skips unreadable ones
(`Bucket.read`), which never stop the mirror.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from holdfast.broker.kv import Bucket, Entry, is_marker, parse_time
from holdfast.broker.wire import Headers, parse_headers
from holdfast.errors import Unavailable
from holdfast.model.codec import whole_number
from holdfast.names import H_SEQUENCE, kv_key
from holdfast.retrying import repeating, starting

log = logging.getLogger("holdfast.mirror")

LOOK_SECONDS: Final = 5.0
"""How often the stream's state is compared: one small request, and the longest that a change stays
unknown if its notification was lost."""
PACE_SECONDS: Final = 0.02
"""The shortest time between two reads: a starting fleet changes thousands of keys a second, and one
read covers all changes."""
AT_ONCE: Final = 500
"""Records handed over before other tasks may run: computing when each schedule is due takes
long."""
STALE_TRIES: Final = 25
STALE_SECONDS: Final = 0.2
"""Tries and the pause between them: together five seconds, longer than a healthy replica lags."""


async def _nothing() -> None:
    return None


class Mirror:
    """Follows one bucket after `open`, while `run` runs."""

    def __init__(
        self,
        bucket: Bucket,
        on_entry: Callable[[Entry], None],
        on_gone: Callable[[str], None] = lambda key: None,
        *,
        trusting: bool = True,
        on_deleted: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        """Without `trusting`, a notification only triggers a read: anyone who may publish on its
        subject can forge a notification, but not a record."""
        self.seen = 0
        """Every change up to this revision was passed on."""
        self._bucket = bucket
        self._broker = bucket.broker
        self._on_entry = on_entry
        self._on_gone = on_gone
        self._trusting = trusting
        self._on_deleted = on_deleted
        self._subject = self._broker.names.changed(bucket.name, "")
        self._revisions: dict[str, int] = {}
        """The newest revision of each key, including markers."""
        self._created = ""
        self._wake = asyncio.Event()

    async def open(self) -> None:
        """Subscribe, then read everything."""
        await self._broker.listen(f"{self._subject}>", self._heard)
        self._broker.on_reconnect(self.look_soon)
        what = f"reading {self._bucket.name}"
        await starting(self.look, clock=self._broker.clock, what=what)

    async def run(self) -> None:
        """Stay current until cancelled."""
        await repeating(
            self._look_and_rest,
            clock=self._broker.clock,
            every=LOOK_SECONDS,
            what=f"reading {self._bucket.name}",
            wake=self._wake,
        )

    def look_soon(self) -> None:
        """Compare soon: something may have been missed."""
        self._wake.set()

    async def _look_and_rest(self) -> None:
        await self.look()
        await self._broker.clock.sleep(PACE_SECONDS)

    async def look(self) -> None:
        """Compare with the bucket, and read what is missing."""
        info = await self._info()
        created = str(info.get("created", ""))
        if self._created not in ("", created) or int(info["state"]["last_seq"]) < self.seen:
            log.warning("%s was deleted and created again", self._bucket.name)
            await self._on_deleted()
            self._revisions.clear()
            self.seen = 0
            info = await self._info()
        self._created = created
        last = int(info["state"]["last_seq"])
        if last > self.seen:
            await self._read_on(last)
        if int(info["state"]["messages"]) < len(self._revisions):
            await self._find_gone()

    async def _info(self) -> dict[str, Any]:
        return await self._broker.api(f"STREAM.INFO.{self._bucket.stream}")

    # ---- reading

    async def _read_on(self, last: int) -> None:
        """Read every record after `seen`, until nothing is left to read."""
        for _ in range(STALE_TRIES):
            newest = await self._read_pages()
            if newest >= last or not await self._bucket.has_after(newest):
                self.seen = max(self.seen, last)
                return
            await self._broker.clock.sleep(STALE_SECONDS)
        raise Unavailable(f"{self._bucket.name} is read from a replica that is behind")

    async def _read_pages(self) -> int:
        newest, more, taken = self.seen, True, 0
        while more:
            page = await self._bucket.page(newest + 1, markers=True)
            for message in page.messages:
                key = kv_key(self._bucket.name, message.headers["Nats-Subject"])
                if is_marker(message.headers):
                    await self._confirm(key, int(message.headers[H_SEQUENCE]))
                else:
                    self._take(key, message.body, message.headers)
                taken += 1
                if taken % AT_ONCE == 0:
                    await asyncio.sleep(0)
            newest, more = max(newest, page.last), page.more
        return newest

    def _take(self, key: str, value: bytes, headers: Headers) -> int:
        """Pass on a write unless it is known; returns its revision."""
        revision = whole_number(headers.get(H_SEQUENCE))
        if revision > self._revisions.get(key, 0):
            self._revisions[key] = revision
            stored = parse_time(headers["Nats-Time-Stamp"])
            self._on_entry(Entry(key, value, revision, stored))
        return revision

    def _heard(self, subject: bytes, _: bytes, body: bytes, raw: bytes | None) -> None:
        headers = parse_headers(raw)
        if not self._trusting or is_marker(headers):
            self._wake.set()
            return
        revision = self._take(subject.decode()[len(self._subject) :], body, headers)
        if revision == self.seen + 1 and self._created:
            self.seen = revision
        elif revision != self.seen:
            self._wake.set()

    # ---- deleted keys

    async def _confirm(self, key: str, revision: int) -> None:
        self._revisions[key] = max(revision, self._revisions.get(key, 0))
        if await self._bucket.get(key) is None:
            self._on_gone(key)

    async def _find_gone(self) -> None:
        """Find keys that expired or were purged without leaving a marker."""
        state = await self._bucket.state(">")
        for key, revision in list(self._revisions.items()):
            if key not in state.keys and revision <= state.last:
                del self._revisions[key]
                self._on_gone(key)
