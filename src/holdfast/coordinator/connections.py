"""Which connections the servers have, asked by number.

Any login may ask this about its own account, if its permissions allow the subject. Every server of
the cluster answers; only the word of the server that the connection was to counts. Of a node whose
server never answers (a leaf node's), or that is in another account, nothing is learned, and a login
that may not ask leaves coordinators to their pings.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from holdfast.broker import Broker
from holdfast.errors import BrokerError, Unreadable
from holdfast.model.codec import Codec
from holdfast.names import CONNECTIONS

log = logging.getLogger("holdfast.coordinator")

MOST_ASKED: Final = 4_096
"""Open questions that are remembered; far more than there are suspects at a time."""


class _Asked(msgspec.Struct, frozen=True):
    id: str


class _Connection(msgspec.Struct, frozen=True):
    cid: int


class _Found(msgspec.Struct, frozen=True):
    connections: tuple[_Connection, ...] = ()


class _OpenConnections(msgspec.Struct, frozen=True):
    server: _Asked
    data: _Found


ANSWER: Final = Codec[_OpenConnections](_OpenConnections, "a server's list of connections")

Told = Callable[[str, str, int, bool], None]
"""Called with the node, a server, the connection's number, and whether the server has it."""


class Connections:
    """Asks the servers of a cluster about single connections."""

    def __init__(self, broker: Broker, told: Told) -> None:
        self._broker = broker
        self._told = told
        self._inbox = ""
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[str, int]] = {}
        self._warned = False

    async def open(self) -> None:
        """Listen for answers."""
        self._inbox = self._broker.new_inbox()
        await self._broker.listen(f"{self._inbox}.*", self._on_answer)

    @property
    def allowed(self) -> bool:
        """Whether this login may ask, as far as is known."""
        return CONNECTIONS.lower() not in self._broker.denied

    def start_over(self) -> None:
        """After a reconnect: permissions may be others now."""
        self._broker.denied.pop(CONNECTIONS.lower(), None)

    async def ask(self, node: str, client: int) -> None:
        """Ask every server for the connection of a node; `told` gets what they say."""
        if not self.allowed:
            self._warn()
            return
        number = next(self._numbers)
        self._asked[number] = (node, client)
        if len(self._asked) > MOST_ASKED:
            del self._asked[next(iter(self._asked))]
        try:
            body = b'{"cid":%d}' % client
            await self._broker.publish(CONNECTIONS, body, reply=f"{self._inbox}.{number}")
        except BrokerError as error:
            log.debug("servers not asked for connections: %s", error)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "this login may not ask which connections are open (%s): dead nodes are noticed "
                "by pings alone, more slowly. Allow this user to publish to that subject; "
                "'holdfast auth renew' does so for every user",
                CONNECTIONS,
            )

    def _on_answer(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        try:
            answer = ANSWER.decode(body)
            node, client = self._asked[int(subject.rpartition(b".")[2])]
        except (Unreadable, KeyError, ValueError):
            return  # no responders, or an answer to a question that was dropped
        there = any(found.cid == client for found in answer.data.connections)
        self._told(node, answer.server.id, client, there)
