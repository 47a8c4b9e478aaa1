"""The client of the fleet: ask a dispatcher for a run, follow it, cancel it.

The run's id is made here. A request whose answer is lost is repeated with the same id until it is
answered: the run is dispatched once, whichever dispatcher takes the repeats. A follower gets each
return as the server stores it, and reads what was stored once the run has ended, so that nothing is
missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from holdfast import errors
from holdfast.broker import Broker, Bucket
from holdfast.broker.objects import Objects
from holdfast.model import fleet
from holdfast.model.codec import JSON
from holdfast.model.fleet import FleetReply, FleetRequest, FleetRun, Return
from holdfast.model.target import parse
from holdfast.names import IdMaker, check_run, fleet_key, last_token, return_key

log = logging.getLogger("holdfast.client")

ANSWER_SECONDS: Final = 5.0
"""Timeout of one try: a dispatcher answers after a few writes, which take milliseconds."""
PATIENCE_SECONDS: Final = 20.0
"""How long a request is repeated: longer than an election (4 to 8 s) plus the failover to another
dispatcher."""
NOBODY_SECONDS: Final = 3.0
"""How long it is repeated while no dispatcher listens: longer than all of them need to
reconnect."""
LOOK_SECONDS: Final = 2.0
"""How often a follower reads the record, in case the notice of its change was lost; a person is
waiting."""

_make_id = IdMaker()


def new_run() -> str:
    """An id for a fan-out run."""
    return _make_id("f")


class Fleet:
    """Sends commands to agents, through the dispatchers."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._runs = Bucket(broker, broker.names.fleet)
        self._returns = Bucket(broker, broker.names.returns)

    async def start(self, request: FleetRequest) -> FleetRun:
        """Ask for a run; returns its record. A request may be repeated."""
        parse(request.target)
        answer = await self._ask("run", fleet.encode(request))
        assert answer.record is not None
        return answer.record

    async def cancel(self, run: str, user: str = "") -> FleetRun:
        """Stop a run: agents that execute it stop, and no others get the command."""
        body = fleet.CANCEL.encode(fleet.Cancel(check_run(run), user))
        answer = await self._ask("cancel", body)
        assert answer.record is not None
        return answer.record

    async def resolve(self, target: str) -> tuple[str, ...]:
        """The agents that a target selects now."""
        parse(target)
        return (await self._ask("resolve", target.encode())).agents or ()

    async def _ask(self, verb: str, body: bytes) -> FleetReply:
        clock = self._broker.clock
        begun = clock.monotonic()
        subject = self._broker.names.dispatch(verb)
        while True:
            waited = clock.monotonic() - begun
            try:
                found = await self._broker.ask(subject, body, timeout=ANSWER_SECONDS)
                answer = fleet.REPLY.decode(found.body)
                if not answer.error:
                    return answer
                if not answer.again:
                    raise errors.InvalidInput(answer.error)
                trouble: Exception = errors.Unavailable(answer.error)
            except errors.Unavailable as error:
                trouble = error
                if waited > NOBODY_SECONDS:
                    raise errors.Unavailable(
                        "no dispatcher is running: start one with 'holdfast control'"
                    ) from None
            except (errors.OutcomeUnknown, errors.NotConnected) as error:
                trouble = error
            if waited > PATIENCE_SECONDS:
                raise errors.OutcomeUnknown(
                    f"no dispatcher has answered in {waited:.0f} s: {trouble}"
                )
            await clock.sleep(0.2)

    # ---- following

    async def read(self, run: str) -> FleetRun:
        """A run's record; `RunNotFound` when there is none."""
        try:
            entry = await self._runs.get(fleet_key(check_run(run)))
        except errors.NotFound:
            entry = None
        if entry is None:
            raise errors.RunNotFound(f"fan-out run {run} does not exist or has expired", run=run)
        return fleet.decode(entry.value)

    async def returns(self, run: str) -> dict[str, Return]:
        """The returns of a run that are stored."""
        found: dict[str, Return] = {}
        try:
            async for entry in self._returns.entries(check_run(run)):
                agent = last_token(entry.key)
                found[agent] = fleet.return_of(run, agent, entry.value)
        except errors.NotFound:
            return {}
        return found

    async def value(self, given: Return) -> Any:
        """The value that an agent returned, from the object store if it is there."""
        if not given.object:
            return given.value
        return JSON.decode(await Objects(self._broker).get(given.object))

    async def follow(
        self,
        request: FleetRequest | str,
        *,
        start: Callable[[FleetRequest], Awaitable[FleetRun]] | None = None,
    ) -> AsyncIterator[FleetRun | Return]:
        """The record, each return as it comes, and the record again at the end.

        It listens first and then starts the request (with `start` if given), so nothing is missed.
        """
        run = request if isinstance(request, str) else request.run
        names = self._broker.names
        heard: asyncio.Queue[FleetRun | Return] = asyncio.Queue()

        def on_return(subject: bytes, _: bytes, body: bytes, headers: bytes | None) -> None:
            given = fleet.return_of(run, last_token(subject.decode()), body)
            if not fleet.forged(given):  # the dispatcher decides about those
                heard.put_nowait(given)

        def on_record(_: bytes, __: bytes, body: bytes, headers: bytes | None) -> None:
            with contextlib.suppress(errors.Unreadable):  # the dispatchers report it
                heard.put_nowait(fleet.decode(body))

        subscriptions = [
            await self._broker.listen(
                names.changed(names.returns, return_key(run, "*")), on_return
            ),
            await self._broker.listen(names.changed(names.fleet, fleet_key(run)), on_record),
        ]
        try:
            if isinstance(request, FleetRequest):
                record = await (start or self.start)(request)
            else:
                record = await self.read(run)
            yield record
            async for found in self._until_over(run, record, heard):
                yield found
        finally:
            for subscription in subscriptions:
                await self._broker.unsubscribe(subscription)

    async def _until_over(
        self, run: str, record: FleetRun, heard: asyncio.Queue[FleetRun | Return]
    ) -> AsyncIterator[FleetRun | Return]:
        seen: set[str] = set()
        while not record.over:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    found = await heard.get()
            except TimeoutError:
                try:
                    found = await self.read(run)
                except (errors.OutcomeUnknown, errors.NotConnected, errors.Unavailable):
                    continue
            if isinstance(found, FleetRun):
                record = found
            elif found.agent not in seen:
                seen.add(found.agent)
                yield found
        for agent, given in (await self.returns(run)).items():
            if agent not in seen:
                yield given
        yield record
