"""Sending through taskiq, whichever broker it has."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.sending import Payload
from benchmarks.subjects.job import AT_ONCE


class TaskiqSender:
    """`kiq`; many at once for want of a bulk call."""

    def __init__(self, broker: Any, task: Any) -> None:
        self._broker = broker
        self._task = task

    async def open(self) -> None:
        await self._broker.startup()

    async def one(self, payload: Payload) -> None:
        await self._task.kiq(**payload)

    async def many(self, payloads: list[Payload]) -> None:
        for start in range(0, len(payloads), AT_ONCE):
            part = payloads[start : start + AT_ONCE]
            await asyncio.gather(*(self._task.kiq(**payload) for payload in part))

    async def close(self) -> None:
        await self._broker.shutdown()
