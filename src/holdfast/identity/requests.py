"""Signed requests: they prove who asks a process to drain, cancel or dispatch.

Within an account anyone can have a server response delivered to any subject, so a subject does not
identify the sender. A request that changes something therefore carries:

- the sender's login: user, role and public key, certified by the account seed for one namespace;
- a signature by that login's key over the namespace, the subject, the expiry, a nonce and the body.

The key is derived from the login's NATS key but is a different one: a server chooses the text that
a client signs to log in, and could choose a request.

The receiver needs only the account's public keys, which are in its credentials. `grants` decides
which role may ask for what: a role that may publish the subject may ask.

Guaranteed by `RequestGuard.check`: the sender it returns holds the key of a login of this account
and namespace, and its role may ask this. A request passes once within its lifetime of a minute, and
only if signed after this process started: a restart forgets which requests were seen, so older ones
could be replayed. Times are the NATS server's.

Not guaranteed: that the login is not revoked. A revoked one cannot connect; its owner would need
another user's connection to send a request through, until the account seed is replaced.

Without public keys (no credentials, or a file of an earlier version) every request passes, unnamed.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from holdfast import names as wire
from holdfast.errors import HoldfastError
from holdfast.identity.commands import Refusal, ReplayCache
from holdfast.identity.credentials import Credentials
from holdfast.identity.framing import framed
from holdfast.identity.grants import ROLES, covers
from holdfast.names import Names

log = logging.getLogger("holdfast.identity")

GOOD_SECONDS: Final = 60.0
"""How long a request is valid: tolerates clocks that differ by seconds."""
CLOSE_SECONDS: Final = 0.2
"""How far two processes' ideas of the server's time may differ: half a round trip each."""
REMEMBERED: Final = 8_192
"""Requests per login that a guard remembers: a minute of more than a hundred a second."""

_EXPIRES: Final = re.compile(r"[0-9]{1,15}")
_REQUEST: Final = b"holdfast.request.v1"
_LOGIN: Final = b"holdfast.login.v1"


_SENTENCES: Final = {
    Refusal.UNSIGNED: "the request is not signed: the sender or its credentials file is of an "
    "earlier version: run 'holdfast auth renew' and use the file again",
    Refusal.FOREIGN: "the request is signed with a login of another account or namespace, or its "
    "certificate is of keys that are no longer in use: run 'holdfast auth renew'",
    Refusal.TAMPERED: "the request differs from what was signed",
    Refusal.FORBIDDEN: "the sender's role may not ask this",
    Refusal.EXPIRED: "the request has expired, or the sender's clock is wrong by a minute",
    Refusal.REPLAYED: "the request was received before",
}


class RequestRefused(HoldfastError):
    """A request that must not be obeyed, and why."""

    def __init__(self, reason: Refusal) -> None:
        super().__init__(_SENTENCES[reason])
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Requester:
    """Who sent a request; empty if unsigned."""

    user: str = ""
    role: str = ""

    def named(self, declared: str) -> str:
        """For the audit: the login, and the person it claims to act for."""
        if not self.user or not declared:
            return self.user or declared
        return f"{self.user}: {declared}"


def request_key(login: Credentials) -> SigningKey:
    """The Ed25519 key a login signs requests with."""
    secret = login.nkey_seed.encode()
    return SigningKey(hashlib.blake2b(secret, digest_size=32, person=b"hf-request").digest())


def certified(namespace: str, user: str, role: str, key: str) -> bytes:
    """What the account seed signs to certify a login's role."""
    return framed(_LOGIN, namespace, user, role, key)


def key_text(key: SigningKey) -> str:
    """The public half of a request key, as sent."""
    return bytes(key.verify_key).hex()


class RequestSigner:
    """Signs requests with one login."""

    def __init__(self, login: Credentials, namespace: str, now: Callable[[], float]) -> None:
        self._login = login
        self._namespace = namespace
        self._now = now
        self._key = request_key(login)
        self._public = key_text(self._key)

    def sign(self, subject: str, body: bytes) -> dict[str, str]:
        """The headers that make this body this login's request; unique per call."""
        expires = str(int((self._now() + GOOD_SECONDS) * 1000))
        nonce = secrets.token_hex(12)
        signed = _signed(self._namespace, subject, self._public, expires, nonce, body)
        certificates = [f"{g}.{_text(c)}" for g, c in self._login.certificates.items()]
        return {
            wire.H_USER: self._login.user,
            wire.H_ROLE: self._login.role,
            wire.H_KEY: self._public,
            wire.H_CERTIFICATES: " ".join(certificates),
            wire.H_EXPIRES: expires,
            wire.H_NONCE: nonce,
            wire.H_SIGNATURE: _text(self._key.sign(signed).signature),
        }


class RequestGuard:
    """Accepts requests whose sender is known and allowed; one per process."""

    def __init__(
        self,
        namespace: str,
        anchors: Mapping[int, bytes],
        *,
        accept_unsigned: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = Names(namespace)
        self._anchors = {str(g): VerifyKey(key) for g, key in anchors.items()}
        self.accept_unsigned = accept_unsigned
        self._seen: dict[str, ReplayCache] = {}
        """By key, and so by login: one that floods the guard is refused without affecting
        others."""
        self._monotonic = monotonic
        self._started = monotonic()
        self._may: dict[str, tuple[str, ...]] = {}

    @property
    def strict(self) -> bool:
        """Whether requests must be signed."""
        return bool(self._anchors) and not self.accept_unsigned

    def trust(self, anchors: Mapping[int, bytes]) -> None:
        """Add public keys of the account from another source."""
        self._anchors |= {str(g): VerifyKey(key) for g, key in anchors.items()}

    def check(self, headers: Mapping[str, str], subject: str, body: bytes, now: float) -> Requester:
        """The sender of a request that may be obeyed, once; else raises `RequestRefused`."""
        sender = self.identify(headers, subject, body)
        if not sender.user:
            if self.strict:
                raise RequestRefused(Refusal.UNSIGNED)
            return sender
        if not any(covers(granted, subject) for granted in self._granted(sender.role)):
            raise RequestRefused(Refusal.FORBIDDEN)
        expires, moment = int(headers[wire.H_EXPIRES]), int(now * 1000)
        begun = now - (self._monotonic() - self._started)
        if not begun - CLOSE_SECONDS <= expires / 1000 - GOOD_SECONDS <= now + GOOD_SECONDS:
            raise RequestRefused(Refusal.EXPIRED)  # it could be held back and sent later
        seen = self._seen.setdefault(headers[wire.H_KEY], ReplayCache(REMEMBERED))
        if refusal := seen.enter(_raw(headers[wire.H_SIGNATURE]), expires, moment):
            raise RequestRefused(refusal)
        return sender

    def identify(self, headers: Mapping[str, str], subject: str, body: bytes) -> Requester:
        """Who signed this, at any time; empty if unsigned or not verifiable."""
        if not self._anchors or wire.H_CERTIFICATES not in headers:
            return Requester()
        user, role, key, expires, nonce, signature = (
            headers.get(name, "")
            for name in (
                wire.H_USER,
                wire.H_ROLE,
                wire.H_KEY,
                wire.H_EXPIRES,
                wire.H_NONCE,
                wire.H_SIGNATURE,
            )
        )
        self._check_login(user, role, key, headers[wire.H_CERTIFICATES])
        signed = _signed(self._names.namespace, subject, key, expires, nonce, body)
        try:
            VerifyKey(bytes.fromhex(key)).verify(signed, _raw(signature))
        except (BadSignatureError, ValueError):
            raise RequestRefused(Refusal.TAMPERED) from None
        if not _EXPIRES.fullmatch(expires):
            raise RequestRefused(Refusal.TAMPERED)
        return Requester(user, role)

    def _check_login(self, user: str, role: str, key: str, certificates: str) -> None:
        statement = certified(self._names.namespace, user, role, key)
        for one in certificates.split(" ")[:4]:
            generation, _, text = one.partition(".")
            anchor = self._anchors.get(generation)
            if anchor is None:
                continue
            try:
                anchor.verify(statement, _raw(text))
                return
            except (BadSignatureError, ValueError):
                continue
        raise RequestRefused(Refusal.FOREIGN)

    def _granted(self, role: str) -> tuple[str, ...]:
        if role not in self._may:
            grant = ROLES.get(role)
            self._may[role] = tuple(grant(self._names).publish) if grant else ()
        return self._may[role]


def _signed(namespace: str, subject: str, key: str, expires: str, nonce: str, body: bytes) -> bytes:
    digest = hashlib.sha256(body).digest()
    return framed(_REQUEST, namespace, subject, key, expires, nonce, digest)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _raw(text: str) -> bytes:
    """Decode a signature: compare bytes, because several texts decode to the same ones."""
    return base64.b64decode(text, validate=True)
