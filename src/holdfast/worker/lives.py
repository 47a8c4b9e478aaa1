"""A worker's process over several lives: after it was cut off, it works on as another node.

A node that declared itself DISCONNECTED never works again: its runs may run elsewhere. Its process
can: a new worker starts in it once NATS is reachable. An orchestrator that restarts processes would
do the same, but with a back-off that grows during an outage.
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
        """Work until it is stopped, or fails for another reason."""
        while True:
            try:
                return await self._worker.run()
            except CutOff as error:
                if self._stopped:
                    raise
                log.warning("%s: this process goes on as a new node", error)
            self._worker = self._make()
