"""An agent's settings: rendered here from its own facts, and in force until newer ones are.

    revision (signed) ─► manifest ─► top: which files ─► files ─► rendered in a child ─► secrets
                                                                                            │
    in force, kept in a file (0600), reported ◄─────────────────────────────────────────────┘

Guaranteed: the settings in force are one complete snapshot signed by a publisher, never a mixture.
A revision that is forged or older than the one in force, content that does not match its hash, a
secret that is missing, outdated, moved or another agent's, a template that fails or does not end:
each is refused, counted and reported, and the settings in force stay. They survive a restart, with
or without a server; an agent that never had any raises `SettingsError` rather than use empty ones.
When a canary's time is over, the snapshot before it is in force again, even if no server can be
reached.

Not guaranteed: when. An agent reads a new revision within `jitter` seconds of its notification, so
that a fleet does not ask all at once; a check every five minutes covers lost notifications.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast import errors
from holdfast.broker import Broker
from holdfast.errors import SettingsError
from holdfast.identity.credentials import AgentKeys
from holdfast.identity.files import write_private
from holdfast.model import host_schedule
from holdfast.model.host_schedule import HostSchedule
from holdfast.model.settings import Settings, find
from holdfast.names import SETTINGS_REVISION, kv_subject
from holdfast.redaction import scrub
from holdfast.settings import resolving
from holdfast.settings.records import Manifest, Report, Revision, Sealed, encode, verify
from holdfast.settings.renderer import Renderer
from holdfast.settings.resolving import Snapshot, placeholders, version_of
from holdfast.settings.sealing import Opener, merged_keys
from holdfast.settings.store import SettingsStore
from holdfast.settings.top import NAME, Top
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.agent.settings")

JITTER_SECONDS: Final = 1.5
"""A fleet reads a new revision spread over this time, so that not all agents ask at once."""
LOOK_SECONDS: Final = 300.0
"""The longest that a revision stays unknown if its notification was lost while connected; after a
reconnect an agent checks at once. More often would be expensive: ten thousand agents check."""
RETRY_SECONDS: Final = 2.0
"""The first pause while the settings cannot be read; it doubles each time, because the buckets do
not exist before the first push, which is noticed anyway. Five times as long after a refusal, which
needs an operator."""
KEYS_FILE: Final = "keys.json"


class AgentSettings:
    """The settings of one agent. Call `load` first; `run` follows the server."""

    def __init__(
        self,
        broker: Broker,
        agent: str,
        keys: AgentKeys,
        facts: Callable[[], Mapping[str, Any]],
        folder: Path,
        *,
        telemetry: Telemetry | None = None,
        renderer: Renderer | None = None,
        jitter: float = JITTER_SECONDS,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is called with the schedules whenever others come into force."""
        self.agent = agent
        self.schedules: dict[str, HostSchedule] = {}
        """The schedules that this host runs itself."""
        self.telemetry = telemetry or Telemetry()
        self.report = Report()
        self.refused = 0
        self._broker = broker
        self._store = SettingsStore(broker)
        self._opener = Opener(agent, keys)
        self._facts = facts
        self._folder = folder
        self._renderer = renderer or Renderer()
        self._own_renderer = renderer is None
        self._jitter = jitter
        self._changed = changed
        self._snapshot: Snapshot | None = None
        self._texts: dict[str, str] = {}
        self._rendered_from: tuple[tuple[int, int], str, dict[str, Any]] | None = None
        self._told = False
        self._wake = asyncio.Event()
        self._notice: bytes | None = None
        self._failed: tuple[int, str] | None = None
        self._retry = RETRY_SECONDS

    # ---- in force

    def load(self) -> None:
        """Load the settings in force before a restart; needs no server."""
        self._load_keys()
        found = self._stored(resolving.FILE)
        if found is not None and not self._go_back(found):
            self._put_into_force(found)

    def _stored(self, name: str) -> Snapshot | None:
        found = resolving.load(self._folder / name)
        return found if found is not None and found.agent == self.agent else None

    def _go_back(self, trial: Snapshot) -> bool:
        """Go back if this is a canary's snapshot whose time is over, even if the disk is full."""
        if not trial.until or self._broker.server_now() < trial.until:
            return False
        before = self._stored(resolving.BEFORE)
        if before is None:
            return False
        log.warning("settings: the canary's time is over, the previous snapshot is in force again")
        born, number = trial.order
        before = msgspec.structs.replace(before, born=born, number=number)
        try:
            resolving.save(self._folder / resolving.FILE, before)
        except errors.ConfigError as error:
            log.error("settings: %s", error)
        self._rendered_from = None
        self._put_into_force(before)
        return True

    def _restore_schedules(self, snapshot: Snapshot) -> None:
        """Run the schedules of a snapshot from now on."""
        try:
            found = host_schedule.restored(snapshot.values, self.agent, snapshot.schedules)
        except errors.InvalidInput as error:
            log.error("the schedules in force cannot be read, and do not run: %s", error)
            found = {}
        if found != self.schedules:
            self.schedules = found
            self._changed()

    @property
    def settings(self) -> Settings:
        """The settings in force; raises `SettingsError` if there never were any."""
        if self._snapshot is None:
            why = f": {self.report.error}" if self.report.error else ""
            raise SettingsError(f"agent {self.agent} has no settings yet{why}", reason="none")
        return self._snapshot.settings()

    def shown(self, path: str = "") -> Any:
        """Settings for display: secrets are always masked, even if asked for by name."""
        values = self.settings.masked()
        try:
            return find(values, path) if path else values
        except KeyError as error:
            raise SettingsError(f"{error.args[0]} on agent {self.agent}", reason="none") from None

    def numbers(self) -> dict[str, float]:
        """The revision in force and the number of refusals, for the agent's record."""
        return {
            "settings_revision": float(self.report.number),
            "settings_refused": float(self.refused),
        }

    def facts_changed(self) -> None:
        """The facts have changed: the settings may have to be rendered again."""
        self._wake.set()

    # ---- following the server

    async def run(self) -> None:
        """Follow the server until cancelled."""
        names = self._broker.names
        own = names.changed(names.secrets, self.agent)
        subscriptions = [
            await self._broker.listen(
                names.changed(names.settings, SETTINGS_REVISION), self._on_revision
            ),
            await self._broker.listen(own, self._on_secrets),
        ]
        forget = self._broker.on_reconnect(self._wake.set)
        try:
            await self._follow()
        finally:
            forget()
            for subscription in subscriptions:
                await self._broker.unsubscribe(subscription)
            if self._own_renderer:
                await self._renderer.close()

    async def _follow(self) -> None:
        wait = await self.refresh()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            self._wake.clear()
            await self._broker.clock.sleep(random.uniform(0, self._jitter))
            wait = await self.refresh()

    def _on_revision(self, subject: bytes, reply: bytes, body: bytes, _: bytes | None) -> None:
        self._notice = body
        self._wake.set()

    def _on_secrets(self, subject: bytes, reply: bytes, body: bytes, _: bytes | None) -> None:
        """A notice of newly sealed secrets matters only after a failure; otherwise a revision
        follows."""
        if self._failed:
            self._wake.set()

    # ---- refreshing

    async def refresh(self) -> float:
        """Read the current revision and put it into force; returns how long to wait."""
        try:
            data = self._notice or await self._store.revision()
            self._notice = None
            self._retry = (
                RETRY_SECONDS  # from now on there are settings to follow, or the server refuses
            )
            return LOOK_SECONDS if data is None else await self._refresh(data)
        except errors.TryAgain:
            await self.end_trial()
            wait = min(self._retry, max(RETRY_SECONDS, self._trial_ends_in()))
            self._retry = min(2 * self._retry, LOOK_SECONDS)
            return wait
        except errors.BrokerError as error:
            log.warning("settings cannot be read: %s", error)
            await self.end_trial()
            return LOOK_SECONDS

    async def end_trial(self) -> None:
        """While there is no server: leave a canary's snapshot when its time is over."""
        if self._snapshot and self._go_back(self._snapshot):
            now = self._snapshot
            await self._tell(Report(*now.order, at=now.at, manifest=now.manifest))

    async def _refresh(self, data: bytes) -> float:
        number = 0
        try:
            revision = verify(data, self._opener.keys.verify, self._broker.names.namespace)
            number = revision.number
            await self._apply(revision)
        except (SettingsError, errors.ConfigError) as error:
            if await self._moved_on(data):
                return 0.0
            await self._refuse(error, number)
            return RETRY_SECONDS * 5
        if not self._told:  # the centre waits for the report
            return RETRY_SECONDS
        return min(LOOK_SECONDS, self._trial_ends_in())

    def _trial_ends_in(self) -> float:
        """How long a canary's snapshot is still valid, in seconds."""
        trial = self._snapshot.until if self._snapshot else 0.0
        return max(trial - self._broker.server_now(), 0.1) if trial else math.inf

    async def _moved_on(self, data: bytes) -> bool:
        """Whether the revision that failed has been superseded."""
        now = await self._store.revision()
        if now is None or now == data:
            return False
        self._notice = now
        return True

    async def _apply(self, revision: Revision) -> None:
        before = self._snapshot
        if before is not None and revision.order < before.order:
            raise SettingsError(
                f"revision {revision.number} is older than revision {before.number}, which is in "
                "force: somebody restored an old one, or this is another server. If that is "
                "intended, remove settings.json from the agent's folder and start it again",
                reason="rollback",
            )
        facts = dict(self._facts())
        hash = revision.manifest_for(self.agent, self._broker.server_now())
        same = self._rendered_from == (revision.order, hash, facts)
        if same and self._told and not self._failed:
            return
        manifest = await self._store.manifest(hash)
        sealed = await self._take_keys(revision)
        values = await self._render(manifest, facts)
        found = list(placeholders(values))
        if found:
            boxes = sealed or await self._store.sealed(self.agent)
            resolving.resolve(
                values, found, lambda id: self._opener.open(boxes, id, version_of(manifest, id))
            )
        where = [list(position) for position, _ in found]
        until = revision.canary.until if revision.canary and hash != revision.manifest else 0.0
        now = self._broker.server_now()
        since = self._since(values, facts, now)
        snapshot = Snapshot(self.agent, *revision.order, now, values, where, hash, until, since)
        if until and before and not before.until:
            await asyncio.to_thread(resolving.save, self._folder / resolving.BEFORE, before)
        await self._enforce(snapshot)
        self._rendered_from = revision.order, hash, facts

    def _since(
        self, values: dict[str, Any], facts: Mapping[str, Any], now: float
    ) -> dict[str, float]:
        """The schedules for this host, and since when it has each one; a wrong one is refused."""
        try:
            found = host_schedule.chosen(values, self.agent, facts, self.schedules, now)
        except errors.InvalidInput as error:
            raise SettingsError(str(error), reason="schedules") from None
        return {name: schedule.timing.since for name, schedule in found.items()}

    async def _enforce(self, snapshot: Snapshot) -> None:
        """Save, put into force and report a snapshot, unless changed facts had no effect."""
        before = self._snapshot
        if before and _content(before) == _content(snapshot):
            if self._told and self.report.number == snapshot.number and not self._failed:
                return
        else:
            await asyncio.to_thread(resolving.save, self._folder / resolving.FILE, snapshot)
            self.telemetry.settings_applied.inc()
        self._put_into_force(snapshot)
        await self._tell(Report(*snapshot.order, at=snapshot.at, manifest=snapshot.manifest))

    def _put_into_force(self, snapshot: Snapshot) -> None:
        before, self._snapshot = self._snapshot, snapshot
        self._failed = None
        self._restore_schedules(snapshot)
        resolving.register_secrets(f"agent {self.agent}", snapshot.settings())
        self.telemetry.settings_revision.set(snapshot.number)
        if before is None or before.order != snapshot.order:
            log.info("settings: revision %d is in force", snapshot.number)

    async def _render(self, manifest: Manifest, facts: Mapping[str, Any]) -> dict[str, Any]:
        if not manifest.files:
            return {}
        [(_, top)] = await self._files(manifest, [NAME])
        wanted = Top.parse(top).files_for(self.agent, facts)
        files = await self._files(manifest, wanted)
        hashes = {manifest.files[name].sha256 for name in (NAME, *wanted)}
        self._texts = {hash: text for hash, text in self._texts.items() if hash in hashes}
        return await self._renderer.render(files, facts) if files else {}

    async def _files(self, manifest: Manifest, wanted: list[str]) -> list[tuple[str, str]]:
        """Files of a manifest; unchanged ones are cached."""
        hashes = {n: manifest.files[n].sha256 for n in wanted if n in manifest.files}
        missing = [name for name in wanted if hashes.get(name) not in self._texts]
        for name, text in await self._store.files(manifest, missing):
            self._texts[hashes[name]] = text
        return [(name, self._texts[hashes[name]]) for name in wanted]

    async def _refuse(self, error: errors.HoldfastError, number: int) -> None:
        self.refused += 1
        reason = error.reason if isinstance(error, SettingsError) else "file"
        self.telemetry.settings_refused.labels(reason).inc()
        text = scrub(str(error))
        if self._failed != (number, text):
            log.error("settings are refused, the ones in force stay: %s", text)
        self._failed = number, text
        at = self._snapshot.at if self._snapshot else 0.0
        order = self._snapshot.order if self._snapshot else (0, 0)
        report = Report(*order, at=at, failed_number=number, reason=reason, error=text)
        in_force = self._snapshot.manifest if self._snapshot else ""
        await self._tell(msgspec.structs.replace(report, manifest=in_force))

    async def _tell(self, report: Report) -> None:
        """Report under our own key, which nobody else may write."""
        generations = sorted(self._opener.keys.sealing)
        self.report = msgspec.structs.replace(
            report,
            generations=generations,
            refused=self.refused,
            schedules=[schedule.timing for schedule in self.schedules.values()],
        )
        subject = kv_subject(self._broker.names.applied, self.agent)
        self._told = False
        try:
            await self._broker.store(subject, encode(self.report))
            self._told = True
        except errors.BrokerError as error:
            log.warning("settings: the report could not be stored: %s", error)

    # ---- keys of a new generation

    async def _take_keys(self, revision: Revision) -> Sealed | None:
        """Adopt keys that were sent to us, and drop those no longer in use."""
        held = self._opener.keys.sealing
        if set(held) == set(revision.generations):
            return None
        sealed = None
        keys = self._opener.keys
        if not set(revision.generations) <= set(held):
            sealed = await self._store.sealed(self.agent)
            if (more := self._opener.new_keys(sealed)) is not None:
                keys = merged_keys(keys, more)
        oldest = min(revision.generations)
        if oldest in keys.sealing:
            keys = _since(keys, oldest)
        if keys is not self._opener.keys:
            content = msgspec.json.encode(keys)
            path = self._folder / KEYS_FILE
            await asyncio.to_thread(write_private, path, content, "agent keys", replace=True)
            self._opener = Opener(self.agent, keys)
        return sealed

    def _load_keys(self) -> None:
        """Load keys that arrived after the credentials were issued."""
        try:
            raw = (self._folder / KEYS_FILE).read_bytes()
            more = msgspec.json.decode(raw, type=AgentKeys, strict=False)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError, ValueError, RecursionError) as error:
            log.error("settings: %s cannot be used: %s", KEYS_FILE, type(error).__name__)
            return
        self._opener = Opener(self.agent, merged_keys(self._opener.keys, more))


def _content(snapshot: Snapshot) -> tuple[Any, ...]:
    return snapshot.order, snapshot.manifest, snapshot.until, snapshot.values, snapshot.schedules


def _since(keys: AgentKeys, oldest: int) -> AgentKeys:
    """The keys of a generation and all later ones."""
    if min(keys.sealing) >= oldest and min(keys.verify) >= oldest:
        return keys
    return AgentKeys(
        verify={g: key for g, key in keys.verify.items() if g >= oldest},
        sealing={g: key for g, key in keys.sealing.items() if g >= oldest},
        report={g: key for g, key in keys.report.items() if g >= oldest},
    )
