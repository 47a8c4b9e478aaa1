"""Answers that many request, computed once: kept in a bucket, so that all replicas share them.

The server removes an expired answer; the next reader computes it, only one at a time inside a
process. A bucket's TTL is at least a second. Not guaranteed: that two processes do not compute the
same answer at once; both are right.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from holdfast import Bucket
from uptime.app import app

Answer = dict[str, Any]


class Cache:
    """Answers by name."""

    def __init__(self, seconds: float, bucket: Bucket[Answer] | None = None) -> None:
        self.made = 0
        """How many answers this process has computed."""
        self._seconds = seconds
        self._bucket: Bucket[Answer] = bucket or app.bucket("uptime-cache")
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def get(self, name: str, make: Callable[[], Awaitable[Answer]]) -> Answer:
        """The cached answer, computed if there is none young enough."""
        async with self._locks[name]:
            entry = await self._bucket.get(name)
            if entry is not None:
                return entry.value
            self.made += 1
            answer = await make()
            await self._bucket.put(name, answer, ttl=self._seconds)
            return answer

    async def forget(self, *names: str) -> None:
        """Drop these, so that the next request computes them."""
        for name in names:
            await self._bucket.delete(name)
