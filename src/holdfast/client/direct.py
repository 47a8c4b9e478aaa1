"""Sends a command to one agent without a dispatcher, for when none runs. It needs the account seed.

Guaranteed: the agent executes it at most once, by its journal, and its return is stored as always.
Not guaranteed: anything else that a dispatcher offers. The run has no record, nobody adopts it, and
it can neither be sent in waves, cancelled nor looked at later; if this process ends, only the
return is left.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from holdfast.broker import Broker, Bucket
from holdfast.broker.wire import parse_headers
from holdfast.client.commanding import Sender
from holdfast.errors import InvalidInput, Unavailable, Unreadable
from holdfast.identity.commands import CommandRefused
from holdfast.identity.seed import AccountSeed
from holdfast.model import fleet
from holdfast.model.fleet import FleetRequest, Return
from holdfast.model.target import parse
from holdfast.names import check_name, return_key

ACK_SECONDS: Final = 5.0
"""After this the command is sent once more: a connected agent acknowledges in milliseconds."""
EPOCH: Final = 1
"""Lower than any dispatcher's epoch, so that a run id that a dispatcher has used is refused as
stale."""


async def command(
    broker: Broker, request: FleetRequest, seed: AccountSeed | None, generation: int = 1
) -> Return:
    """Send a command to the one agent that the target names, and wait for its return."""
    named = parse(request.target).named
    agent = named[0] if named and len(named) == 1 else check_name(request.target, "agent")
    sender = Sender(broker, seed, generation)
    answer: asyncio.Queue[Return | None] = asyncio.Queue()

    def on_ack(_: bytes, __: bytes, body: bytes, headers: bytes | None) -> None:
        with contextlib.suppress(CommandRefused, Unreadable):
            _verify("ack", body, headers)
            ack = fleet.decode_ack(body)
            if ack.status == "refused":
                why = f"the agent refused it: {ack.reason}"
                answer.put_nowait(Return(request.run, agent, "refused", error=why))
            else:
                answer.put_nowait(None)

    def on_return(_: bytes, __: bytes, body: bytes, headers: bytes | None) -> None:
        with contextlib.suppress(CommandRefused, Unreadable):
            _verify("return", body, headers)
            answer.put_nowait(fleet.return_of(request.run, agent, body))

    def _verify(kind: str, body: bytes, headers: bytes | None) -> None:
        if sender.verifier is not None:
            told = parse_headers(headers)
            sender.verifier.verify(told, body, kind=kind, agent=agent, run=request.run)

    names = broker.names
    key = return_key(request.run, agent)
    if (stored := await Bucket(broker, names.returns).get(key)) is not None:
        return fleet.return_of(request.run, agent, stored.value)  # the same run again
    subscriptions = [
        await broker.listen(names.ack(request.run, agent), on_ack),
        await broker.listen(names.changed(names.returns, key), on_return),
    ]
    await sender.open()
    sender.listen(request.run, lambda _: answer.put_nowait(_offline(request.run, agent)))
    try:
        return await _returned(broker, sender, request, agent, answer)
    finally:
        for subscription in subscriptions:
            await broker.unsubscribe(subscription)


def _offline(run: str, agent: str) -> Return:
    return Return(run, agent, "refused", error="nobody listens: the agent is not connected")


async def _returned(
    broker: Broker,
    sender: Sender,
    request: FleetRequest,
    agent: str,
    answer: asyncio.Queue[Return | None],
) -> Return:
    if request.batch or request.timeout <= 0:
        raise InvalidInput("--direct takes no --batch, and needs a --timeout of more than 0")
    deadline = broker.server_now() + request.timeout
    payload = fleet.encode(request.order(deadline))
    acked = False
    for _ in range(2):
        await sender.send("exec", request.run, EPOCH, payload, [agent])
        with contextlib.suppress(TimeoutError):
            while True:
                left = deadline - broker.server_now()
                async with asyncio.timeout(max(0.0, left if acked else min(left, ACK_SECONDS))):
                    found = await answer.get()
                if found is not None:
                    return found
                acked = True
        if acked:
            break
    silent = "it did not return in time" if acked else "it did not acknowledge"
    raise Unavailable(f"agent {agent}: {silent}")
