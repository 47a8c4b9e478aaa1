"""The outbox: keeps a return until the server has stored it.

A return is published on the agent's subject of the run and repeated until confirmed, across lost
connections and missing streams. The server keeps the first copy: a rejected repeat means it is
stored. A return too large for a message goes to the object store or is cut, with a note saying so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from holdfast.broker import Broker
from holdfast.broker.objects import Objects
from holdfast.broker.wire import ENVELOPE_BYTES
from holdfast.errors import BrokerError, Conflict, PermissionDenied
from holdfast.identity import ReportSigner
from holdfast.model import fleet
from holdfast.model.fleet import Return
from holdfast.retrying import retrying

log = logging.getLogger("holdfast.agent")

CUT_TO: Final = 16 * 1024
"""Bytes kept of a value that is too large for a message: enough to recognise it."""
MOST_UNDER_WAY: Final = 10_000
"""Bounds memory; the journal keeps the rest, and a dispatcher asks for it again."""


class Outbox:
    """The returns of one agent that are being sent."""

    def __init__(
        self,
        broker: Broker,
        agent: str,
        signer: ReportSigner | None,
        sent: Callable[[str], None],
    ) -> None:
        self._broker = broker
        self._agent = agent
        self._signer = signer
        self._sent = sent
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def send(self, run: str, body: bytes) -> None:
        """Send a return until the server has stored it."""
        if run in self._tasks or len(self._tasks) >= MOST_UNDER_WAY:
            return
        task = asyncio.create_task(self._send(run, body), name=f"holdfast-return-{run}")
        self._tasks[run] = task
        task.add_done_callback(lambda _: self._tasks.pop(run, None))

    async def _send(self, run: str, body: bytes) -> None:
        clock, what = self._broker.clock, "sending a return"
        if await retrying(lambda: self._store(run, body), clock=clock, what=what, on=BrokerError):
            self._sent(run)

    async def _store(self, run: str, body: bytes) -> bool:
        """Store a return; False if this login is not permitted to."""
        try:
            fitting = await self._fitting(run, body)
            headers = None
            if self._signer:
                headers = self._signer.sign(kind="return", run=run, payload=fitting)
            subject = self._broker.names.returned(run, self._agent)
            await self._broker.store(subject, fitting, headers)
        except Conflict:
            return True  # stored before: the answer was lost
        except PermissionDenied as error:
            log.error("the return of run %s cannot be sent: %s", run, error)
            return False
        return True

    async def _fitting(self, run: str, body: bytes) -> bytes:
        """The return in a form that fits into a message."""
        if len(body) <= self._broker.max_message_bytes - ENVELOPE_BYTES:
            return body
        found = fleet.decode_return(body)
        if self._signer is None:  # an agent with credentials may not write to the object store
            name = f"return/{run}/{self._agent}"
            await Objects(self._broker).put(name, msgspec.json.encode(found.value))
            return fleet.encode(
                msgspec.structs.replace(
                    found,
                    value=None,
                    object=name,
                    note=f"{len(body):,} bytes, kept in the object store",
                )
            )
        return fleet.encode(cut(found, len(body)))

    async def drain(self, seconds: float) -> None:
        """Wait up to `seconds` for pending returns, then leave them to the journal."""
        tasks = list(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def cut(found: Return, size: int) -> Return:
    """A return with its oversized value cut to its beginning, and a note."""
    head = msgspec.json.encode(found.value)[:CUT_TO].decode("utf-8", "replace")
    return msgspec.structs.replace(
        found, value=head, note=f"cut: {size:,} bytes are more than a message can carry"
    )
