"""Commands from dispatchers to agents, signed so that no one else can issue them.

The signature covers the namespace, the kind (`exec`, `cancel`), the agent, the run, the epoch, the
expiry and the hash of the payload, framed unambiguously. All but the namespace travel as headers;
the body is the payload.

Guaranteed by `CommandVerifier.verify`: a command it returns was made by a holder of the account
seed, for this agent, of this kind, with exactly this payload, has not expired and was not returned
before by this verifier. Anything else raises `CommandRefused` with the reason.

Not guaranteed: that the dispatcher still owns the run. Such a command is genuine but stale, and the
agent's table of epochs rejects it. That table also covers replays after the agent restarts, because
the replay cache is in memory only.

The replay cache is bounded and stays sound when it overflows: it rejects what it forgot as expired.
`now` is the NATS server's time on both sides; the machines' clocks are never compared.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from holdfast import names
from holdfast.errors import HoldfastError
from holdfast.identity.framing import framed

EXEC: Final = "exec"
CANCEL: Final = "cancel"
REMEMBERED: Final = 65_536
"""Commands a verifier remembers: those of an agent's busiest hours, in about 15 MB."""

_PURPOSE: Final = b"holdfast.command.v2"
_SIGNATURE_BYTES: Final = 64  # of Ed25519


class Refusal(StrEnum):
    """Why a command, report or request was refused."""

    UNSIGNED = "unsigned"
    FOREIGN = "foreign"
    TAMPERED = "tampered"
    WRONG_AGENT = "wrong agent"
    FORBIDDEN = "forbidden"
    EXPIRED = "expired"
    REPLAYED = "replayed"


_SENTENCES: Final = {
    Refusal.UNSIGNED: "the command carries no signature for this namespace: only dispatchers may "
    "send commands; upgrade dispatchers of earlier versions before their agents",
    Refusal.FOREIGN: "the command is signed with a key that this agent does not know: it comes "
    "from another account, or the agent's credentials are older than the dispatchers' generation",
    Refusal.TAMPERED: "the command differs from what was signed: it was changed in transit, or was "
    "signed for something else",
    Refusal.WRONG_AGENT: "the command was signed for another agent",
    Refusal.EXPIRED: "the command has expired",
    Refusal.REPLAYED: "the command was received before",
}


TOLD: Final = frozenset({Refusal.UNSIGNED, Refusal.FOREIGN, Refusal.TAMPERED, Refusal.EXPIRED})
"""Reasons that are sent back: those that a real dispatcher can cause. Only forgers cause the
others."""
MALFORMED: Final = "malformed"
JOURNAL: Final = "journal"
UNVERIFIED: Final = "unverified"
UNKNOWN: Final = "unknown"

_ANSWERS: Final = {
    **{str(reason): text for reason, text in _SENTENCES.items()},
    MALFORMED: "the agent cannot read the command: its version may be older than the dispatchers'",
    JOURNAL: "the agent cannot write its journal and executes nothing that it cannot record: check "
    "its disk",
    UNVERIFIED: "it answers, but its signature does not fit the dispatcher's seed: agent and "
    "dispatcher belong to different accounts, or to generations that are too far apart",
    UNKNOWN: "the agent refused the command for a reason that this version does not know",
}


def known_reason(word: str) -> str:
    """An agent's reason for refusing, if known; any other text from an agent is not repeated."""
    return word if word in _ANSWERS else UNKNOWN


def sentence(word: str) -> str:
    """What a reason means, for people."""
    return _ANSWERS.get(word, _ANSWERS[UNKNOWN])


class CommandRefused(HoldfastError):
    """A command that must not be executed, and why."""

    def __init__(self, reason: Refusal) -> None:
        super().__init__(_SENTENCES[reason])
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Command:
    """A verified command."""

    kind: str
    agent: str
    run: str
    epoch: int
    expires: float
    """By the NATS server's clock, in seconds since 1970."""
    payload: bytes


class CommandSigner:
    """Signs commands: `CommandSigner(seed.signing_key(generation), namespace)`."""

    def __init__(self, key: SigningKey, namespace: str = names.DEFAULT_NAMESPACE) -> None:
        self._key = key
        self._namespace = namespace
        self._id = key_id(bytes(key.verify_key))

    def sign(
        self, *, kind: str, agent: str, run: str, epoch: int, expires: float, payload: bytes
    ) -> dict[str, str]:
        """The headers that make a payload a command. Deterministic."""
        milliseconds = str(int(expires * 1000))
        signed = _signed(self._namespace, kind, agent, run, str(epoch), milliseconds, payload)
        signature = self._key.sign(signed).signature
        return {
            names.H_COMMAND: kind,
            names.H_AGENT: agent,
            names.H_RUN: run,
            names.H_EPOCH: str(epoch),
            names.H_EXPIRES: milliseconds,
            names.H_SIGNATURE_2: f"{self._id}.{base64.b64encode(signature).decode()}",
        }


class CommandVerifier:
    """Verifies commands for one agent against the dispatchers' public keys.

    One per process: it remembers what it has seen.
    """

    def __init__(
        self,
        agent: str,
        verify_keys: Iterable[bytes],
        namespace: str = names.DEFAULT_NAMESPACE,
        *,
        remembered: int = REMEMBERED,
    ) -> None:
        self._agent = agent
        self._namespace = namespace
        self._keys = {key_id(key): VerifyKey(key) for key in verify_keys}
        self._seen = ReplayCache(remembered)

    def verify(
        self, headers: Mapping[str, str], payload: bytes, *, kind: str, now: float
    ) -> Command:
        """Verify a command of this kind; each command passes once."""
        key, signature = self._key(headers.get(names.H_SIGNATURE_2, ""))
        agent, run = headers.get(names.H_AGENT, ""), headers.get(names.H_RUN, "")
        epoch_text, expiry = headers.get(names.H_EPOCH, ""), headers.get(names.H_EXPIRES, "")
        try:
            signed = _signed(self._namespace, kind, agent, run, epoch_text, expiry, payload)
            key.verify(signed, signature)
            epoch, expires = int(epoch_text), int(expiry)
        except (BadSignatureError, ValueError, UnicodeError):
            raise CommandRefused(Refusal.TAMPERED) from None
        if agent != self._agent:
            raise CommandRefused(Refusal.WRONG_AGENT)
        if refusal := self._seen.enter(signature, expires, int(now * 1000)):
            raise CommandRefused(refusal)
        return Command(kind, agent, run, epoch, expires / 1000, payload)

    def _key(self, header: str) -> tuple[VerifyKey, bytes]:
        """The key a signature names, and the signature."""
        given, _, text = header.partition(".")
        if not given:
            raise CommandRefused(Refusal.UNSIGNED)
        key = self._keys.get(given)
        if key is None:
            raise CommandRefused(Refusal.FOREIGN)
        try:
            signature = base64.b64decode(text, validate=True)
        except ValueError:
            signature = b""
        if len(signature) != _SIGNATURE_BYTES:
            raise CommandRefused(Refusal.TAMPERED)
        return key, signature


class ReplayCache:
    """Remembers at most `limit` unexpired ids and never accepts one twice.

    When full it drops the id that expires first, and from then on rejects everything that expires
    no later: a replay of a dropped id counts as expired, not as new.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: set[bytes] = set()
        self._by_expiry: list[tuple[int, bytes]] = []
        self._floor = 0

    def __len__(self) -> int:
        return len(self._seen)

    def enter(self, id: bytes, expires: int, now: int) -> Refusal | None:
        """Remember an id; returns why not if it is known or expired."""
        if expires <= max(now, self._floor):
            return Refusal.EXPIRED
        if id in self._seen:
            return Refusal.REPLAYED
        self._seen.add(id)
        heapq.heappush(self._by_expiry, (expires, id))
        while self._by_expiry[0][0] <= now or len(self._seen) > self._limit:
            gone, oldest = heapq.heappop(self._by_expiry)
            self._seen.discard(oldest)
            self._floor = max(self._floor, gone)
        return None


def key_id(verify_key: bytes) -> str:
    """A short id of a public key; signatures name their key by it."""
    return hashlib.blake2b(verify_key, digest_size=8, person=b"holdfast-key").hexdigest()


def _signed(
    namespace: str, kind: str, agent: str, run: str, epoch: str, expires: str, payload: bytes
) -> bytes:
    digest = hashlib.sha256(payload).digest()
    return framed(_PURPOSE, namespace, kind, agent, run, epoch, expires, digest)
