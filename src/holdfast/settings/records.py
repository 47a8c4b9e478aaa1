"""Stored records of the settings: revision, manifest, sealed secrets, reports.

    hf_settings   revision              the current manifest, signed: the switch between snapshots
                  manifest.<sha256>     every file with its hash, every secret with its version
                  file.<sha256>         a file, its secrets replaced by placeholders
                  history.<number>      the signed revisions that can be gone back to
                  secret.<version>      a secret of a kept snapshot, sealed to the account
    hf_secrets    <agent>               everything sealed for that agent
    hf_applied    <agent>               that agent's report on the revision

Files and manifests are content-addressed: they never change, a reader cannot mix two snapshots, and
tampering breaks the hash. The revision is signed with the account's key of every generation in use,
because a hash proves nothing when an attacker can write it too.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from holdfast.errors import SettingsError, Unreadable
from holdfast.identity.framing import framed
from holdfast.model.codec import Codec, Count, Instant
from holdfast.model.schedule import Schedule

R = TypeVar("R", bound=msgspec.Struct)


class SecretEntry(msgspec.Struct, frozen=True):
    """A secret in the manifest."""

    version: str
    """`<revision>-<random>`; changes with the value."""
    fingerprint: str
    """A keyed hash that tells the publisher whether the value changed."""


class FileEntry(msgspec.Struct, frozen=True):
    """A file in the manifest."""

    sha256: str
    size: Count
    secrets: dict[str, SecretEntry] = {}
    """By path inside the file."""


class Manifest(msgspec.Struct, frozen=True):
    """One snapshot of the settings; `top` is one of the files."""

    files: dict[str, FileEntry] = {}


class SettingsCanary(msgspec.Struct, frozen=True):
    """A snapshot that a few agents try before the others."""

    manifest: str
    agents: list[str]
    until: Instant
    """When they return to the previous snapshot, unless a later revision ends the canary first."""


class Revision(msgspec.Struct, frozen=True):
    """The current snapshot. Numbers count up from 1 since `born`, the time of the first push."""

    born: Count
    number: Count
    manifest: str
    """The manifest's hash."""
    generations: list[Count]
    """The key generations that secrets are sealed to: two during a rotation."""
    at: Instant = 0.0
    back_to: Count = 0
    """The revision whose content this one brings back; 0 if none."""
    canary: SettingsCanary | None = None
    """The canary, if one is in progress. Agents of an earlier version ignore it and use
    `manifest`."""

    def manifest_for(self, agent: str, now: float) -> str:
        """The manifest that an agent should have in force."""
        trial = self.canary
        return (
            trial.manifest
            if trial and agent in trial.agents and now < trial.until
            else self.manifest
        )

    def on_trial(self, now: float) -> SettingsCanary | None:
        """The canary that is in progress: neither ended nor expired."""
        return self.canary if self.canary and now < self.canary.until else None

    @property
    def order(self) -> tuple[int, int]:
        """A number that only grows: a smaller one means that somebody restored an old revision."""
        return self.born, self.number


class Sealed(msgspec.Struct, frozen=True):
    """Everything sealed for one agent."""

    boxes: dict[str, dict[str, dict[int, bytes]]] = {}
    """By secret, version and generation."""
    keys: dict[int, bytes] = {}
    """The agent's keys of a new generation, sealed to the previous one."""


class Report(msgspec.Struct, frozen=True):
    """An agent's report on the settings."""

    born: Count = 0
    number: Count = 0
    """The revision in force on the agent; 0 if none ever was."""
    at: Instant = 0.0
    """When it was rendered."""
    failed_number: Count = 0
    """A later revision that could not be applied; 0 if none."""
    reason: str = ""
    error: str = ""
    generations: list[Count] = []
    """The key generations the agent holds."""
    refused: Count = 0
    """Rejections since the agent started."""
    manifest: str = ""
    """The manifest in force, which differs on a canary's agents."""
    schedules: list[Schedule] = []
    """The schedules that the agent runs, and since when it has each."""


class _Signed(msgspec.Struct, frozen=True):
    revision: str
    signatures: dict[int, bytes]


def sha256(data: bytes) -> str:
    """The content's name."""
    return hashlib.sha256(data).hexdigest()


def encode(record: msgspec.Struct) -> bytes:
    """Encode a record; equal manifests give equal bytes."""
    return msgspec.json.encode(record, order="sorted" if isinstance(record, Manifest) else None)


def decode(kind: type[R], data: bytes, what: str) -> R:
    """Decode a stored record or raise `SettingsError`."""
    try:
        found: R = _codec(kind).decode(data)
    except Unreadable as error:
        reason = str(error).partition(": ")[2]
        raise SettingsError(f"{what} cannot be read: {reason}", reason="unreadable") from None
    return found


@functools.cache
def _codec(kind: type[Any]) -> Codec[Any]:
    return Codec(kind, "a record of the settings", strict=False)


def sign(revision: Revision, keys: Mapping[int, SigningKey], namespace: str) -> bytes:
    """Encode a revision with one signature per key."""
    text = encode(revision).decode()
    message = _message(text, namespace)
    signatures = {g: bytes(key.sign(message).signature) for g, key in keys.items()}
    return encode(_Signed(text, signatures))


def verify(data: bytes, keys: Mapping[int, bytes], namespace: str) -> Revision:
    """Decode a stored revision; raises unless known keys signed it, each with a valid signature."""
    signed = decode(_Signed, data, "the revision of the settings")
    message = _message(signed.revision, namespace)
    both = sorted(keys.keys() & signed.signatures.keys())
    if not both:
        made = ", ".join(map(str, sorted(signed.signatures))) or "none"
        raise SettingsError(
            f"the settings are signed with generation {made} of the account's keys and this agent "
            f"has {', '.join(map(str, sorted(keys)))}: issue its credentials again "
            "('holdfast auth agent ID --generation N')",
            reason="signature",
        )
    try:
        for generation in both:
            VerifyKey(keys[generation]).verify(message, signed.signatures[generation])
    except (BadSignatureError, ValueError):
        raise SettingsError(
            "the revision of the settings is not what a publisher signed: it was tampered with, "
            "or comes from another account",
            reason="signature",
        ) from None
    return decode(Revision, signed.revision.encode(), "the revision of the settings")


def claimed(data: bytes) -> Revision:
    """Decode a revision without verifying it, for display only."""
    signed = decode(_Signed, data, "the revision of the settings")
    return decode(Revision, signed.revision.encode(), "the revision of the settings")


def signers(data: bytes) -> list[int]:
    """The generations a stored revision claims to be signed with; unverified."""
    named = decode(_Signed, data, "the revision of the settings").signatures
    return [generation for generation in named if 1 <= generation < 2**32]


def _message(text: str, namespace: str) -> bytes:
    return framed(b"holdfast.settings.v1", namespace, text)
