"""The account seed: 32 random bytes from which every other key of an account is derived.

Guaranteed: the same seed, purpose, name and generation always give the same key, so dispatchers
share nothing but the seed. Keys of different purposes, agents or generations reveal nothing about
each other or the seed (BLAKE2b, keyed by it). The seed never appears in a `repr` or a message.

A generation is a rotation of keys under the same seed. During a rollout the old and the new one are
both valid: `AgentCredentials` hold several. A new generation does not repair a leaked seed: create
a new seed and reissue everything.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from nacl.public import PrivateKey
from nacl.signing import SigningKey

from holdfast import names
from holdfast.errors import ConfigError, InvalidInput
from holdfast.identity.credentials import AgentCredentials, AgentKeys, Credentials
from holdfast.identity.files import read_private, write_private
from holdfast.identity.framing import framed
from holdfast.identity.requests import certified, key_text, request_key

FIRST_GENERATION: Final = 1

_WHAT: Final = "account seed"
_MISSING: Final = "Say where the one is that 'holdfast auth init' made"
_BYTES: Final = 32  # of an Ed25519 seed


def generations_near(generation: int) -> range:
    """The generations that may be in use beside this one during a rotation."""
    return range(max(FIRST_GENERATION, generation - 1), generation + 2)


class AccountSeed:
    """The root of every key of an account. Dispatchers hold it; agents never do."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != _BYTES:
            raise ConfigError(f"an account seed is {_BYTES} bytes and this one is {len(seed)}")
        self._seed = seed

    def __repr__(self) -> str:
        return "AccountSeed(***)"

    @classmethod
    def create(cls, path: str | Path) -> AccountSeed:
        """Create a seed in a new file for its owner only (0600)."""
        seed = cls(secrets.token_bytes(_BYTES))
        write_private(Path(path), seed._seed.hex().encode() + b"\n", _WHAT, replace=False)
        return seed

    @classmethod
    def load(cls, path: str | Path) -> AccountSeed:
        """Load a seed; rejects a file that others can read."""
        text = read_private(Path(path), _WHAT, _MISSING).decode("ascii", "replace").strip()
        try:
            return cls(bytes.fromhex(text))
        except ValueError:
            raise ConfigError(
                f"{_WHAT} {str(path)!r} is not one: it has 64 hexadecimal digits, "
                "as 'holdfast auth init' writes them"
            ) from None

    def signing_key(self, generation: int = FIRST_GENERATION) -> SigningKey:
        """The Ed25519 key that dispatchers sign commands with."""
        return SigningKey(self._derived("command", "", generation))

    def verify_key(self, generation: int = FIRST_GENERATION) -> bytes:
        """The public half of `signing_key`, for agents."""
        return bytes(self.signing_key(generation).verify_key)

    def certify(
        self, login: Credentials, namespace: str, generations: Sequence[int]
    ) -> Credentials:
        """The login with its certificate and the account's public keys."""
        key = key_text(request_key(login))
        statement = certified(namespace, login.user, login.role, key)
        return msgspec.structs.replace(
            login,
            certificates={g: self.signing_key(g).sign(statement).signature for g in generations},
            anchors={g: self.verify_key(g) for g in generations},
        )

    def sealing_key(self, agent: str, generation: int = FIRST_GENERATION) -> PrivateKey:
        """The X25519 key that an agent's secrets are sealed to."""
        return PrivateKey(self._derived("sealing", names.check_name(agent, "agent"), generation))

    def report_key(self, agent: str, generation: int = FIRST_GENERATION) -> bytes:
        """The key that authenticates an agent's acks and returns."""
        return self._derived("report", names.check_name(agent, "agent"), generation)

    def agent_keys(self, agent: str, generations: Sequence[int] = (FIRST_GENERATION,)) -> AgentKeys:
        """An agent's private keys and the public ones it needs, and nothing else."""
        return AgentKeys(
            verify={g: self.verify_key(g) for g in generations},
            sealing={g: bytes(self.sealing_key(agent, g)) for g in generations},
            report={g: self.report_key(agent, g) for g in generations},
        )

    def issue(
        self, agent: str, generations: Sequence[int] = (FIRST_GENERATION,), nkey_seed: str = ""
    ) -> AgentCredentials:
        """Credentials for one agent, with a fresh NATS login unless one is given."""
        return AgentCredentials.create(agent, self.agent_keys(agent, generations), nkey_seed)

    def _derived(self, purpose: str, name: str, generation: int) -> bytes:
        if isinstance(generation, bool) or not 1 <= generation < 2**32:
            raise InvalidInput(f"generation {generation!r} is not usable: they count from 1")
        message = framed(b"holdfast.derive.v1", purpose, name, str(generation))
        return hashlib.blake2b(message, key=self._seed, digest_size=32, person=b"holdfast").digest()
