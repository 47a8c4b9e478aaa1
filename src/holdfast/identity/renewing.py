"""Renewing: how an agent gets its next login before its login ends.

The agent makes the next login itself and asks for it in its own record: the request names both
logins and is signed by both. Whoever has the folder of users lists the next one if the agent's
valid login has signed (`UserFolder.renew_joined`); nobody has to decide, because the agent has
proved that it is the same host. Both logins work until the old one ends, so an agent can be
switched off at any moment.

Guaranteed by `verify`: the holder of both private keys made this request for this agent and
namespace. Repeating a request has no further effect.
"""

from __future__ import annotations

from typing import Final

import msgspec
import nkeys
from nacl.exceptions import BadSignatureError, CryptoError

from holdfast.errors import Unreadable
from holdfast.identity.credentials import public_nkey
from holdfast.identity.framing import framed
from holdfast.identity.joining import JoinRefused, verify_login
from holdfast.model.codec import Codec, Instant, Name

LARGEST: Final = 2_048
"""Bytes of a request: two public keys, two signatures and a name."""
_ASK: Final = b"holdfast.renew.v1"


class Renewal(msgspec.Struct, frozen=True):
    """A request for the next login."""

    agent: Name
    before: str
    """The public half of the current login."""
    nkey: str
    """The public half of the next one."""
    at: Instant
    by_before: bytes = b""
    by_next: bytes = b""


_RENEWAL: Final = Codec[Renewal](Renewal, "the request for a new login", largest=LARGEST)


def ask(agent: str, namespace: str, before: str, following: str, at: float) -> str:
    """A request, from the seeds of both logins."""
    made = Renewal(agent, public_nkey(before), public_nkey(following), float(int(at)))
    message = _message(made, namespace)
    signed = msgspec.structs.replace(
        made, by_before=_signed(before, message), by_next=_signed(following, message)
    )
    return _RENEWAL.encode(signed).decode()


def verify(text: str, agent: str, namespace: str) -> Renewal:
    """The request in an agent's record, or `JoinRefused`."""
    try:
        found = _RENEWAL.decode(text.encode())
        message = _message(found, namespace)
        verify_login(found.before, message, found.by_before)
        verify_login(found.nkey, message, found.by_next)
    except (Unreadable, BadSignatureError, CryptoError, ValueError, TypeError):
        raise JoinRefused(f"{agent} asks for a login with a request that is forged") from None
    if found.agent != agent:
        raise JoinRefused(f"{agent} asks for a login of another agent")
    return found


def _message(found: Renewal, namespace: str) -> bytes:
    return framed(_ASK, namespace, found.agent, found.before, found.nkey, str(int(found.at)))


def _signed(seed: str, message: bytes) -> bytes:
    return bytes(nkeys.from_seed(bytearray(seed, "ascii")).sign(message))
