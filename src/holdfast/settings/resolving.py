"""Resolving: replaces placeholders with secrets, and stores the settings in force in a file.

A placeholder that is a whole value becomes the secret. One inside a longer string, in a key, or
without a matching secret fails everything: settings are never partly resolved.

The file holds the values with their secrets, readable by its owner only (0600), written atomically.
It is the only place on disk where Holdfast stores plaintext secrets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.errors import ConfigError, SettingsError, Unreadable
from holdfast.identity.files import write_private
from holdfast.model.codec import Codec, Count, Instant
from holdfast.model.settings import Position, Settings
from holdfast.settings.document import MARK, PLACEHOLDER
from holdfast.settings.records import Manifest

log = logging.getLogger("holdfast.settings")

FILE: Final = "settings.json"
BEFORE: Final = "settings.before.json"
"""The snapshot to go back to when a canary's expires and no server can be reached."""
_WHAT: Final = "settings snapshot"


class Snapshot(msgspec.Struct, frozen=True):
    """Settings in force, as stored."""

    agent: str
    born: Count
    number: Count
    at: Instant
    values: dict[str, Any]
    secrets: list[list[str | int]] = []
    """The positions of secrets."""
    manifest: str = ""
    until: Instant = 0.0
    """When a canary's snapshot expires; 0 for any other."""
    schedules: dict[str, Instant] = {}
    """The schedules that this host runs, and since when it has had each."""

    def __repr__(self) -> str:
        return f"Snapshot({self.agent!r}, number={self.number})"

    @property
    def order(self) -> tuple[int, int]:
        return self.born, self.number

    def settings(self) -> Settings:
        """The public form."""
        return Settings(self.values, revision=self.number, secrets=[tuple(p) for p in self.secrets])


SNAPSHOT: Final = Codec[Snapshot](Snapshot, "a snapshot of the settings")


def placeholders(values: Any, position: Position = ()) -> Iterator[tuple[Position, str]]:
    """Every placeholder with its position; rejects one where no secret can be."""
    if isinstance(values, str):
        if found := PLACEHOLDER.fullmatch(values):
            yield position, found[1]
        elif MARK in values:
            raise SettingsError(
                f"{_shown(position)} has a secret inside a longer text: a secret must be a whole "
                "value, and templates cannot use it",
                reason="unresolved",
            )
    elif isinstance(values, dict):
        for key, value in values.items():
            if MARK in key:
                raise SettingsError(f"{_shown(position)} has a secret as key", reason="unresolved")
            yield from placeholders(value, (*position, key))
    elif isinstance(values, list):
        for number, value in enumerate(values):
            yield from placeholders(value, (*position, number))


def version_of(manifest: Manifest, id: str) -> str:
    """The version of a secret that a manifest names."""
    file, _, path = id.partition(":")
    entry = manifest.files.get(file)
    secret = entry.secrets.get(path) if entry else None
    if secret is None:
        raise SettingsError(f"the manifest has no secret {id}", reason="unresolved")
    return secret.version


def resolve(
    values: dict[str, Any], found: list[tuple[Position, str]], open: Callable[[str], str]
) -> None:
    """Replace placeholders with secrets: all of them or none."""
    opened = {id: open(id) for _, id in found}
    for position, id in found:
        place: Any = values
        for step in position[:-1]:
            place = place[step]
        place[position[-1]] = opened[id]


def _shown(position: Position) -> str:
    return ".".join(map(str, position)) or "the top level"


# ---------------------------------------------------------------- the file


def save(path: Path, snapshot: Snapshot) -> None:
    """Store the settings in force."""
    write_private(path, msgspec.json.encode(snapshot), _WHAT, replace=True)


def load(path: Path) -> Snapshot | None:
    """The stored snapshot; None if there is none or it is damaged."""
    try:
        raw = path.read_bytes()
        if path.stat().st_mode & 0o077:
            log.warning("others could read %s: it is private again", path.name)
            path.chmod(0o600)
        return SNAPSHOT.decode(raw)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{_WHAT} {str(path)!r} cannot be read: {error.strerror}") from None
    except Unreadable:
        log.error("%s %s is damaged and not used", _WHAT, path)
        return None


class SettingsFile:
    """The settings of a snapshot file, reloaded when it changes; for workers beside an agent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self._settings: Settings | None = None

    def __call__(self) -> Settings:
        """The settings in force now."""
        try:
            found = self.path.stat()
            stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
        except OSError:
            stamp = None
        if stamp != self._seen or self._settings is None:
            self._settings = self._read()
            self._seen = stamp
        return self._settings

    def _read(self) -> Settings:
        snapshot = load(self.path)
        if snapshot is None:
            raise SettingsError(
                f"{self.path} has no settings: the agent on this host writes them once it has "
                "rendered some",
                reason="none",
            )
        register_secrets(str(self.path), snapshot.settings())
        return snapshot.settings()


def register_secrets(source: str, settings: Settings) -> None:
    """Redact these secrets in everything this process emits from now on."""
    from holdfast.redaction import REDACTOR

    REDACTOR.register(source, settings.secrets())
