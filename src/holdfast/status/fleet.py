"""Agents and fan-out runs as an operator sees them.

An agent's facts are kept; it is online while its record exists, which expires on its own. `forget`
removes an agent that will not come back, so that no target matches it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, get_args

import msgspec

from holdfast import errors
from holdfast.broker import Bucket, Entry
from holdfast.broker.kv import direct_batch
from holdfast.client import Client
from holdfast.client.fleet import Fleet
from holdfast.model import fleet
from holdfast.model import node as nodes
from holdfast.model.fleet import FACTS, FleetRun, LedgerEntry, Return
from holdfast.model.node import NodeRecord
from holdfast.model.target import parse
from holdfast.names import active_key, check_name, check_run, fleet_key


class FleetInfo(msgspec.Struct, frozen=True):
    """A fan-out run as shown to operators."""

    run: str
    status: str
    function: str
    target: str
    targets: int
    returned: int
    succeeded: int
    unreachable: int
    unsent: int
    user: str
    owner: str
    epoch: int
    adoptions: int
    created: float
    deadline: float
    ended: float
    reason: str
    cancelled_by: str

    @classmethod
    def of(cls, record: FleetRun, returned: int | None = None) -> FleetInfo:
        request = record.request
        return cls(
            record.run,
            record.status,
            request.function,
            request.target,
            len(record.targets),
            record.returned if returned is None else returned,
            record.succeeded,
            len(record.unreachable),
            len(record.unsent),
            request.user,
            record.owner,
            record.epoch,
            record.adoptions,
            record.created,
            record.deadline,
            record.ended,
            record.reason,
            record.cancelled_by,
        )


class FleetStatus:
    """Reads and cancels the fan-out runs of a namespace."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._bucket = Bucket(client.broker, client.broker.names.fleet)
        self.fleet = Fleet(client.broker)

    async def list(self, *, most: int = 50, status: str = "") -> Sequence[FleetInfo]:
        """The newest runs first."""
        if status and status not in get_args(fleet.FleetStatus):
            known = ", ".join(get_args(fleet.FleetStatus))
            raise errors.InvalidInput(f"status {status!r} is not one of {known}")
        try:
            stored = self._bucket.records(fleet.decode, fleet_key("").rstrip("."))
            found = [record async for _, record in stored]
        except errors.NotFound:
            return []
        chosen = [FleetInfo.of(r) for r in found if not status or r.status == status]
        return sorted(chosen, key=lambda r: r.created, reverse=True)[:most]

    async def active(self) -> Sequence[FleetInfo]:
        """The runs that have not ended, oldest first, with the returns so far."""
        prefix = active_key("")
        try:
            runs = [e.key[len(prefix) :] async for e in self._bucket.entries(prefix.rstrip("."))]
        except errors.NotFound:
            return []
        found = []
        for run in runs:
            try:
                record = await self.fleet.read(run)
            except (errors.RunNotFound, errors.Unreadable):
                continue
            if not record.over:
                found.append(FleetInfo.of(record, len(await self.fleet.returns(run))))
        return sorted(found, key=lambda r: r.created)

    async def show(self, run: str) -> tuple[FleetRun, dict[str, Return]]:
        """A run's record and its stored returns."""
        return await self.fleet.read(run), await self.fleet.returns(run)

    async def history(self, run: str) -> Sequence[LedgerEntry]:
        """A run's history, oldest first: who dispatched, adopted, cancelled and ended it."""
        broker = self._client.broker
        subject = broker.names.log("fleet", check_run(run))
        found = direct_batch(broker, broker.names.ledger, subject)
        notes = broker.unreadable
        return [
            step
            async for message in found
            if (
                step := notes.read(
                    fleet.decode_ledger,
                    broker.names.ledger,
                    message.headers["Nats-Sequence"],
                    message.body,
                )
            )
        ]

    async def cancel(self, run: str, who: str = "") -> FleetRun:
        """Cancel a run in whatever state it is."""
        return await self.fleet.cancel(run, who)


PING_SECONDS: Final = 2.0
"""An online agent answers in milliseconds; an absent one is reported at once."""


class AgentInfo(msgspec.Struct, frozen=True):
    """An agent as shown to operators."""

    id: str
    online: bool
    last_seen: float
    """When the server last stored anything from it."""
    host: str
    os: str
    address: str
    version: str
    running: int
    functions: tuple[str, ...]
    metrics: dict[str, float]


class Agents:
    """Reads the agents of a namespace."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._facts = Bucket(client.broker, client.broker.names.facts)
        self._records = Bucket(client.broker, client.broker.names.agents)

    async def list(
        self, target: str = "*", *, online: bool = False, seen: Callable[[Any], Any] | None = None
    ) -> Sequence[AgentInfo]:
        """The agents that match a target, by id.

        `seen` removes facts that the reader may not see, so that they cannot be searched either.
        """
        wanted = parse(target)
        facts = await self._entries(self._facts)
        records = await self._entries(self._records)

        def chosen() -> list[AgentInfo]:
            found = []
            for agent, entry in facts.items():
                said = self._said(entry)
                judged = seen(said) if seen and wanted.needs_facts else said
                if wanted.matches(agent, judged):
                    found.append(self._info(agent, said, entry, records.get(agent)))
            return sorted(found, key=lambda a: a.id)

        # In a thread: patterns and facts are untrusted, and a fleet can be large.
        return [info for info in await asyncio.to_thread(chosen) if info.online or not online]

    async def facts(self, seen: Callable[[Any], Any] | None = None) -> dict[str, Counter[str]]:
        """How many agents have each value of each fact; a list counts for each of its values.

        Nested facts are left out. `seen` reduces facts to what the reader may see.
        """
        entries = await self._entries(self._facts)

        def count() -> dict[str, Counter[str]]:
            found: dict[str, Counter[str]] = {}
            for entry in entries.values():
                said = self._said(entry)
                for name, value in (seen(said) if seen else said).items():
                    values = value if isinstance(value, list) else [value]
                    plain = {_plain(one) for one in values if not isinstance(one, (dict, list))}
                    found.setdefault(name, Counter()).update(plain)
            return found

        return await asyncio.to_thread(count)

    async def show(self, agent: str) -> tuple[AgentInfo, dict[str, Any]]:
        """An agent and its facts."""
        check_name(agent, "agent")
        try:
            entry = await self._facts.get(agent)
        except errors.NotFound:
            entry = None
        if entry is None:
            raise errors.NotFound(f"no agent {agent!r} is known: see 'holdfast agents list'")
        said = self._said(entry)
        return self._info(agent, said, entry, await self._records.get(agent)), said

    async def forget(self, agent: str) -> None:
        """Remove an agent from the index, so that no target matches it."""
        info, _ = await self.show(agent)
        if info.online and await self._answers(agent):
            raise errors.InvalidInput(
                f"agent {agent!r} is online: stop it first, or its next facts bring it back"
            )
        revision, _ = await self._facts.last(agent)
        await self._facts.remove(agent, expected=revision)
        await self._records.delete(agent)

    async def _answers(self, agent: str) -> bool:
        """Whether anything listens under its name: a record may remain after its login was
        revoked."""
        broker = self._client.broker
        try:
            await broker.request(broker.names.node(agent, "ping"), timeout=PING_SECONDS)
        except errors.Unavailable:
            return False
        except errors.OutcomeUnknown:
            return True  # listening, but slow
        return True

    async def _entries(self, bucket: Bucket) -> dict[str, Entry]:
        try:
            return {entry.key: entry async for entry in bucket.entries()}
        except errors.NotFound:
            return {}  # no dispatcher has run yet

    def _said(self, entry: Entry) -> dict[str, Any]:
        """An agent's facts; empty when they cannot be read, so that it is still listed."""
        return self._facts.read(FACTS.decode, entry) or {}

    def _info(
        self, agent: str, said: dict[str, Any], facts: Entry, entry: Entry | None
    ) -> AgentInfo:
        """An agent whose record cannot be read is shown as offline."""
        record = self._records.read(nodes.decode, entry) if entry else None
        age = self._client.broker.server_now() - entry.stored if entry else 0.0
        if record is None:
            record = _offline(agent)
        elif record.alive and not record.online(age):
            record = msgspec.structs.replace(record, state="INACTIVE")
        return _info(agent, said, facts, entry, record)


def _plain(value: Any) -> str:
    """A value as a target names it."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _offline(agent: str) -> NodeRecord:
    return NodeRecord(agent, "agent", state="INACTIVE")


def _info(
    agent: str, said: dict[str, Any], facts: Entry, entry: Entry | None, record: NodeRecord
) -> AgentInfo:
    return AgentInfo(
        agent,
        record.alive,
        max(facts.stored, entry.stored if entry else 0.0),
        record.host or str(said.get("host", "")),
        str(said.get("os_name", said.get("os", ""))),
        str(said.get("default_ipv4", "")),
        record.version or str(said.get("version", "")),
        record.running if record.alive else 0,
        record.jobs,
        record.metrics,
    )
