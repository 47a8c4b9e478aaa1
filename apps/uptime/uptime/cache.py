"""Answers that many ask for, made once: kept in a bucket, so that all replicas share them.

The server removes an answer when its time is over; who finds none makes it. Inside one process only
one makes it at a time. A bucket's TTL is at least a second. Not guaranteed: that two processes do
not make the same answer at once; both are right.
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
        """How many answers this process has made."""
        self._seconds = seconds
        self._bucket: Bucket[Answer] = bucket or app.bucket("uptime-cache")
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def get(self, name: str, make: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer of that name; made if there is none that is young enough."""
        async with self._locks[name]:
            entry = await self._bucket.get(name)
            if entry is not None:
                return entry.value
            self.made += 1
            answer = await make()
            await self._bucket.put(name, answer, ttl=self._seconds)
            return answer

    async def forget(self, *names: str) -> None:
        """Make these anew when they are next asked for."""
        for name in names:
            await self._bucket.delete(name)
