"""Requests of hosts that want to become agents: verified, counted, kept for a decision.

A valid request becomes a record, `pending`; a repeated request returns the record's state, and the
sealed credentials once they are issued. All tokens share the login that hosts ask with, so only
signatures are trusted (`identity.joining`).

Guaranteed: a token with a number of uses serves that many logins, by compare-and-swap; a revoked or
expired one serves nobody new. A host that asks under an id that another has, or had, waits for an
operator. Bad requests cost little: beyond a rate they are dropped unread, and logged once a minute.
"""

from __future__ import annotations

import logging
from typing import Final

from holdfast.broker import Broker, Bucket, Received
from holdfast.errors import BrokerError, Conflict, HoldfastError, Unreadable
from holdfast.identity.joining import JoinRefused, WrongTime, verify
from holdfast.identity.seed import AccountSeed, generations_near
from holdfast.model.join import (
    RECORD,
    REPLY,
    TOKEN,
    Ask,
    JoinRecord,
    JoinReply,
    TokenClaims,
    TokenRecord,
)
from holdfast.names import join_key, token_key
from holdfast.rates import RateLimiter, Sparse
from holdfast.visible import one_line

log = logging.getLogger("holdfast.dispatcher")

REQUESTS: Final = (200.0, 400.0)
"""Requests that a dispatcher reads per second, and in a burst. Each costs half a millisecond. Hosts
that wait for long ask once a minute, so this is enough for ten thousand of them."""
HOSTS: Final = (5.0, 100.0)
"""New hosts of one token per second, and in a burst, so that a stolen token fills the list only
slowly."""
LONGEST_NAME: Final = 200
"""Characters kept of a host's description of itself, which anybody with a token may send."""


class JoinIntake:
    """Takes requests to join, for one dispatcher."""

    def __init__(self, broker: Broker, seed: AccountSeed, generation: int) -> None:
        self._broker = broker
        self._bucket = Bucket(broker, broker.names.joins)
        self._keys = {g: seed.verify_key(g) for g in generations_near(generation)}
        self._facts = Bucket(broker, broker.names.facts)
        self._requests = RateLimiter(*REQUESTS, broker.clock.monotonic)
        self._hosts = RateLimiter(*HOSTS, broker.clock.monotonic)
        self._refusals = Sparse(log, broker.clock)

    async def on_request(self, message: Received) -> None:
        """Answer one request."""
        if not message.reply:
            return
        if self._requests.wait():
            self._refusals.warn("rate", "requests to join are dropped: too many a second")
            return
        try:
            reply = await self._answered(message.body)
        except WrongTime as refused:
            reply = JoinReply(error=str(refused), again=True, now=self._broker.server_now())
        except JoinRefused as refused:
            self._refusals.warn("join", "a request to join is refused: %s", one_line(str(refused)))
            reply = JoinReply(error=str(refused))
        except (BrokerError, Conflict) as error:
            reply = JoinReply(error=str(error), again=True)
        except HoldfastError as error:
            reply = JoinReply(error=str(error))
        try:
            await self._broker.publish(message.reply, REPLY.encode(reply))
        except BrokerError as error:
            log.debug("an answer could not be sent: %s", error)

    async def _answered(self, body: bytes) -> JoinReply:
        ask, claims = verify(
            body, self._keys, self._broker.names.namespace, self._broker.server_now()
        )
        revision, entry = await self._bucket.last(join_key(ask.agent))
        before = self._bucket.read(RECORD.decode, entry) if entry else None
        if before is not None:
            another_token = before.state == "rejected" and before.token != claims.id
            if before.nkey == ask.nkey and not another_token:
                return JoinReply(before.state, answer=before.answer)
            if before.state in ("pending", "approved"):
                raise JoinRefused(
                    f"another host has asked to be {ask.agent!r}: an operator must reject it first"
                )
        if self._broker.server_now() >= claims.expires:
            raise JoinRefused("the token has expired: make another with 'holdfast auth token'")
        await self._use(ask, claims)
        known = await self._known(ask.agent, before)
        record = JoinRecord(
            body,
            ask.agent,
            ask.nkey,
            claims.id,
            "approved" if claims.accept and not known else "pending",
            self._broker.server_now(),
            ask.host[:LONGEST_NAME],
            ask.version[:LONGEST_NAME],
            known,
            f"token {claims.id}" if claims.accept and not known else "",
        )
        await self._bucket.put(join_key(ask.agent), RECORD.encode(record), expected=revision)
        log.info("%s asks to join with token %s", ask.agent, claims.id)
        return JoinReply(record.state)

    async def _known(self, agent: str, before: JoinRecord | None) -> bool:
        """Whether another host has or had this id; one that was only rejected never had it."""
        if before is not None and (before.replaces or before.state != "rejected"):
            return True
        return await self._facts.peek(agent) is not None

    async def _use(self, ask: Ask, claims: TokenClaims) -> None:
        """Count a login against its token; raises when none is left."""
        key = token_key(claims.id)
        revision, entry = await self._bucket.last(key)
        try:
            token = TOKEN.decode(entry.value) if entry else TokenRecord()
        except Unreadable:
            raise JoinRefused("the record of the token cannot be read") from None
        if token.revoked:
            raise JoinRefused("the token was revoked")
        user = f"{ask.agent} {ask.nkey}"
        if user in token.used:
            return
        if claims.uses and len(token.used) >= claims.uses:
            raise JoinRefused("the token has been used: make another with 'holdfast auth token'")
        if self._hosts.wait(claims.id):
            raise Conflict("many hosts are joining with this token: ask again")
        if claims.uses:
            used = TokenRecord((*token.used, user))
            await self._bucket.put(key, TOKEN.encode(used), expected=revision)
