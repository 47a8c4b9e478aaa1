"""Completes the history: runs that ended on a lost node and have no line in it.

A worker settles a run, appends its line and acknowledges its message, in this order. If it dies in
between, a redelivery finds the ended record and appends the line, with the payload. If no worker
receives it before that record expires, only a line in the history can show that the run has ended.
So lines that are still missing after a pause are appended here, without the payload.

Nobody redelivers an `at_most_once` run: its line is appended at once.

Not guaranteed: anything about a record that expired before a coordinator saw it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from holdfast.broker import Broker, Entry
from holdfast.errors import BrokerError, HoldfastError
from holdfast.model.run import RunRecord
from holdfast.ownership.history import TRY_SECONDS, History

log = logging.getLogger("holdfast.coordinator")

FRESH_SECONDS: Final = 300.0
"""How long ago a run may have ended whose line is missing: longer than it takes to declare a node
lost."""
PAUSE_SECONDS: Final = 15.0
"""Three times the usual `ack_wait`, after which another worker receives the message."""
PART: Final = 4
"""The pause is at most this fraction of the life of records, so that it ends before they expire."""
LOOK_SECONDS: Final = 1.0
"""How often to look for lines that are due: usually there are none."""


class Unfiled:
    """Appends the lines that lost nodes did not write."""

    def __init__(self, broker: Broker, history: History, guard_seconds: float) -> None:
        self._broker = broker
        self._history = history
        self._pause = min(PAUSE_SECONDS, guard_seconds / PART)
        self._waiting: dict[str, tuple[float, RunRecord]] = {}
        """When to append the line of a run, and its record."""

    def may_be(self, entry: Entry, record: RunRecord) -> bool:
        """Whether a run ended so recently that its line may be missing."""
        return record.terminal and entry.stored > self._broker.server_now() - FRESH_SECONDS

    async def add(self, ended: Mapping[str, RunRecord]) -> None:
        """Note those of a lost node's ended runs that have no line."""
        missing = await self._missing(ended)
        due = self._broker.clock.monotonic() + self._pause
        self._waiting |= {run: (0.0 if r.once else due, r) for run, r in missing.items()}
        await self.file()

    async def file(self) -> None:
        """Append the lines that are due; what cannot be stored stays for the next call."""
        now = self._broker.clock.monotonic()
        due = {run: record for run, (at, record) in self._waiting.items() if at <= now}
        for run, record in (await self._missing(due)).items():
            try:
                await self._history.append(run, record, seconds=TRY_SECONDS)
                log.info("appended the end of run %s to the history", run)
            except BrokerError as error:
                log.warning("the end of run %s is not in the history yet: %s", run, error)
                return
            except HoldfastError as error:  # retrying would not help
                log.error("the end of run %s cannot be appended to the history: %s", run, error)
            self._waiting.pop(run, None)
        for run in due:
            self._waiting.pop(run, None)

    async def _missing(self, ended: Mapping[str, RunRecord]) -> dict[str, RunRecord]:
        filed = await self._history.filed(ended) if ended else ()
        return {run: record for run, record in ended.items() if run not in filed}
