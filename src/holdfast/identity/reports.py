"""Reports: an agent's acks and returns, authenticated so that no other agent can forge them.

The subject names the agent, and permissions keep others from publishing there. But a requester can
direct a server response to any subject, so the subject alone proves nothing. The agent adds a MAC
over kind, agent, run and payload, with a key that only it and the dispatchers can derive (BLAKE2b,
a few microseconds).

Not guaranteed: that a report is new. A repeated return is identical, and storing it under the
agent's key is idempotent.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from holdfast import names
from holdfast.identity.commands import CommandRefused, Refusal
from holdfast.identity.credentials import AgentCredentials
from holdfast.identity.framing import framed
from holdfast.identity.seed import FIRST_GENERATION

CACHED: Final = 131_072
"""Agents' keys that a verifier keeps, about 30 MB: with fewer than the fleet has agents, each run
would derive all of them twice."""

KeyOf = Callable[[str, int], bytes]
"""An agent's report key of a generation: `AccountSeed.report_key`."""


class ReportSigner:
    """Signs one agent's reports with its newest key."""

    def __init__(self, credentials: AgentCredentials) -> None:
        self._agent = credentials.agent
        self._generation = max(credentials.keys.report)
        self._key = credentials.keys.report[self._generation]

    def sign(self, *, kind: str, run: str, payload: bytes) -> dict[str, str]:
        """The headers that make a payload this agent's report on a run."""
        code = _code(self._key, kind, self._agent, run, payload)
        return {names.H_SIGNATURE: f"{self._generation}.{code}"}


class ReportVerifier:
    """Verifies reports for dispatchers: `ReportVerifier(seed.report_key, generations)`."""

    def __init__(
        self,
        key_of: KeyOf,
        generations: Sequence[int] = (FIRST_GENERATION,),
        *,
        cached: int = CACHED,
    ) -> None:
        self._key_of = key_of
        self._generations = {str(g): g for g in generations}
        self._keys: dict[tuple[str, int], bytes] = {}
        self._cached = cached

    def verify(
        self, headers: Mapping[str, str], payload: bytes, *, kind: str, agent: str, run: str
    ) -> None:
        """Raise `CommandRefused` unless the agent named by the subject made this report."""
        text, _, code = headers.get(names.H_SIGNATURE, "").partition(".")
        if not text:
            raise CommandRefused(Refusal.UNSIGNED)
        generation = self._generations.get(text)
        if generation is None:
            raise CommandRefused(Refusal.FOREIGN)
        expected = _code(self._key(agent, generation), kind, agent, run, payload)
        if not hmac.compare_digest(expected.encode(), code.encode()):
            raise CommandRefused(Refusal.TAMPERED)

    def _key(self, agent: str, generation: int) -> bytes:
        key = self._keys.get((agent, generation))
        if key is None:
            if len(self._keys) >= self._cached:
                self._keys.clear()
            key = self._keys[agent, generation] = self._key_of(agent, generation)
        return key


def _code(key: bytes, kind: str, agent: str, run: str, payload: bytes) -> str:
    message = framed(b"holdfast.report.v1", kind, agent, run, payload)
    return hashlib.blake2b(message, key=key, digest_size=32, person=b"holdfast").hexdigest()
