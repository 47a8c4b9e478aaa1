"""Joining: how a host that has only a token becomes an agent with its own login.

A token contains claims (which ids, until when, how many hosts) signed by the account, a key of its
own, and the login `join`, which may send this one request and nothing else. The host makes its own
login and a key to receive secrets with; it signs the request with the token's key and with its
login. The answer has the agent's keys, sealed to the host's key and signed by the account.

Guaranteed by `verify`: the account made the token for this namespace, the token's holder signed
this request within the last minute, the id fits the token, and the sender owns the login it asks
for. The token's private key and the host's private keys are never sent, so a recorded request is
useless: repeating it only returns the same answer, which only that host can open.

Not here: counting uses, revoking, and deciding (`dispatcher.joins`, `Issuer`).
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import nkeys
from nacl.exceptions import BadSignatureError, CryptoError
from nacl.public import PrivateKey, PublicKey, SealedBox
from nacl.signing import SigningKey, VerifyKey

from holdfast.errors import ConfigError, HoldfastError, InvalidInput, Unreadable
from holdfast.identity.credentials import AgentCredentials, AgentKeys, public_nkey
from holdfast.identity.framing import framed
from holdfast.identity.seed import AccountSeed
from holdfast.model.codec import Codec, Instant, Seconds
from holdfast.model.join import ASK, CLAIMS, SIGNED, Ask, SignedAsk, TokenClaims
from holdfast.names import check_name

GOOD_SECONDS: Final = 60.0
"""How long a request is valid: tolerates clocks that differ by seconds."""
PREFIX: Final = "hfj1."

_NKEY: Final = re.compile(r"U[A-Z2-7]{55}")
_CLAIMS: Final = b"holdfast.join.token.v1"
_ASK: Final = b"holdfast.join.ask.v1"
_ANSWER: Final = b"holdfast.join.answer.v1"


class JoinRefused(HoldfastError):
    """A request to join that must not be granted, and why."""


class WrongTime(JoinRefused):
    """A request from another time: a recorded one, or from a host whose clock is wrong."""


class JoinToken(msgspec.Struct, frozen=True):
    """Everything a host needs to ask."""

    claims: str
    generation: int
    certificate: bytes
    secret: bytes
    """The private half of the token's key."""
    login: str
    """The seed of the login `join`."""
    anchors: dict[int, bytes]
    """The account's public keys, which verify the answer."""
    url: str = ""
    """Where the servers are."""
    ca: str = ""
    """The authorities that signed the servers' certificates, as PEM; empty if the host trusts them
    anyway."""

    def __repr__(self) -> str:
        return "Token(***)"

    @property
    def allows(self) -> TokenClaims:
        return CLAIMS.decode(self.claims.encode())

    def text(self) -> str:
        """The token as it is handed out."""
        raw = msgspec.json.encode(self)
        return PREFIX + base64.urlsafe_b64encode(raw).decode().rstrip("=")

    @classmethod
    def read(cls, text: str) -> JoinToken:
        """The token in a text."""
        body = text.strip().removeprefix(PREFIX)
        try:
            raw = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
            found = Codec[JoinToken](JoinToken, "the token", strict=False).decode(raw)
            public_nkey(found.login)
            CLAIMS.decode(found.claims.encode())
        except (binascii.Error, ValueError, Unreadable, ConfigError):
            raise InvalidInput(
                "this is not a token of 'holdfast auth token': copy all of it, from hfj1 to the end"
            ) from None
        return found


class _Sealed(msgspec.Struct, frozen=True):
    agent: str
    nkey: str
    box: bytes
    signatures: dict[int, bytes]


class _Given(AgentKeys, frozen=True, kw_only=True):
    """What is sealed to a host: its keys, and how long its login lasts."""

    ends: Instant = 0.0
    lasts: Seconds = 0.0


_GIVEN: Final = Codec[_Given](_Given, "the keys of an agent", strict=False)
_SEALED: Final = Codec[_Sealed](_Sealed, "the answer", strict=False)


# ---- the account


def make_token(
    seed: AccountSeed,
    namespace: str,
    pattern: str,
    *,
    expires: float,
    uses: int,
    accept: bool,
    lasts: float = 0.0,
    login: str,
    generations: Iterable[int],
    url: str = "",
    ca: str = "",
) -> JoinToken:
    """A new token; its id is in its claims."""
    key = SigningKey.generate()
    claims = TokenClaims(
        secrets.token_hex(8),
        namespace,
        pattern,
        expires,
        bytes(key.verify_key),
        uses,
        accept,
        lasts,
    )
    text = CLAIMS.encode(claims).decode()
    known = list(generations)
    return JoinToken(
        text,
        known[-1],
        bytes(seed.signing_key(known[-1]).sign(framed(_CLAIMS, text)).signature),
        bytes(key),
        login,
        {g: seed.verify_key(g) for g in known},
        url,
        ca,
    )


def verify(
    body: bytes, keys: Mapping[int, bytes], namespace: str, now: float | None
) -> tuple[Ask, TokenClaims]:
    """The request in these bytes, or `JoinRefused`; without `now`, its age is not checked.

    The caller decides about an expired token: a host that asked in time may keep asking.
    """
    try:
        signed = SIGNED.decode(body)
        ask = ASK.decode(signed.ask.encode())
        claims = CLAIMS.decode(ask.claims.encode())
        check_name(ask.agent, "agent id")
    except (Unreadable, HoldfastError) as error:
        raise JoinRefused(str(error)) from None
    key = keys.get(ask.generation)
    if key is None or claims.namespace != namespace:
        raise JoinRefused(
            "the token belongs to another account or namespace, or its keys are out of use"
        )
    message = framed(_ASK, namespace, signed.ask)
    try:
        VerifyKey(key).verify(framed(_CLAIMS, ask.claims), ask.certificate)
        VerifyKey(claims.key).verify(message, signed.by_token)
        verify_login(ask.nkey, message, signed.by_login)
    except (BadSignatureError, ValueError, TypeError, CryptoError):
        raise JoinRefused(
            "the token is forged, or the request differs from what was signed"
        ) from None
    if len(ask.box) != 32:
        raise JoinRefused("the request has no key to seal the answer to")
    if now is not None and abs(now - ask.at) > GOOD_SECONDS:
        raise WrongTime("the request is too old, or the host's clock is wrong by a minute")
    if not claims.allows(ask.agent):
        raise JoinRefused(f"the token is for {claims.pattern!r}, not for {ask.agent!r}")
    return ask, claims


def verify_login(nkey: str, message: bytes, signature: bytes) -> None:
    """Check a signature against a NATS user key; raises `ValueError` or `BadSignatureError`."""
    if not _NKEY.fullmatch(nkey):  # it goes into the server's configuration
        raise ValueError("not a user key")
    raw = base64.b32decode(nkey)
    if int.from_bytes(raw[-2:], "little") != nkeys.crc16(raw[:-2]):
        raise ValueError("not a user key")
    VerifyKey(raw[1:33]).verify(message, signature)


def sealed_keys(
    seed: AccountSeed,
    ask: Ask,
    generations: Iterable[int],
    namespace: str,
    *,
    ends: float = 0.0,
    lasts: float = 0.0,
) -> bytes:
    """The agent's keys and the life of its login, sealed to the host that asked."""
    known = list(generations)
    keys = seed.agent_keys(ask.agent, known)
    given = _Given(
        verify=keys.verify, sealing=keys.sealing, report=keys.report, ends=ends, lasts=lasts
    )
    box = SealedBox(PublicKey(ask.box)).encrypt(_GIVEN.encode(given))
    message = framed(_ANSWER, namespace, ask.agent, ask.nkey, box)
    signatures = {g: bytes(seed.signing_key(g).sign(message).signature) for g in known}
    return _SEALED.encode(_Sealed(ask.agent, ask.nkey, box, signatures))


# ---- the host


class Joiner:
    """A host that asks with a token. Its private keys stay here."""

    def __init__(
        self, token: JoinToken, agent: str, namespace: str, login: str, box: bytes
    ) -> None:
        self._token = token
        self._namespace = namespace
        self.agent = agent
        self._login = login
        self._box = PrivateKey(box)

    @property
    def nkey(self) -> str:
        """The public half of the login that it asks for."""
        return public_nkey(self._login)

    def ask(self, now: float, host: str = "", version: str = "") -> bytes:
        """The request, signed with the current time."""
        token = self._token
        ask = Ask(
            token.claims,
            token.generation,
            token.certificate,
            self.agent,
            self.nkey,
            bytes(self._box.public_key),
            now,
            host,
            version,
        )
        text = ASK.encode(ask).decode()
        message = framed(_ASK, self._namespace, text)
        by_token = bytes(SigningKey(token.secret).sign(message).signature)
        by_login = nkeys.from_seed(bytearray(self._login, "ascii")).sign(message)
        return SIGNED.encode(SignedAsk(text, by_token, bytes(by_login)))

    def credentials(self, answer: bytes) -> AgentCredentials:
        """Open the answer; raises `JoinRefused` unless the account made it for this host."""
        try:
            found = _SEALED.decode(answer)
            message = framed(_ANSWER, self._namespace, self.agent, self.nkey, found.box)
            generation = max(found.signatures.keys() & self._token.anchors.keys())
            VerifyKey(self._token.anchors[generation]).verify(message, found.signatures[generation])
            given = _GIVEN.decode(SealedBox(self._box).decrypt(found.box))
            keys = AgentKeys(verify=given.verify, sealing=given.sealing, report=given.report)
            made = AgentCredentials.create(
                self.agent, keys, self._login, ends=given.ends, lasts=given.lasts
            )
            made.check()
        except (BadSignatureError, CryptoError, ValueError, TypeError, Unreadable, ConfigError):
            raise JoinRefused("the answer was not made by this account for this host") from None
        return made
