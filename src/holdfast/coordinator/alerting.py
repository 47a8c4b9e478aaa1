"""Evaluates the rules of alerts, and sends notices to the channels.

One coordinator at a time does this, without being elected: each round ends with a compare-and-swap
of the board, and one that does not hold it stands by until the board stops changing.

Guaranteed: however many coordinators run, each notice is created once, and at any time only the one
that holds the claim of a delivery tries it. Not guaranteed: that a receiver gets it only once. If a
coordinator dies between sending a notice and recording that, it is sent again, with the same id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.client import Client
from holdfast.errors import BrokerError, Conflict
from holdfast.model import alert as alerts
from holdfast.model.alert import Board, Notice
from holdfast.notices import NotDelivered
from holdfast.status.alerts import Alerting, Readings, read_board, write_board

log = logging.getLogger("holdfast.coordinator")

STANDBY_ROUNDS: Final = 3
"""After this many rounds without a change another coordinator takes over: one slow round is
normal."""
MOST_AT_ONCE: Final = 10
"""Concurrent deliveries: each occupies a thread."""
WRITE_TRIES: Final = 5
"""Tries to record what was sent; at most one other coordinator writes in between."""


class Alerter:
    """Evaluates the rules and sends the notices of one namespace."""

    def __init__(self, client: Client, node: str, alerting: Alerting) -> None:
        self._broker = client.broker
        self._node = node
        self._alerting = alerting
        self._readings = Readings(client)
        self._channels = {channel.name: channel for channel in alerting.channels}

    async def step(self) -> None:
        """One round, if no other coordinator does it."""
        board, revision = await read_board(self._broker)
        now = self._broker.server_now()
        recent = now - board.at < STANDBY_ROUNDS * max(board.every, 1.0)
        if recent and board.by not in ("", self._node):
            return
        due = await self._judge(board, now)
        try:
            await write_board(self._broker, board, revision)
        except Conflict:
            return  # another coordinator does it
        if due:
            await self._write_down(await self._send_all(due))

    async def _judge(self, board: Board, now: float) -> Sequence[tuple[Notice, str]]:
        alerting, config = self._alerting, self._alerting.config
        readings, unread = await self._readings.read(alerting.rules)
        channels = tuple(self._channels)
        alerts.drop_channels(board, channels)
        alerts.judge(
            board,
            alerting.rules,
            readings,
            now,
            channels=channels,
            clear=config.clear_seconds,
            unread=unread,
        )
        board.by, board.at, board.every = self._node, now, config.every_seconds
        board.rules = tuple(rule.text for rule in alerting.rules)
        board.channels = channels
        return alerts.claim(board, now)

    async def _send_all(self, due: Sequence[tuple[Notice, str]]) -> list[tuple[str, str, str]]:
        turn = asyncio.Semaphore(MOST_AT_ONCE)

        async def send(notice: Notice, channel: str) -> tuple[str, str, str]:
            async with turn:
                return notice.id, channel, await self._send(notice, channel)

        return list(await asyncio.gather(*(send(*one) for one in due)))

    async def _send(self, notice: Notice, channel: str) -> str:
        """Send a notice; returns what went wrong, or nothing."""
        alerting = self._alerting
        message = alerting.message(notice, self._broker.names.namespace)
        try:
            await alerting.send(self._channels[channel], message)
        except NotDelivered as error:
            log.warning("channel %s did not get the notice %r: %s", channel, notice.text, error)
            return str(error)[:300] or "not delivered"
        log.info("told %s: %s", channel, notice.text)
        return ""

    async def _write_down(self, outcomes: Sequence[tuple[str, str, str]]) -> None:
        def change(board: Board) -> None:
            alerts.record(board, outcomes)

        await self._change(change)

    async def _change(self, change: Callable[[Board], None]) -> None:
        for last in [False] * (WRITE_TRIES - 1) + [True]:
            try:
                board, revision = await read_board(self._broker)
                change(board)
                await write_board(self._broker, board, revision)
            except (Conflict, BrokerError):
                if last:
                    raise
                await self._broker.clock.sleep(0.2)
            else:
                return
