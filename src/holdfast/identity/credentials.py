"""Credentials: the file a process logs in with, and its private keys.

Every user has a name, a role, a NATS login (an nkey seed) and a private inbox where replies to it
arrive; an agent also has `AgentKeys`. Files are JSON, 0600, replaced atomically; one that others
can read is rejected. Secrets never appear in a `repr` or a message.

Unknown fields are ignored, so that an older process can read a newer file.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import nkeys

from holdfast import names
from holdfast.errors import ConfigError, InvalidInput
from holdfast.identity.files import read_private, write_private

AGENT: Final = "agent"
"""The role of agents; their user name is `agent-<id>`."""

CORE_INBOX: Final = "_INBOX.core"
"""Prefix of the inboxes of the core's users; agents may reply there."""
AGENTS_INBOX: Final = "_INBOX.agents"

_WHAT: Final = "credentials file"
C = TypeVar("C", bound="Credentials")


class AgentKeys(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's keys by generation: its private ones, and the dispatchers' public ones."""

    verify: dict[int, bytes]
    sealing: dict[int, bytes]
    report: dict[int, bytes]

    def __repr__(self) -> str:
        return f"AgentKeys(generations={sorted(self.verify)})"


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """One user's login."""

    user: str
    role: str
    nkey_seed: str
    certificates: dict[int, bytes] = {}
    """Certificates of this login's role, by generation of the account's keys."""
    anchors: dict[int, bytes] = {}
    """The account's public keys by generation, to verify signatures."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(user={self.user!r})"

    @property
    def inbox(self) -> str:
        """Prefix for replies to this user; no other user may subscribe to it."""
        return inbox_of(self.user, self.role)

    @property
    def public_nkey(self) -> str:
        """The public key that identifies this user in the server's configuration."""
        return public_nkey(self.nkey_seed)

    @classmethod
    def load(cls: type[C], path: str | Path) -> C:
        """Load a file; rejects one that others can read, or of another type."""
        raw = read_private(Path(path), _WHAT)
        try:
            found = msgspec.json.decode(raw, type=cls, strict=False)
            found.check()
        except (msgspec.DecodeError, UnicodeDecodeError, ConfigError, InvalidInput):
            whose = "an agent's" if cls is AgentCredentials else "one"
            raise ConfigError(
                f"{_WHAT} {str(path)!r} is not {whose}: issue it again with "
                "'holdfast auth agent ID' or 'holdfast auth user ROLE'"
            ) from None
        return found

    def save(self, path: str | Path, *, replace: bool = False) -> None:
        """Write atomically, readable by the owner only."""
        content = msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
        write_private(Path(path), content, _WHAT, replace=replace)

    def check(self) -> None:
        """Raise `ConfigError` if a value is invalid."""
        names.check_name(self.role, "role")
        names.check_user(self.user)
        public_nkey(self.nkey_seed)
        if {len(key) for key in self.anchors.values()} - {32}:
            raise ConfigError("its public keys are not valid keys")


class AgentCredentials(Credentials, frozen=True, kw_only=True):
    """Everything one agent needs, and nothing that belongs to another."""

    agent: str
    keys: AgentKeys
    ends: float = 0.0
    """When the login ends unless it is renewed; 0: never."""
    lasts: float = 0.0
    """How long a renewed login lasts."""

    __repr__ = Credentials.__repr__

    @classmethod
    def create(
        cls,
        agent: str,
        keys: AgentKeys,
        nkey_seed: str = "",
        *,
        ends: float = 0.0,
        lasts: float = 0.0,
    ) -> AgentCredentials:
        """An agent's credentials, with a fresh NATS login unless one is given."""
        return cls(
            user=agent_user(agent),
            role=AGENT,
            nkey_seed=nkey_seed or new_nkey_seed(),
            agent=agent,
            keys=keys,
            ends=ends,
            lasts=lasts,
        )

    def check(self) -> None:
        super().check()
        every = [self.keys.verify, self.keys.sealing, self.keys.report]
        sizes = {len(key) for keys in every for key in keys.values()}
        if self.user != agent_user(self.agent) or sizes != {32}:
            raise ConfigError("user, agent and keys do not belong together")


def agent_user(agent: str) -> str:
    """The user name of an agent."""
    return f"{AGENT}-{names.check_name(agent, 'agent')}"


def inbox_of(user: str, role: str) -> str:
    """Prefix for replies to a user; agents have a separate one."""
    return f"{AGENTS_INBOX if role == AGENT else CORE_INBOX}.{user}"


def new_nkey_seed() -> str:
    """A fresh NATS user key."""
    seed: bytes = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    return seed.decode()


def public_nkey(seed: str) -> str:
    """The public half of a NATS user key."""
    try:
        pair = nkeys.from_seed(bytearray(seed, "ascii"))
        public = pair.public_key.decode()
    except (nkeys.NkeysError, ValueError, IndexError):
        public = ""
    if not public.startswith("U"):
        raise ConfigError("this is not the seed of a NATS user key: it starts with 'SU'")
    return str(public)
