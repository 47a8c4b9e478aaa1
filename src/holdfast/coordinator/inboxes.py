"""The inboxes of dead workers, emptied.

A pull request outlives the worker that made it while anybody seems to listen to its inbox: somebody
who listens to every subject, or a child process that has the dead worker's socket. Until it
expires, the server hands it messages, those that were just given back among them, and each would
wait for `ack_wait`. So the coordinator that declared the worker lost listens to its inbox for as
long as its requests can live, and gives back at once what arrives there.

It listens only where somebody else does: its own subscription would keep requests alive that the
server is about to drop, and where the streams are in another account their messages reach nobody.

Not covered: what was handed out between the death and the verdict. It comes back after `ack_wait`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from holdfast.broker import Broker
from holdfast.broker.pull import EXPIRES_SECONDS, NAK
from holdfast.errors import BrokerError
from holdfast.names import inbox_probe, is_pull_inbox

log = logging.getLogger("holdfast.coordinator")

LISTEN_SECONDS: Final = EXPIRES_SECONDS + 5.0


class DeadInboxes:
    """Listens to the inboxes of lost workers."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._open: dict[str, asyncio.Task[None]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def drain(self, inbox: str) -> None:
        """Give back what arrives in an inbox from now on, for as long as anything can."""
        if inbox in self._open or not is_pull_inbox(inbox) or self._denied:
            return
        if not await self._is_heard(inbox):
            return
        subscription = await self._broker.listen(f"{inbox}.>", self._receive)
        self._open[inbox] = asyncio.create_task(
            self._forget_later(inbox, subscription), name="holdfast-dead-inbox"
        )

    @property
    def _denied(self) -> bool:
        """One refusal answers for all: the server would refuse, and log, every other one."""
        return any(".pull." in subject for subject in self._broker.denied)

    async def _is_heard(self, inbox: str) -> bool:
        """Whether anybody listens: the server says no before it answers what is sent after it."""
        answer = await self._broker.send(inbox_probe(inbox), b"")
        await self._broker.flush()
        if not answer.done():
            answer.cancel()
            return True
        return answer.exception() is None and answer.result().status != "503"

    async def _forget_later(self, inbox: str, subscription: Any) -> None:
        await self._broker.clock.sleep(LISTEN_SECONDS)
        self._open.pop(inbox, None)
        await self._broker.unsubscribe(subscription)

    def _receive(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        where = reply.decode("ascii", "replace")
        if self._broker.names.takes_acks(where):
            task = asyncio.create_task(self._give_back(where), name="holdfast-nak")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _give_back(self, reply: str) -> None:
        try:
            await self._broker.publish(reply, NAK)
        except BrokerError as error:
            log.debug("could not give back a message of a dead worker: %s", error)

    async def close(self) -> None:
        """Stop listening; the connection's end takes the subscriptions with it."""
        tasks = [*self._open.values(), *self._sending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._open.clear()
