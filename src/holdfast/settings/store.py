"""Reads the settings on the server, for agents and publishers.

Guaranteed: content matches its name. A manifest or file that is missing or has another hash raises
`SettingsError` (`torn`, `hash`). Reads are advisory: a publisher's writes name the revisions they
expect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast import errors
from holdfast.broker import Broker, Bucket
from holdfast.errors import SettingsError
from holdfast.names import (
    SETTINGS_REVISION,
    check_name,
    settings_file_key,
    settings_history_key,
    settings_manifest_key,
    settings_secret_key,
)
from holdfast.settings.document import TAG, placeholder, secret_id
from holdfast.settings.records import (
    Manifest,
    Report,
    Revision,
    Sealed,
    claimed,
    decode,
    sha256,
    signers,
    verify,
)
from holdfast.settings.sealing import Sealer


@dataclass
class Published:
    """The server's state as a publisher sees it."""

    revision: Revision | None = None
    sequence: int = 0
    """The expected KV revision for the next write of the revision."""
    signed: bytes = b""
    """The current revision as stored."""
    history: dict[int, Revision] = field(default_factory=dict)
    """The revisions that are kept, the current one included."""
    manifest: Manifest = field(default_factory=Manifest)
    contents: dict[str, bytes] = field(default_factory=dict)
    """Files and manifests by key, if they match their names; sealed secrets by key."""
    stray: set[str] = field(default_factory=set)
    """Keys whose content does not match."""
    sealed: dict[str, tuple[int, Sealed]] = field(default_factory=dict)
    """Sealed secrets by agent, with the KV revision of each record."""

    def snapshot(self, hash: str) -> Manifest:
        """A manifest that is kept."""
        data = self.contents.get(settings_manifest_key(hash))
        if data is None:
            raise SettingsError("the manifest of that snapshot is missing", reason="torn")
        return decode(Manifest, data, "the manifest")

    def texts(self, manifest: Manifest) -> dict[str, str]:
        """Every file of a manifest, by name."""
        found = {}
        for name, entry in manifest.files.items():
            body = self.contents.get(settings_file_key(entry.sha256))
            if body is None:
                raise SettingsError(f"{name}.yaml of that snapshot is missing", reason="torn")
            found[name] = body.decode("utf-8", "replace")
        return found

    def source(self, manifest: Manifest, name: str) -> str:
        """A file in a form that can be pushed again, with secrets sealed to the account."""
        text = self.texts(Manifest({name: manifest.files[name]}))[name]
        for path, entry in manifest.files[name].secrets.items():
            if sealed := self.contents.get(settings_secret_key(entry.version)):
                mark = f'"{placeholder(secret_id(name, path))}"'
                text = text.replace(mark, f"{TAG} {sealed.decode('ascii', 'replace')}")
        return text

    def kept(self, number: int = 0) -> Revision:
        """A revision by its number; 0 for the current one."""
        if self.revision is None:
            raise SettingsError("nothing is published yet: see 'holdfast settings push'")
        found = self.history.get(number or self.revision.number)
        if found is None:
            kept = ", ".join(map(str, sorted(self.history)))
            raise SettingsError(f"revision {number} is not kept; these are: {kept}")
        return found


class SettingsStore:
    """The three buckets."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.names = broker.names
        self.settings = Bucket(broker, self.names.settings)
        self.secrets = Bucket(broker, self.names.secrets)
        self.applied = Bucket(broker, self.names.applied)

    # ---- for agents: by key, from any replica

    async def revision(self) -> bytes | None:
        """The signed revision; None if nothing was ever published."""
        entry = await self.settings.peek(SETTINGS_REVISION)
        return entry.value if entry else None

    async def shown_revision(self) -> Revision | None:
        """The unverified revision, for display; None if missing or unreadable."""
        try:
            entry = await self.settings.peek(SETTINGS_REVISION)
        except (errors.NotFound, errors.Unavailable):
            return None  # the bucket is created by the first push
        if entry is None:
            return None
        try:
            return claimed(entry.value)
        except SettingsError as error:
            note = self._broker.unreadable.note
            note(self.settings.name, entry.key, error, entry.value)
            return None

    async def manifest(self, hash: str) -> Manifest:
        """A manifest, checked against its hash."""
        data = await self._content(settings_manifest_key(hash), hash, "the manifest")
        return decode(Manifest, data, "the manifest")

    async def files(self, manifest: Manifest, wanted: Iterable[str]) -> list[tuple[str, str]]:
        """Files of a manifest, in the order requested."""
        names = list(wanted)
        for name in names:
            if name not in manifest.files:
                raise SettingsError(f"the manifest does not have {name}.yaml", reason="torn")
        return list(await asyncio.gather(*(self._file(manifest, name) for name in names)))

    async def _file(self, manifest: Manifest, name: str) -> tuple[str, str]:
        hash = manifest.files[name].sha256
        data = await self._content(settings_file_key(hash), hash, f"{name}.yaml")
        return name, data.decode("utf-8", "replace")

    async def _content(self, key: str, hash: str, what: str) -> bytes:
        entry = await self.settings.peek(key)
        if entry is None:
            raise SettingsError(f"{what} of the settings is missing", reason="torn")
        if sha256(entry.value) != hash:
            raise SettingsError(
                f"{what} of the settings is not what was published: its hash differs",
                reason="hash",
            )
        return entry.value

    async def sealed(self, agent: str) -> Sealed:
        """Everything sealed for an agent."""
        entry = await self.secrets.peek(agent)
        return decode(Sealed, entry.value, "the sealed secrets") if entry else Sealed()

    # ---- for publishers and operators: everything, from the leader

    async def published(self, sealer: Sealer | None, *, force: bool = False) -> Published:
        """Everything published; `force` ignores a revision signed with another seed.

        Without a sealer nothing is verified: for display only.
        """
        found = Published()
        try:
            await self._read_settings(found, sealer, force)
            async for entry in self.secrets.entries():
                found.sealed[entry.key] = entry.revision, _lenient(entry.value)
        except errors.NotFound:
            return Published()
        except errors.Unavailable:
            if await self._exists():
                raise
            return Published()
        return found

    async def _read_settings(self, found: Published, sealer: Sealer | None, force: bool) -> None:
        found.sequence, entry = await self.settings.last(SETTINGS_REVISION)
        if entry is not None:
            found.signed = entry.value
            found.revision = self._verified(entry.value, sealer, force)
        async for content in self.settings.entries():
            kind, _, name = content.key.partition(".")
            if kind == "secret":
                found.contents[content.key] = content.value
            elif kind == "history":
                self._remember(found, content.key, content.value, sealer)
            elif kind not in ("file", "manifest"):
                continue
            elif sha256(content.value) == name:
                found.contents[content.key] = content.value
            else:
                found.stray.add(content.key)
        if found.revision is not None:
            found.history[found.revision.number] = found.revision
        if found.revision is not None:
            data = found.contents.get(settings_manifest_key(found.revision.manifest))
            found.manifest = decode(Manifest, data, "the manifest") if data else Manifest()

    def _remember(self, found: Published, key: str, data: bytes, sealer: Sealer | None) -> None:
        """Note a kept revision; one that this account has not signed is ignored."""
        try:
            revision = self._verified(data, sealer, force=False)
        except SettingsError:
            revision = None
        if revision is None or key != settings_history_key(revision.number):
            found.stray.add(key)
            return
        found.contents[key] = data
        if found.revision and (found.revision.born, 0) < revision.order < found.revision.order:
            found.history[revision.number] = revision

    def _verified(self, data: bytes, sealer: Sealer | None, force: bool) -> Revision | None:
        if sealer is None:
            return claimed(data)
        try:
            keys = {g: sealer.seed.verify_key(g) for g in signers(data)}
            return verify(data, keys, self.names.namespace)
        except SettingsError:
            if force:
                return None
            raise SettingsError(
                "the settings on the server were not signed with this account seed: check which "
                "seed file is used; --force replaces them",
                reason="signature",
            ) from None

    async def _exists(self) -> bool:
        try:
            await self._broker.api(f"STREAM.INFO.{self.settings.stream}")
        except errors.NotFound:
            return False
        return True

    async def known_agents(self) -> set[str]:
        """Every agent ever seen: in facts, records, reports or secrets."""
        found: set[str] = set()
        names = self.names
        for bucket in (names.facts, names.agents, names.applied, names.secrets):
            found |= {key for key, _ in await self._listed(bucket)}
        return {agent for agent in found if _is_agent(agent)}

    async def reports(self) -> dict[str, Report]:
        """Every agent's report."""
        listed = await self._listed(self.names.applied)
        return {agent: _report(value) for agent, value in listed}

    async def _listed(self, bucket: str) -> list[tuple[str, bytes]]:
        try:
            return [(e.key, e.value) async for e in Bucket(self._broker, bucket).entries()]
        except (errors.NotFound, errors.Unavailable):
            return []  # not created yet


def _report(data: bytes) -> Report:
    """An agent's report; an unreadable one becomes a report of that error."""
    try:
        return decode(Report, data, "its report")
    except SettingsError as error:
        return Report(reason=error.reason, error=str(error))


def _lenient(data: bytes) -> Sealed:
    """Sealed secrets; an unreadable record counts as empty and is resealed."""
    try:
        return decode(Sealed, data, "sealed secrets")
    except SettingsError:
        return Sealed()


def _is_agent(name: str) -> bool:
    try:
        check_name(name, "agent")
    except errors.InvalidName:
        return False
    return True
