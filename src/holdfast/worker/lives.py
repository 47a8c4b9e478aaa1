"""A worker's process over several lives: after it was cut off, it works on as another node.

A node that has said it is DISCONNECTED never works again: its runs may run elsewhere. Its process
may, and has nothing to wait for but NATS: so the next worker starts in it once that is there. An
orchestrator that restarts processes would do the same, more slowly the longer an outage lasts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.errors import CutOff
from holdfast.worker.worker import Worker

log = logging.getLogger("holdfast.worker")


class Lives:
    """Runs one worker after the other, until one ends for another reason than being cut off."""

    def __init__(self, make: Callable[[], Worker]) -> None:
        self._make = make
        self._worker = make()
        self._stopped = False

    def stop(self) -> None:
        """Stop the worker; there is no next one."""
        self._stopped = True
        self._worker.stop()

    async def run(self) -> None:
        """Work until it is stopped, or cannot go on."""
        while True:
            try:
                return await self._worker.run()
            except CutOff as error:
                if self._stopped:
                    raise
                log.warning("%s: this process goes on as a new node", error)
            self._worker = self._make()
