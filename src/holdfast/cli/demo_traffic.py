"""The demo's customers: orders with keys, some sent twice, delayed reminders, a broken page."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

from holdfast.cli.demo_board import Board
from holdfast.errors import BrokerError

if TYPE_CHECKING:
    from holdfast.app import Holdfast

PAUSE_SECONDS = 0.12
PUBLISHES = {"charge": "order-paid"}
"""Which event a run of a job publishes when it is done."""
ITEMS = ("lamp", "chair", "kettle", "clock", "globe")


class Traffic:
    """Sends runs until cancelled, and tells the board about each that was accepted."""

    def __init__(self, app: Holdfast, board: Board) -> None:
        self._app = app
        self._board = board
        self._number = 0

    async def run(self) -> None:
        """A run every so often; what the server does not accept is not counted."""
        while True:
            self._number += 1
            try:
                await self._send(self._number)
            except BrokerError as error:
                self._board.say(f"not accepted: {error}")
            await asyncio.sleep(PAUSE_SECONDS * random.uniform(0.5, 1.5))

    async def _send(self, number: int) -> None:
        if number % 8 == 0:
            number -= random.randint(1, min(5, number - 1))
        await self._order(number)
        if number % 10 == 0:
            delay = random.uniform(2, 6)
            await self._enqueue("remind", random.choice(("ann", "bob", "eve")), delay=delay)
        if number % 12 == 0:
            await self._enqueue("stock", number // 12 % 14)
        if number % 20 == 1:
            await self._enqueue("report", time.strftime("%Y-%m-%d"))

    async def _order(self, number: int) -> None:
        order = {"id": number, "item": ITEMS[number % len(ITEMS)], "cents": 100 * number}
        await self._enqueue("charge", order, key=f"order-{number}")

    async def _enqueue(self, job: str, payload: Any, **options: Any) -> None:
        run = await self._app.jobs[job].enqueue(payload, **options)
        if run.duplicate:
            self._board.duplicate(run.id, job)
        else:
            delay = options.get("delay", 0.0)
            self._board.accept(run.id, job, time.monotonic(), delay=delay)
