"""Hosts that ask to become agents: their requests, and the records about them.

hf_joins   host.<agent>   the last host that asked under this id, and what became of it
           token.<id>     who has used a token, and whether it was revoked

pending ──► approved ──► issued          a host that asks with another key begins again,
   └──────────┴──► rejected              and then it `replaces` the one before
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
from typing import Final, Literal

import msgspec

from holdfast.model.codec import Codec, Count, Instant, Name, Seconds

JoinState = Literal["pending", "approved", "issued", "rejected"]
LARGEST_ASK: Final = 16 * 1024
"""Bytes of one request, which contains a token, three keys and a few names."""


def fingerprint(nkey: str) -> str:
    """A login, short enough to compare by eye: 80 bits, for which nobody finds another key."""
    text = base64.b32encode(hashlib.sha256(nkey.encode()).digest()[:10]).decode().lower()
    return "-".join(text[n : n + 4] for n in range(0, 16, 4))


class TokenClaims(msgspec.Struct, frozen=True):
    """What a token allows; signed by the account."""

    id: Name
    namespace: str
    pattern: str
    """A glob over agent ids."""
    expires: Instant
    key: bytes
    """The public half of the token's own key; the private half is never sent."""
    uses: Count = 1
    """How many hosts may join with it; 0 for any number."""
    accept: bool = False
    """Whether hosts are accepted without an operator, unless they replace one."""
    lasts: Seconds = 0.0
    """How long a login lasts before it must be renewed; 0 if it does not end."""

    def allows(self, agent: str) -> bool:
        """Whether an agent of this id may join with it."""
        return fnmatch.fnmatchcase(agent, self.pattern)


class Ask(msgspec.Struct, frozen=True):
    """A host's request; signed with the token's key and with the login it wants."""

    claims: str
    """The token's claims, as they were signed."""
    generation: Count
    certificate: bytes
    """The account's signature of the claims."""
    agent: Name
    nkey: str
    """The public half of the login that the host has made."""
    box: bytes
    """The public key that its credentials are sealed to."""
    at: Instant
    host: str = ""
    version: str = ""


class SignedAsk(msgspec.Struct, frozen=True):
    """A request as it is sent and kept."""

    ask: str
    by_token: bytes
    by_login: bytes


class JoinRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of a host that asked to join."""

    signed: bytes
    """The request: whoever issues a login verifies it again."""
    agent: Name
    nkey: str
    token: Name
    state: str
    at: Instant
    host: str = ""
    version: str = ""
    replaces: bool = False
    """It replaces another host with this id: only an operator may accept it."""
    by: str = ""
    """Who approved, issued or rejected it."""
    answer: bytes = b""
    """The credentials, sealed to the host."""

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.nkey)


class TokenRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of a token."""

    used: tuple[str, ...] = ()
    """The id and login of each host that asked with it, if its uses are limited."""
    revoked: str = ""
    """Who revoked it."""


class JoinReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a host."""

    state: str = ""
    error: str = ""
    again: bool = False
    """Ask again shortly."""
    answer: bytes = b""
    now: Instant = 0.0
    """The centre's time, for a host whose clock is wrong."""


CLAIMS: Final = Codec[TokenClaims](TokenClaims, "the token's claims", largest=LARGEST_ASK)
ASK: Final = Codec[Ask](Ask, "the request to join", largest=LARGEST_ASK)
SIGNED: Final = Codec[SignedAsk](SignedAsk, "the request to join", largest=LARGEST_ASK)
RECORD: Final = Codec[JoinRecord](JoinRecord, "the record of a host that asked to join")
TOKEN: Final = Codec[TokenRecord](TokenRecord, "the record of a token")
REPLY: Final = Codec[JoinReply](JoinReply, "the answer to a request to join")
