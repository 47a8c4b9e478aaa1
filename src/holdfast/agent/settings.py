"""An agent's settings: rendered here from its own facts, and in force until newer ones are.

    revision (signed) ─► manifest ─► top: which files ─► files ─► rendered in a child ─► secrets
                                                                                            │
    in force, kept in a file (0600), reported ◄─────────────────────────────────────────────┘

Guaranteed: the settings in force are one complete snapshot signed by a publisher, never a mixture.
A revision that is forged or older than the one in force, content that does not match its hash, a
secret that is missing, outdated, moved or another agent's, a template that fails or does not end:
each is refused, counted and reported, and the settings in force stay. They survive a restart, with
or without a server; an agent that never had any raises `SettingsError` rather than use empty ones.

Not guaranteed: when. An agent reads a new revision within `jitter` seconds of its notification, so
that a fleet does not ask all at once; a check every minute covers lost notifications.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast import errors
from holdfast.broker import Broker, Received
from holdfast.errors import SettingsError
from holdfast.identity.credentials import AgentKeys
from holdfast.identity.files import write_private
from holdfast.model.settings import Settings, find
from holdfast.names import SETTINGS_REVISION, kv_subject
from holdfast.redaction import scrub
from holdfast.settings import resolving
from holdfast.settings.records import Manifest, Report, Revision, Sealed, encode, verify
from holdfast.settings.renderer import Renderer
from holdfast.settings.resolving import Snapshot, placeholders, version_of
from holdfast.settings.sealing import Opener, merged_keys
from holdfast.settings.store import Store
from holdfast.settings.top import NAME, Top
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.agent.settings")

JITTER_SECONDS: Final = 1.5
"""A fleet reads a new revision spread over this time, so that not all agents ask at once."""
LOOK_SECONDS: Final = 60.0
"""The longest that a revision stays unknown if its notification was lost."""
RETRY_SECONDS: Final = 2.0
"""The pause while NATS is unavailable; five times that after a refusal, which needs an operator."""
KEYS_FILE: Final = "keys.json"
ASKED: Final = "settings"
"""The verb with which operators ask a node. An agent receives it on its common subscription: the
server lets a login answer only requests received on one subscription."""


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
        asked: bool = True,
    ) -> None:
        self.agent = agent
        self.telemetry = telemetry or Telemetry()
        self.report = Report()
        self.refused = 0
        self._broker = broker
        self._store = Store(broker)
        self._opener = Opener(agent, keys)
        self._facts = facts
        self._folder = folder
        self._renderer = renderer or Renderer()
        self._own_renderer = renderer is None
        self._jitter = jitter
        self._asked = asked
        self._snapshot: Snapshot | None = None
        self._texts: dict[str, str] = {}
        self._rendered_from: tuple[tuple[int, int], dict[str, Any]] | None = None
        self._wake = asyncio.Event()
        self._notice: bytes | None = None
        self._failed: tuple[int, str] | None = None

    # ---- in force

    def load(self) -> None:
        """Load the settings in force before a restart; needs no server."""
        self._load_keys()
        found = resolving.load(self._folder / resolving.FILE)
        if found is not None and found.agent == self.agent:
            self._put_into_force(found)

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
        if self._asked:
            questions = names.node(self.agent, ASKED)
            subscriptions.append(await self._broker.subscribe(questions, self.answer))
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
        """Newly sealed secrets matter only after a failure; otherwise a revision follows."""
        if self._failed:
            self._wake.set()

    async def answer(self, message: Received) -> None:
        """Answer an operator; the body is a path, or empty for all settings."""
        try:
            answer = {"values": self.shown(message.body.decode("utf-8", "replace"))}
            answer["revision"] = self.settings.revision
        except SettingsError as error:
            answer = {"error": str(error)}
        if message.reply:
            with contextlib.suppress(errors.BrokerError):
                await self._broker.publish(message.reply, msgspec.json.encode(answer))

    # ---- refreshing

    async def refresh(self) -> float:
        """Read the current revision and put it into force; returns how long to wait."""
        try:
            data = self._notice or await self._store.revision()
            self._notice = None
            if data is None:
                return LOOK_SECONDS
            return await self._refresh(data)
        except errors.TryAgain:
            return RETRY_SECONDS
        except errors.BrokerError as error:
            log.warning("settings cannot be read: %s", error)
            return LOOK_SECONDS

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
        return LOOK_SECONDS

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
                "force: somebody put an old one back, or this is another server. If it is meant, "
                "remove settings.json from the agent's folder and start it again",
                reason="rollback",
            )
        facts = dict(self._facts())
        if self._rendered_from == (revision.order, facts) and not self._failed:
            return
        manifest = await self._store.manifest(revision.manifest)
        sealed = await self._take_keys(revision)
        values = await self._render(manifest, facts)
        found = list(placeholders(values))
        if found:
            boxes = sealed or await self._store.sealed(self.agent)
            resolving.resolve(
                values, found, lambda id: self._opener.open(boxes, id, version_of(manifest, id))
            )
        where = [list(position) for position, _ in found]
        snapshot = Snapshot(self.agent, *revision.order, self._broker.server_now(), values, where)
        await self._enforce(snapshot)
        self._rendered_from = revision.order, facts

    async def _enforce(self, snapshot: Snapshot) -> None:
        """Save, put into force and report a snapshot, unless changed facts had no effect."""
        before = self._snapshot
        if before and (before.order, before.values) == (snapshot.order, snapshot.values):
            if self.report.number == snapshot.number and not self._failed:
                return
        else:
            await asyncio.to_thread(resolving.save, self._folder / resolving.FILE, snapshot)
            self.telemetry.settings_applied.inc()
        self._put_into_force(snapshot)
        await self._tell(Report(*snapshot.order, at=snapshot.at))

    def _put_into_force(self, snapshot: Snapshot) -> None:
        before, self._snapshot = self._snapshot, snapshot
        self._failed = None
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
        await self._tell(Report(*order, at=at, failed_number=number, reason=reason, error=text))

    async def _tell(self, report: Report) -> None:
        """Report under our own key, which nobody else may write."""
        generations = sorted(self._opener.keys.sealing)
        self.report = msgspec.structs.replace(report, generations=generations, refused=self.refused)
        subject = kv_subject(self._broker.names.applied, self.agent)
        try:
            await self._broker.store(subject, encode(self.report))
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


def _since(keys: AgentKeys, oldest: int) -> AgentKeys:
    """The keys of a generation and all later ones."""
    if min(keys.sealing) >= oldest and min(keys.verify) >= oldest:
        return keys
    return AgentKeys(
        verify={g: key for g, key in keys.verify.items() if g >= oldest},
        sealing={g: key for g, key in keys.sealing.items() if g >= oldest},
        report={g: key for g, key in keys.report.items() if g >= oldest},
    )
