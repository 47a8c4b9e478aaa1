"""Detection of dead nodes: pings, the servers' reports on connections, and what follows from both.

In every round each node is pinged on its own subject. A node is a suspect when nobody receives the
ping, or no answer comes soon: it is pinged a few times more, and its server is asked for its
connection. "It is gone" counts only from a server that has confirmed the connection before. When a
node counts as gone is decided in `holdfast.model.suspicion`; this module has the I/O, and three
rules about the whole:

- A coordinator whose own tick is late forgets its suspicions: answers may be waiting unread.
- It judges by connections only while few nodes are suspects (`Hold`).
- It judges a worker so only while another one of its group answers that kept its connection. A
  proxy that restarts drops every worker behind it, and they come back one by one; quick verdicts
  would end them, with nobody to take over their runs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from holdfast.broker import Broker, Received
from holdfast.coordinator.view import NodeView, Seen
from holdfast.errors import BrokerError, Unreadable
from holdfast.model.codec import Codec
from holdfast.model.suspicion import LOOKS, Hold
from holdfast.names import CONNECTIONS
from holdfast.ownership.membership import PONG

log = logging.getLogger("holdfast.coordinator")

LATE_SECONDS: Final = 0.15
"""After a tick this late, answers may have arrived that were not read yet."""
PONG_SECONDS: Final = 2.0
"""How long an answer to a ping is waited for; it is also the slowest answer that is measured."""
MOST_ASKED: Final = 4_096
"""Open requests that are remembered; far more than there are suspects at a time."""
VOUCHING: Final = 3
"""How often a server is asked about a new connection: once is enough, unless an answer is lost."""
SUCCESSORS: Final = 3
"""Workers that are pinged to see whether one could take over: one is enough, unless it is busy or
gone."""


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
"""Takes the node, a server, the connection's number, and whether the server has it."""


class Connections:
    """Asks the servers of a cluster about single connections.

    Any login may ask this about its own account, if its permissions allow the subject. Every server
    of the cluster answers; only the answer of the connection's own server counts. Nothing is
    learned about a node whose server never answers (a leaf node's) or that is in another account.
    With a login that may not ask, coordinators have only their pings.
    """

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
        """After a reconnect: permissions may have changed."""
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


class Detection:
    """Finds nodes that are gone."""

    def __init__(self, broker: Broker, view: NodeView) -> None:
        self._broker = broker
        self._view = view
        self._hold = Hold()
        self._connections = Connections(broker, self._on_connection)
        self._ticked: float | None = None

    async def open(self) -> None:
        """Listen for what the servers say."""
        await self._connections.open()

    def start_over(self) -> None:
        """Forget every suspicion: our own connection broke."""
        self._connections.start_over()
        self._ticked = None

    def tick(self, now: float, every: float) -> None:
        """Begin the next round over all nodes, which is due every `every` seconds."""
        before, self._ticked = self._ticked, now
        if before is not None and now - before - every > LATE_SECONDS:
            log.debug("%.2f s late: suspicions are forgotten", now - before - every)
            for seen in self._view.nodes.values():
                seen.case.forget()

    async def look_at(self, seen: Seen, now: float) -> None:
        """Ping a node when its turn has come; a suspect more often."""
        liveness = seen.record.liveness
        if seen.case.overdue(now, liveness):
            seen.case.doubt(now)
        regular = now >= seen.next_ping
        if not regular and not self._may_hurry(seen, now):
            return
        seen.next_look = now + liveness.confirm_seconds / LOOKS
        if regular:
            seen.next_ping = now + liveness.ping_seconds
            seen.case.next_round(now)
        if seen.client and (seen.case.suspect if seen.vouched else self._may_vouch(seen)):
            await self._connections.ask(seen.record.id, seen.client)
        await self._ping(seen, now)
        if seen.case.suspect:
            for other in list(itertools.islice(self._successors(seen), SUCCESSORS)):
                await self._ping(other, now)

    def _may_hurry(self, seen: Seen, now: float) -> bool:
        return seen.case.suspect and now >= seen.next_look and self._hold.open(now)

    def _may_vouch(self, seen: Seen) -> bool:
        """Ask for a new connection a few times: a leaf node's server, or one that has the node in
        another account, never knows of it."""
        seen.vouching += 1
        return seen.vouching <= VOUCHING

    async def _ping(self, seen: Seen, now: float) -> None:
        seen.case.ping(now)
        subject = self._broker.names.node(seen.record.id, "ping")
        body = str(seen.version).encode() if seen.version >= 0 else b""
        try:
            future = await self._broker.send(subject, body, timeout=PONG_SECONDS)
        except BrokerError:
            return
        future.add_done_callback(lambda done: self._on_pong(seen, now, done))

    def gone(self, seen: Seen, now: float) -> str:
        """Why a node's process counts as gone, or nothing."""
        case, liveness = seen.case, seen.record.liveness
        if not case.suspect or not self._hold.open(now):
            return ""
        reason = ""
        if case.confirmed(now, liveness):
            reason = "its process is gone: its server has no connection of it"
        elif case.missing(liveness, askable=seen.vouched):
            reason = f"its process is gone: nobody answers on its subject ({case.misses} times)"
        return reason if reason and self._replaceable(seen) else ""

    def _replaceable(self, suspect: Seen) -> bool:
        """Whether a worker that was not dropped together with it could take over its runs."""
        if suspect.record.role != "worker":
            return True
        case, heard, liveness = suspect.case, suspect.heard, suspect.record.liveness
        return any(
            case.outlived_by(other.proved, other.dropped, heard, liveness)
            for other in self._successors(suspect)
        )

    def _successors(self, suspect: Seen) -> Iterator[Seen]:
        """Workers of its group that nobody suspects; none for other roles, which hold no runs."""
        of = suspect.record
        for other in self._view.nodes.values():
            record = other.record
            if (
                of.role == record.role == "worker"
                and of.group == record.group
                and other is not suspect
                and record.alive
                and not other.case.suspect
            ):
                yield other

    # ---- what is heard

    def _on_pong(self, seen: Seen, sent: float, done: asyncio.Future[Received]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        answer = done.result()
        now = self._broker.clock.monotonic()
        if answer.status == "503":
            seen.case.nobody(now)
            self._accused(seen, now)
            return
        seen.answered(now)
        seen.proved = max(seen.proved, sent)
        seen.case.took(now - sent)
        where = self._broker.names.node(seen.record.id, "ping")
        pong = self._broker.unreadable.read(PONG.decode, "pong", where, answer.body)
        if pong is None:
            return
        seen.connected(pong.server, pong.client, now)
        if pong.held is not None:
            seen.version = pong.version
            seen.held = {h.reply: h for h in pong.held}

    def _on_connection(self, node: str, server: str, client: int, open: bool) -> None:
        seen = self._view.nodes.get(node)
        if seen is None or (seen.server, seen.client) != (server, client):
            return  # another server's answer, or about a connection that was replaced meanwhile
        if not open and not seen.vouched:
            return  # it may never have known this connection
        seen.vouched = True
        now = self._broker.clock.monotonic()
        seen.case.connection(now, open=open)
        if not open:
            self._accused(seen, now)

    def _accused(self, seen: Seen, now: float) -> None:
        if not seen.record.alive:
            return  # judged meanwhile
        seen.dropped = now
        alive = sum(1 for other in self._view.nodes.values() if other.record.alive)
        lasting = 2 * seen.record.liveness.ping_seconds
        if self._hold.accused(seen.record.id, now, alive, lasting):
            log.warning(
                "many nodes are missing at once: nobody is declared lost before its timeout, until "
                "most of them are back"
            )

    def judged(self, seen: Seen) -> None:
        """A node was declared lost: stop counting it as missing."""
        self._hold.cleared(seen.record.id)
