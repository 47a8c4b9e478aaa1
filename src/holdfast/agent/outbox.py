"""The outbox: keeps a return until the server has stored it.

A return is published on the agent's subject of the run and repeated until confirmed, across lost
connections and missing streams. The server keeps the first copy: a rejected repeat means it is
stored. A return too large for a message goes to the object store or is cut, with a note saying so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from holdfast.broker import Broker
from holdfast.broker.objects import Objects
from holdfast.broker.wire import ENVELOPE_BYTES, Headers
from holdfast.errors import BrokerError, Conflict, PermissionDenied
from holdfast.identity.reports import ReportSigner
from holdfast.model import fleet
from holdfast.model.fleet import Return
from holdfast.retrying import retrying

log = logging.getLogger("holdfast.agent")

CUT_TO: Final = 16 * 1024
"""Bytes kept of a value that is too large for a message: enough to recognise it."""
MOST_UNDER_WAY: Final = 10_000
"""Bounds memory; the journal keeps the rest, and they are sent after the next reconnect."""
MOST_AT_ONCE: Final = 64
"""Returns that are tried at the same time: after a long absence a host has hundreds, and a fleet
of them must not flood the server."""


class ReturnOutbox:
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
        self._under_way: dict[str, asyncio.Future[Any]] = {}
        self._places = asyncio.Semaphore(MOST_AT_ONCE)
        self._closing = False

    def send(self, run: str, body: bytes) -> None:
        """Send a return until the server has stored it."""
        if run in self._under_way or len(self._under_way) >= MOST_UNDER_WAY:
            return
        try:
            if len(self._under_way) < MOST_AT_ONCE and self._fits(body):
                self._under_way[run] = self._put(run, body)
                return
        except BrokerError as error:
            log.debug("the return of run %s waits: %s", run, error)
        self._keep_sending(run, body)

    def _fits(self, body: bytes) -> bool:
        return len(body) <= self._broker.max_message_bytes - ENVELOPE_BYTES

    def _signed(self, run: str, body: bytes) -> tuple[str, bytes, Headers | None]:
        headers = None
        if self._signer:
            headers = self._signer.sign(kind="return", run=run, payload=body)
        return self._broker.names.returned(run, self._agent), body, headers

    def _put(self, run: str, body: bytes) -> asyncio.Future[int]:
        """The first try, without a task: nearly all returns are stored by it."""

        def over(stored: asyncio.Future[int]) -> None:
            self._under_way.pop(run, None)
            if stored.cancelled():
                return
            error = stored.exception()
            if error is None or isinstance(error, Conflict):
                self._sent(run)
            elif not self._closing:
                self._keep_sending(run, body)

        return self._broker.put(*self._signed(run, body), over)

    def _keep_sending(self, run: str, body: bytes) -> None:
        task = asyncio.create_task(self._send(run, body), name=f"holdfast-return-{run}")
        self._under_way[run] = task
        task.add_done_callback(lambda _: self._under_way.pop(run, None))

    async def _send(self, run: str, body: bytes) -> None:
        clock, what = self._broker.clock, "sending a return"
        async with self._places:
            stored = await retrying(
                lambda: self._store(run, body), clock=clock, what=what, on=BrokerError
            )
        if stored:
            self._sent(run)

    async def _store(self, run: str, body: bytes) -> bool:
        """Store a return; False if this login is not permitted to."""
        try:
            await self._broker.store(*self._signed(run, await self._fitting(run, body)))
        except Conflict:
            return True  # stored before: the answer was lost
        except PermissionDenied as error:
            log.error("the return of run %s cannot be sent: %s", run, error)
            return False
        return True

    async def _fitting(self, run: str, body: bytes) -> bytes:
        """The return in a form that fits into a message."""
        if self._fits(body):
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
        self._closing = True
        sending = list(self._under_way.values())
        if sending:
            await asyncio.wait(sending, timeout=seconds)
        for one in sending:
            one.cancel()
        await asyncio.gather(*sending, return_exceptions=True)


def cut(found: Return, size: int) -> Return:
    """A return with its oversized value cut to its beginning, and a note."""
    head = msgspec.json.encode(found.value)[:CUT_TO].decode("utf-8", "replace")
    return msgspec.structs.replace(
        found, value=head, note=f"cut: {size:,} bytes are more than a message can carry"
    )
