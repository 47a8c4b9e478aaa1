"""The publisher: a push moves the server from one snapshot to the next, or changes nothing.

    1  sealed secrets, each record expecting its revision; old versions stay beside new ones
    2  files that do not fit the last batch (only trees of hundreds of files have any)
    3  one atomic batch: files, manifest, and the revision, which expects the one that was read
    4  boxes that no snapshot needs are dropped

Step 3 is the switch. A push that dies before it changed nothing that an agent uses; one that dies
after it leaves only cleanup, which the next push does. Of two concurrent pushes one wins; the other
fails with an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from holdfast import errors
from holdfast.broker import Broker
from holdfast.broker.batch import Write, store_batch
from holdfast.broker.kv import ttl_text
from holdfast.broker.streams import SETTINGS_BUCKETS, Topology
from holdfast.config import RecordConfig
from holdfast.errors import SettingsError
from holdfast.names import H_EXPECTED, H_KV_OPERATION, H_TTL, SETTINGS_REVISION, kv_subject
from holdfast.settings.plan import Plan, plan_decision, plan_push, plan_return, pruned
from holdfast.settings.records import Revision, Sealed, encode, sign
from holdfast.settings.rotation import plan_rotation
from holdfast.settings.sealing import Sealer
from holdfast.settings.store import SettingsStore
from holdfast.settings.tree import Tree, read_tree

log = logging.getLogger("holdfast.settings")

BATCH_WRITES: Final = 500  # well below the 1,000 messages a server accepts in a batch
BATCH_BYTES: Final = 4 * 1024 * 1024  # bounds what the server stages at once
MARKER_SECONDS: Final = 60  # how long delete markers stay: longer than agents need to reconnect
_BUSY: Final = "somebody else published settings at the same moment: check it and push again"
_DECIDED: Final = "somebody else published settings while revision {} was being tried: check it"


class Publisher:
    """Publishes settings through one connection."""

    def __init__(self, broker: Broker, sealer: Sealer, records: RecordConfig | None = None) -> None:
        self._broker = broker
        self._names = broker.names
        self._sealer = sealer
        self._topology = Topology(broker, records or RecordConfig())
        self.store = SettingsStore(broker)

    async def plan(
        self,
        folder: Path,
        *,
        agents: Iterable[str] = (),
        empty: bool = False,
        force: bool = False,
        wave: tuple[Sequence[str], float] | None = None,
    ) -> tuple[Tree, Plan]:
        """What a push of a folder would change; secrets are sealed for `agents` even if they are
        unknown.

        With a `wave`, only these agents get it, until that time.
        """
        tree = read_tree(folder, self._sealer)
        there = await self.store.published(self._sealer, force=force)
        if not tree.files and not empty:
            raise SettingsError(_empty(folder, len(there.manifest.files)), reason="empty")
        known = await self.store.known_agents() | set(agents)
        now = self._broker.server_now()
        return tree, plan_push(tree, there, self._sealer, known, now, wave)

    async def push(
        self,
        folder: Path,
        *,
        agents: Iterable[str] = (),
        empty: bool = False,
        force: bool = False,
        wave: tuple[Sequence[str], float] | None = None,
    ) -> tuple[Tree, Plan]:
        """Publish a folder; returns what changed."""
        await self._topology.ensure_buckets(*SETTINGS_BUCKETS)
        tree, plan = await self.plan(folder, agents=agents, empty=empty, force=force, wave=wave)
        await self.apply(plan)
        return tree, plan

    async def plan_back(self, number: int = 0) -> Plan:
        """What going back to a revision would change; 0 takes back the last change."""
        there = await self.store.published(self._sealer)
        known = await self.store.known_agents()
        return plan_return(there, self._sealer, known, number, self._broker.server_now())

    async def go_back(self, number: int = 0) -> Plan:
        """Make the content of an earlier revision current again, as a new revision."""
        plan = await self.plan_back(number)
        await self.apply(plan)
        return plan

    async def end_trial(self, number: int, *, promote: bool) -> Plan:
        """End a canary: give its snapshot to every agent, or roll it back."""
        there = await self.store.published(self._sealer)
        if there.kept().number != number:
            raise SettingsError(_DECIDED.format(number), reason="conflict")
        known = await self.store.known_agents()
        plan = plan_decision(there, self._sealer, known, self._broker.server_now(), promote)
        await self.apply(plan)
        return plan

    async def rotate(self, *, finish: bool = False, force: bool = False) -> Plan:
        """Start using the next generation of keys beside the current one, or drop the old one."""
        there = await self.store.published(self._sealer)
        agents = await self.store.known_agents()
        reports = await self.store.reports() if finish else None
        now = self._broker.server_now()
        plan = plan_rotation(there, self._sealer, agents, reports, now, force=force)
        await self.apply(plan)
        return plan

    # ---- writing

    async def apply(self, plan: Plan) -> None:
        """Write a plan: secrets, then the switch, then cleanup."""
        await self._write_sealed(plan.seal)
        if plan.revision is not None:
            await self._switch(plan, plan.revision)
        await self._prune(plan)

    async def _write_sealed(self, records: Mapping[str, tuple[int, Sealed]]) -> None:
        for agents in _batches([(agent, encode(sealed)) for agent, (_, sealed) in records.items()]):
            expected = {agent: records[agent][0] for agent, _ in agents}
            try:
                await self._store_sealed(agents, expected)
            except errors.Conflict:
                again = await self._past_markers(expected)
                try:
                    await self._store_sealed(agents, again)
                except errors.Conflict:
                    raise SettingsError(_BUSY, reason="conflict") from None

    async def _store_sealed(
        self, records: Sequence[tuple[str, bytes]], expected: Mapping[str, int]
    ) -> None:
        writes = [
            Write(kv_subject(self._names.secrets, agent), body, {H_EXPECTED: str(expected[agent])})
            for agent, body in records
        ]
        await store_batch(self._broker, writes)

    async def _past_markers(self, expected: Mapping[str, int]) -> dict[str, int]:
        """Expected revisions where deleted keys left a marker; otherwise it is a conflict."""
        found = {agent: await self.store.secrets.last(agent) for agent in expected}
        if any(entry and entry.revision != expected[a] for a, (_, entry) in found.items()):
            raise SettingsError(_BUSY, reason="conflict")
        return {agent: at for agent, (at, _) in found.items()}

    async def _switch(self, plan: Plan, revision: Revision) -> None:
        keys = {g: self._sealer.seed.signing_key(g) for g in revision.generations}
        signed = sign(revision, keys, self._names.namespace)
        *early, last = _batches(list(plan.uploads.items())) or [[]]
        for batch in early:
            await store_batch(self._broker, [self._upload(item) for item in batch])
        room = BATCH_WRITES - len(last)
        writes = [*map(self._upload, last), *map(self._marker, plan.stale[:room])]
        expected = {H_EXPECTED: str(plan.sequence)}
        writes.append(Write(self._subject(SETTINGS_REVISION), signed, expected))
        try:
            await store_batch(self._broker, writes)
        except errors.Conflict:
            raise SettingsError(_BUSY, reason="conflict") from None
        except errors.OutcomeUnknown:
            _, found = await self.store.settings.last(SETTINGS_REVISION)
            if found is None or found.value != signed:
                raise
        log.info("settings: revision %d is published", revision.number)

    def _subject(self, key: str) -> str:
        return kv_subject(self._names.settings, key)

    def _upload(self, item: tuple[str, bytes]) -> Write:
        return Write(self._subject(item[0]), item[1], {})

    def _marker(self, key: str) -> Write:
        """Deletes a key as part of a batch; the marker expires."""
        return Write(
            self._subject(key), b"", {H_KV_OPERATION: "DEL", H_TTL: ttl_text(MARKER_SECONDS)}
        )

    async def _prune(self, plan: Plan) -> None:
        """Drop unneeded boxes; skips records that another push is writing."""
        there = await self.store.published(self._sealer)
        if there.revision is None:
            return
        if plan.revision and there.revision.order != plan.revision.order:
            return  # another push has published since
        left = {}
        for agent, (at, sealed) in there.sealed.items():
            wanted = plan.needed.get(agent, set())
            tidy = pruned(sealed, wanted, there.revision.generations, there.revision.number)
            if tidy != sealed:
                left[agent] = at, tidy
        try:
            await self._write_sealed(left)
        except SettingsError:
            log.info("settings: the next push will drop old secrets")


def _empty(folder: Path, published: int) -> str:
    """Why a folder without settings is not pushed."""
    if published:
        return (
            f"{folder} has no settings and {published} files are published: this would remove them "
            "from every agent. If that is intended, pass --allow-empty"
        )
    return (
        f"{folder} has no settings, not even a top.yaml: there is nothing to publish. Name the "
        "folder that has it"
    )


def _batches(items: Sequence[tuple[str, bytes]]) -> list[list[tuple[str, bytes]]]:
    """Split into batches within `BATCH_WRITES` and `BATCH_BYTES`."""
    found: list[list[tuple[str, bytes]]] = []
    size = 0
    for item in items:
        if not found or len(found[-1]) >= BATCH_WRITES or size + len(item[1]) > BATCH_BYTES:
            found.append([])
            size = 0
        found[-1].append(item)
        size += len(item[1])
    return found
