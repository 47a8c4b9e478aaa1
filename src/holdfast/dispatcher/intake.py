"""Intake: clients' requests, each taken by one dispatcher.

    run      a client's id, target and function ──► claimed, then the record is the answer
    cancel   any dispatcher: marks the record, tells the agents; the owner hears of the mark
    resolve  which agents a target means

The client chooses the run's id, so a request repeated after a lost answer finds its own run: the
same request gets the run as it is; a different one under the same id is refused; if another
dispatcher has claimed the run and not started it yet, the client is asked to retry.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from holdfast.broker import Broker, Received
from holdfast.broker.wire import ENVELOPE_BYTES
from holdfast.client.commanding import Sender
from holdfast.dispatcher.agents import AgentIndex
from holdfast.dispatcher.records import FleetRecords
from holdfast.errors import BrokerError, HoldfastError, InvalidInput, RunNotFound, Unreadable
from holdfast.identity.requests import Requester, RequestRefused
from holdfast.model import fleet
from holdfast.model.fleet import REPLY, FleetReply, FleetRequest, FleetRun
from holdfast.model.target import parse
from holdfast.names import check_run, last_token
from holdfast.rates import Sparse

log = logging.getLogger("holdfast.dispatcher")

LONGEST_TIMEOUT_SECONDS: Final = 7 * 86_400.0
"""The longest timeout of a run: its returns are kept for as long."""
LONGEST_FUNCTION: Final = 200
"""Longest text in a request, in characters: bounds what a client can make us store."""

Owned = Callable[[FleetRun, int], None]


class RequestIntake:
    """Takes requests for one dispatcher."""

    def __init__(
        self,
        broker: Broker,
        node: str,
        index: AgentIndex,
        records: FleetRecords,
        sender: Sender,
        owned: Owned,
    ) -> None:
        self._broker = broker
        self._node = node
        self._index = index
        self._records = records
        self._sender = sender
        self._owned = owned
        self._refusals = Sparse(log, broker.clock)

    async def on_request(self, message: Received) -> None:
        """Answer one request."""
        handlers: dict[str, Callable[[bytes, Requester], Awaitable[FleetReply]]] = {
            "run": self._run,
            "cancel": self._cancel,
            "resolve": self._resolve,
        }
        verb = last_token(message.subject)
        handle = handlers.get(verb)
        try:
            sender = self._broker.sender(message, self._broker.names.dispatch(verb))
            answer = (
                await handle(message.body, sender)
                if handle
                else FleetReply(error="unknown request")
            )
        except RequestRefused as refused:
            self._refusals.warn(refused.reason, "%s refused: %s", verb[:20], refused)
            answer = FleetReply(error=str(refused))
        except BrokerError as error:
            answer = FleetReply(error=str(error), again=True)
        except HoldfastError as error:
            answer = FleetReply(error=str(error))
        if message.reply:
            try:
                await self._broker.publish(message.reply, REPLY.encode(answer))
            except HoldfastError as error:
                log.warning("an answer could not be sent: %s", error)

    # ---- run

    async def _run(self, body: bytes, sender: Requester) -> FleetReply:
        request = _checked(fleet.decode_request(body))
        request = msgspec.structs.replace(request, user=sender.named(request.user))
        targets = await self._index.select(parse(request.target))
        if not targets:
            found = await self._records.read(request.run)
            if found:
                return self._existing(request, *found)
            raise InvalidInput(f"no agent matches {request.target!r}: see 'holdfast agents list'")
        now = self._broker.server_now()
        record = FleetRun(
            request,
            "claimed",
            tuple(targets),
            owner=self._node,
            token=self._records.token(),
            created=now,
            updated=now,
            deadline=now + request.timeout,
            offline=tuple(agent for agent in targets if not self._index.online(agent)),
        )
        if len(fleet.encode(record)) > self._broker.max_message_bytes - ENVELOPE_BYTES:
            raise InvalidInput(
                f"{len(targets):,} agents and these arguments do not fit into one run: split the "
                "target"
            )
        won = await self._records.write(record, 0)
        if won:
            log.info(
                "run %s: %s for %d agents (%s), asked by %s",
                request.run,
                request.function,
                len(targets),
                request.target[:100],
                request.user or "nobody",
            )
            self._owned(record, won)
            return FleetReply(record)
        found = await self._records.read(request.run)
        if found is None:
            return FleetReply(error="the run's record is being written", again=True)
        return self._existing(request, *found)

    def _existing(self, request: FleetRequest, record: FleetRun, revision: int) -> FleetReply:
        """The answer to a request whose id is known."""
        if record.request.intent != request.intent:
            raise InvalidInput(
                f"run id {request.run!r} belongs to another run "
                f"({record.request.function} for {record.request.target!r}): make a new id"
            )
        if record.status != "claimed":
            return FleetReply(record)
        if record.owner == self._node:
            self._owned(record, revision)  # resumes it, unless it is watched already
            return FleetReply(record)
        return FleetReply(error=f"{record.owner} is about to begin with it", again=True)

    async def _resolve(self, body: bytes, _: Requester) -> FleetReply:
        target = parse(body.decode("utf-8", "replace"))
        return FleetReply(agents=tuple(await self._index.select(target)))

    # ---- cancel

    async def _cancel(self, body: bytes, sender: Requester) -> FleetReply:
        try:
            wanted = fleet.CANCEL.decode(body)
        except Unreadable:
            raise InvalidInput("a cancel names a run and a user") from None
        run, user = check_run(wanted.run), sender.named(wanted.user[:200])
        while True:
            found = await self._records.read(run)
            if found is None:
                raise RunNotFound(f"no fan-out run {run} is known", run=run)
            record, revision = found
            if record.over:
                return FleetReply(record)
            marked = msgspec.structs.replace(
                record,
                cancelled_by=record.cancelled_by or user or "somebody",
                token=self._records.token(),
                updated=self._broker.server_now(),
            )
            if await self._records.write(marked, revision):
                break
        await self._sender.send(
            "cancel", run, marked.epoch, marked.cancelled_by.encode(), marked.targets
        )
        log.info("run %s cancelled by %s", run, marked.cancelled_by)
        await self._records.tell(run, "cancelled", f"by {marked.cancelled_by}")
        return FleetReply(marked)


def _checked(request: FleetRequest) -> FleetRequest:
    check_run(request.run)
    if "/" in request.run:
        raise InvalidInput("the id of a fan-out run must not contain '/'")
    if not request.function or len(request.function) > LONGEST_FUNCTION:
        raise InvalidInput("the name of a function has at most 200 characters")
    if not 0 < request.timeout <= LONGEST_TIMEOUT_SECONDS:
        raise InvalidInput("timeout must be more than 0 and at most 7 days")
    if request.batch < 0 or request.max_failures < 0:
        raise InvalidInput("batch and max_failures cannot be negative")
    return request
