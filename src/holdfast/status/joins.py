"""Hosts that asked to become agents: an operator's list, and the decisions.

Accepting a host takes two steps: an operator (or its token) approves it, and whoever has the folder
of `holdfast auth` issues its login. `issue` trusts no record: it verifies the host's request again
with the account seed, so that writing to the bucket is not enough to get a login.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from holdfast import errors
from holdfast.broker import Bucket, Entry
from holdfast.broker.mirror import Mirror
from holdfast.client import Client
from holdfast.errors import InvalidInput, NotFound
from holdfast.identity import renewing
from holdfast.identity.joining import JoinRefused, sealed_keys, verify
from holdfast.identity.seed import generations_near
from holdfast.identity.users import JoinedLogin, UserFolder
from holdfast.model import node as nodes
from holdfast.model.join import RECORD, TOKEN, JoinRecord, TokenRecord
from holdfast.names import check_name, join_key, last_token, token_key

log = logging.getLogger("holdfast.status")

MOST_AT_ONCE: Final = 500
"""Most logins issued with one change: each takes about a millisecond, and other hosts wait
meanwhile."""
AGAIN_SECONDS: Final = 60.0
"""Pause before another try to issue a login with a problem that an operator must solve."""


class Joins:
    """The hosts that asked to join a namespace."""

    def __init__(self, client: Client) -> None:
        self._broker = client.broker
        self._bucket = Bucket(client.broker, client.broker.names.joins)

    async def list(self, *, everything: bool = False) -> Sequence[JoinRecord]:
        """Hosts that wait for a decision or for their login, oldest first; or all of them."""
        try:
            found = [r async for _, r in self._bucket.records(RECORD.decode, "host")]
        except (errors.NotFound, errors.Unavailable):
            return []  # no dispatcher has run yet
        waiting = [r for r in found if everything or r.state in ("pending", "approved")]
        return sorted(waiting, key=lambda r: r.at)

    async def show(self, agent: str) -> JoinRecord:
        """The host that asked under an id."""
        return (await self._read(agent))[1]

    async def _read(self, agent: str) -> tuple[int, JoinRecord]:
        check_name(agent, "agent")
        try:
            revision, entry = await self._bucket.last(join_key(agent))
        except errors.NotFound:
            revision, entry = 0, None
        if entry is None:
            raise NotFound(f"no host has asked to be {agent!r}: see 'holdfast agents pending'")
        return revision, RECORD.decode(entry.value)

    async def _write(self, revision: int, record: JoinRecord, ttl: float | None = None) -> None:
        key = join_key(record.agent)
        await self._bucket.put(key, RECORD.encode(record), expected=revision, ttl=ttl)

    async def approve(
        self, agent: str, who: str, *, replace: bool = False, fingerprint: str = ""
    ) -> JoinRecord:
        """Decide that a host may join; with a fingerprint, only the host that has it."""
        revision, record = await self._read(agent)
        if fingerprint and fingerprint != record.fingerprint:
            raise InvalidInput(
                f"the host that asks to be {agent} has the fingerprint {record.fingerprint}, not "
                f"{fingerprint}: reject it unless you know it"
            )
        if record.state == "rejected":
            raise InvalidInput(f"{agent} was rejected: the host must ask again")
        if record.replaces and not replace:
            raise InvalidInput(
                f"{agent} is the id of a known host: if {record.host or 'this one'} replaces it, "
                "pass --replace; otherwise reject it"
            )
        replaced_later = replace and not record.replaces and record.state == "approved"
        if record.state == "pending" or replaced_later:
            record = msgspec.structs.replace(
                record, state="approved", by=who, replaces=record.replaces or replace
            )
            await self._write(revision, record)
        return record

    async def reject(self, agent: str, who: str) -> JoinRecord:
        """Decide that a host may not join."""
        revision, record = await self._read(agent)
        if record.state == "issued":
            raise InvalidInput(f"{agent} has joined: revoke its login with 'holdfast auth revoke'")
        record = msgspec.structs.replace(record, state="rejected", by=who)
        await self._write(revision, record)
        return record

    async def revoke(self, token: str, who: str, *, force: bool = False) -> None:
        """Let no further host join with a token; one that no host has used needs `force`."""
        key = token_key(check_name(token, "token"))
        revision, entry = await self._bucket.last(key)
        known = force or entry is not None
        if not known and token not in {r.token for r in await self.list(everything=True)}:
            raise NotFound(
                f"no host has asked with a token {token!r}: 'holdfast auth tokens', where it was "
                "made, lists all. To revoke it anyway, pass --force"
            )
        before = TokenRecord()
        if entry is not None:
            with contextlib.suppress(errors.Unreadable):
                before = TOKEN.decode(entry.value)
        revoked = msgspec.structs.replace(before, revoked=who or "an operator")
        await self._bucket.put(key, TOKEN.encode(revoked), expected=revision)

    async def issue(
        self, agents: Iterable[str], folder: UserFolder
    ) -> tuple[Sequence[JoinRecord], Mapping[str, errors.HoldfastError]]:
        """Issue logins to approved hosts; returns what is wrong, by host.

        All of them are one change of the configuration, which lists every agent: a change for each
        host would cost N².
        """
        wrong: dict[str, errors.HoldfastError] = {}
        issued: list[JoinRecord] = []
        ready: list[tuple[int, JoinRecord, JoinedLogin]] = []
        for agent in agents:
            try:
                revision, record = await self._read(agent)
                if record.state == "issued":
                    issued.append(record)
                else:
                    ready.append((revision, *await self._ready(record, folder)))
            except errors.HoldfastError as error:
                wrong[agent] = error
        wrong |= folder.add_joined(*(login for _, _, login in ready))
        for revision, record, login in ready:
            if login.agent not in wrong:
                try:
                    await self._write(revision, record)
                    issued.append(record)
                except errors.HoldfastError as error:
                    wrong[login.agent] = error
        return issued, wrong

    async def _ready(
        self, record: JoinRecord, folder: UserFolder
    ) -> tuple[JoinRecord, JoinedLogin]:
        """A host's record with the answer, and its login, once its request is verified again."""
        agent = record.agent
        if record.state != "approved":
            raise InvalidInput(f"{agent} is {record.state}, not approved")
        seed, generation = folder.seed(), folder.generation
        near = {g: seed.verify_key(g) for g in generations_near(generation)}
        namespace = self._broker.names.namespace
        ask, claims = verify(record.signed, near, namespace, None)
        if (ask.agent, ask.nkey, claims.id) != (agent, record.nkey, record.token):
            raise InvalidInput(f"the record of {agent} is not what the host has signed: reject it")
        await self._check_token(claims.id)
        lasts = claims.lasts
        ends = float(int(self._broker.server_now() + lasts)) if lasts else 0.0
        generations = range(max(1, generation - 1), generation + 1)
        answer = sealed_keys(seed, ask, generations, namespace, ends=ends, lasts=lasts)
        login = JoinedLogin(agent, ask.nkey, record.replaces, ends, lasts)
        return msgspec.structs.replace(record, state="issued", answer=answer), login

    async def _check_token(self, token: str) -> None:
        _, entry = await self._bucket.last(token_key(token))
        if entry is not None and TOKEN.decode(entry.value).revoked:
            raise InvalidInput(f"token {token} was revoked: reject the hosts that asked with it")


class LoginKeeper:
    """Issues approved logins, and renews those that agents ask for, check by check.

    A check reads only the records that have changed, because ten thousand agents send heartbeats.
    """

    def __init__(self, client: Client, folder: UserFolder) -> None:
        self._joins = Joins(client)
        self._folder = folder
        self._broker = client.broker
        names = client.broker.names
        self._hosts = Bucket(client.broker, names.joins)
        self._agents = Bucket(client.broker, names.agents)
        self._approved: set[str] = set()
        self._tried: dict[str, float] = {}
        """Hosts whose login could not be issued, and when that was tried."""
        self._asking: dict[str, str] = {}
        """Agents that ask for their next login, with the request."""
        self._changed_hosts = Mirror(self._hosts, self._learn_host)
        self._changed_agents = Mirror(self._agents, self._learn_agent)

    def _learn_host(self, entry: Entry) -> None:
        if entry.key != join_key(last_token(entry.key)):
            return  # a token
        record = self._hosts.read(RECORD.decode, entry)
        if record is not None:
            change = self._approved.add if record.state == "approved" else self._approved.discard
            change(record.agent)
            self._tried.pop(record.agent, None)

    def _learn_agent(self, entry: Entry) -> None:
        record = self._agents.read(nodes.decode, entry)
        self._asking.pop(entry.key, None)
        if record is not None and record.renewal:
            self._asking[entry.key] = record.renewal

    async def issue(self) -> tuple[Sequence[JoinRecord], Mapping[str, errors.HoldfastError]]:
        """Issue logins to hosts that are approved by now; returns what is wrong, by host."""
        await self._changed_hosts.look()
        now = self._broker.clock.monotonic()
        waiting = {agent for agent, at in self._tried.items() if now - at < AGAIN_SECONDS}
        some = sorted(self._approved - waiting)
        if not some:
            return (), {}
        issued, wrong = await self._joins.issue(some[:MOST_AT_ONCE], self._folder)
        self._tried |= dict.fromkeys(wrong, now)
        return issued, wrong

    async def renew(self) -> Sequence[str]:
        """Issue the next login to agents that ask for it; returns which got one.

        No operator decides: a request is signed with the agent's current login. A bad one is
        logged.
        """
        await self._changed_agents.look()
        namespace = self._broker.names.namespace
        asks, wrong = [], []
        for agent, request in self._asking.items():
            try:
                asks.append(renewing.verify(request, agent, namespace))
            except JoinRefused as error:
                wrong.append(str(error))
        self._asking.clear()  # an agent that got none asks again with its next heartbeat
        renewed: list[str] = []
        if asks:
            now = self._broker.server_now()
            renewed, refused = self._folder.renew_joined(asks[:MOST_AT_ONCE], now)
            wrong += map(str, refused.values())
        for text in wrong:
            log.warning("a login is not renewed: %s", text)
        return renewed
