"""Sealing: secrets that only one agent can open, and secrets at rest that only the account can.

For an agent: an X25519 box from the account's key to the agent's, both of one generation and
derived from the account seed (the account's is the curve form of its signing key, whose public half
every agent has). The plaintext includes agent, secret and version. So a box that was moved to
another agent, renamed or replayed is rejected although it can be opened.

At rest, in the publisher's tree: `hf1:…` is sealed together with its file and path by a key that
only holders of the seed can derive, so a tree can live in git.

No error or exception here contains a value.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
from typing import Final

import msgspec
from nacl.exceptions import CryptoError
from nacl.public import Box, PrivateKey
from nacl.secret import SecretBox
from nacl.signing import VerifyKey

from holdfast.errors import SettingsError, Unreadable
from holdfast.identity.credentials import AgentKeys
from holdfast.identity.framing import framed
from holdfast.identity.seed import FIRST_GENERATION, AccountSeed
from holdfast.model.codec import Codec
from holdfast.settings.records import Sealed

AT_REST: Final = "hf1:"
KEYS: Final = "keys"
"""The id for an agent's keys of a new generation; cannot clash, as secret ids contain a `:`."""


class _Content(msgspec.Struct, frozen=True):
    """The plaintext inside a box."""

    agent: str
    secret: str
    version: str
    value: str

    def __repr__(self) -> str:
        return f"_Content({self.secret!r})"


_KEYS: Final = Codec[AgentKeys](AgentKeys, "an agent's keys", strict=False)
_CONTENT: Final = Codec[_Content](_Content, "a sealed value")


class Sealer:
    """The account's side: seals for every agent, and can open what it sealed."""

    def __init__(self, seed: AccountSeed) -> None:
        self.seed = seed
        self._box = functools.lru_cache(maxsize=100_000)(self._make_box)
        self._sender = functools.cache(
            lambda generation: seed.signing_key(generation).to_curve25519_private_key()
        )
        self._at_rest = SecretBox(self._derived(b"at rest"))
        self._fingerprint_key = self._derived(b"fingerprint")

    def __repr__(self) -> str:
        return "Sealer(***)"

    def seal(self, agent: str, generation: int, secret: str, version: str, value: str) -> bytes:
        """Seal a value for one agent."""
        content = msgspec.json.encode(_Content(agent, secret, version, value))
        return bytes(self._box(agent, generation).encrypt(content))

    def open(self, agent: str, generation: int, secret: str, version: str, box: bytes) -> str:
        """Open a box sealed by this account."""
        return _open(self._box(agent, generation), box, agent, secret, version)

    def seal_keys(self, agent: str, before: int, generation: int) -> bytes:
        """An agent's keys of a new generation, sealed to the previous one."""
        keys = msgspec.json.encode(self.seed.agent_keys(agent, [generation])).decode()
        return self.seal(agent, before, KEYS, str(generation), keys)

    def fingerprint(self, secret: str, value: str) -> str:
        """A fingerprint of a value; meaningless without the seed."""
        message = framed(b"holdfast.fingerprint.v1", secret, value)
        key = self._fingerprint_key
        return hashlib.blake2b(message, key=key, digest_size=16).hexdigest()

    def seal_at_rest(self, secret: str, value: str) -> str:
        """A value as written in the tree."""
        content = msgspec.json.encode(_Content("", secret, "", value))
        return AT_REST + base64.b64encode(self._at_rest.encrypt(content)).decode()

    def open_at_rest(self, secret: str, text: str) -> str:
        """The value written in the tree; returns text that is not sealed unchanged."""
        if not text.startswith(AT_REST):
            return text
        try:
            raw = self._at_rest.decrypt(base64.b64decode(text[len(AT_REST) :], validate=True))
            content = _CONTENT.decode(raw)
        except (CryptoError, binascii.Error, ValueError, Unreadable):
            raise SettingsError(
                f"secret {secret} was sealed with another account seed, or was damaged: "
                "'holdfast secrets set' writes it again",
                reason="secret",
            ) from None
        if content.secret != secret:
            raise SettingsError(
                f"the value of {secret} was sealed for {content.secret}: a sealed value cannot be "
                "moved; 'holdfast secrets set' writes it again",
                reason="secret",
            )
        return content.value

    def _make_box(self, agent: str, generation: int) -> Box:
        return Box(self._sender(generation), self.seed.sealing_key(agent, generation).public_key)

    def _derived(self, purpose: bytes) -> bytes:
        key = bytes(self.seed.signing_key(FIRST_GENERATION))
        return hashlib.blake2b(purpose, key=key, digest_size=32, person=b"hf-settings").digest()


class Opener:
    """One agent's side: opens only what was sealed for it."""

    def __init__(self, agent: str, keys: AgentKeys) -> None:
        self.agent = agent
        self.keys = keys
        self._boxes = {
            generation: Box(
                PrivateKey(private), VerifyKey(keys.verify[generation]).to_curve25519_public_key()
            )
            for generation, private in keys.sealing.items()
            if generation in keys.verify
        }

    def __repr__(self) -> str:
        return f"Opener({self.agent!r})"

    def open(self, sealed: Sealed, secret: str, version: str) -> str:
        """Open a secret in exactly this version."""
        by_version = sealed.boxes.get(secret)
        if not by_version:
            raise SettingsError(
                f"secret {secret} is not sealed for agent {self.agent}: "
                "'holdfast settings push' seals it for every agent that is entitled to it",
                reason="unresolved",
            )
        boxes = by_version.get(version)
        if not boxes:
            raise SettingsError(
                f"secret {secret} is stored in a different version from the one in the manifest",
                reason="secret",
            )
        generation, box = self._choose(secret, boxes)
        return _open(box, boxes[generation], self.agent, secret, version)

    def new_keys(self, sealed: Sealed) -> AgentKeys | None:
        """Keys of a generation this agent lacks, if any were sent that it can open."""
        for generation, box in sealed.keys.items():
            before = generation - 1
            if generation in self._boxes or before not in self._boxes:
                continue
            text = _open(self._boxes[before], box, self.agent, KEYS, str(generation))
            return _KEYS.decode(text.encode())
        return None

    def _choose(self, secret: str, boxes: dict[int, bytes]) -> tuple[int, Box]:
        for generation in sorted(boxes, reverse=True):
            if generation in self._boxes:
                return generation, self._boxes[generation]
        have = ", ".join(map(str, sorted(self._boxes)))
        raise SettingsError(
            f"secret {secret} is sealed to generation {max(boxes)} and agent {self.agent} has "
            f"{have}: issue its credentials again",
            reason="secret",
        )


def _open(box: Box, data: bytes, agent: str, secret: str, version: str) -> str:
    try:
        content = _CONTENT.decode(box.decrypt(data))
    except (CryptoError, ValueError, TypeError, Unreadable):
        raise SettingsError(
            f"secret {secret} cannot be opened by agent {agent}: it was sealed for another, or was "
            "tampered with",
            reason="secret",
        ) from None
    if (content.agent, content.secret, content.version) != (agent, secret, version):
        raise SettingsError(
            f"the box of secret {secret} was sealed as another secret or version: it was moved, or "
            "an old one was restored",
            reason="secret",
        )
    return content.value


def merged_keys(keys: AgentKeys, more: AgentKeys) -> AgentKeys:
    """Combine the keys of two generations."""
    return AgentKeys(
        verify={**keys.verify, **more.verify},
        sealing={**keys.sealing, **more.sealing},
        report={**keys.report, **more.report},
    )
