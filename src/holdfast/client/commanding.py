"""Sends commands: signed if there is a seed, stamped with run, epoch and expiry.

Each command has a reply subject on which the server reports at once if nobody listens on the
agent's subject. Agents never answer there: they acknowledge on subjects that name them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from holdfast.broker import Broker
from holdfast.broker.wire import Headers, parse_status
from holdfast.identity.commands import CommandSigner
from holdfast.identity.reports import ReportVerifier
from holdfast.identity.seed import AccountSeed, generations_near
from holdfast.names import H_AGENT, H_COMMAND, H_EPOCH, H_EXPIRES, H_RUN

GOOD_SECONDS: Final = 30.0
"""Agents refuse a command that arrives later: it may be a replay, and it has been repeated
meanwhile."""

Nobody = Callable[[str], None]


class Sender:
    """Sends commands to agents."""

    def __init__(self, broker: Broker, seed: AccountSeed | None, generation: int = 1) -> None:
        self._broker = broker
        near = generations_near(generation)
        namespace = broker.names.namespace
        self._signer = CommandSigner(seed.signing_key(generation), namespace) if seed else None
        self.verifier = ReportVerifier(seed.report_key, near) if seed else None
        """Verifies agents' reports; None if nothing is signed."""
        self._inbox = ""
        self._listeners: dict[str, Nobody] = {}

    async def open(self) -> None:
        """Listen for agents whose subject has no subscriber."""
        self._inbox = self._broker.new_inbox()
        await self._broker.listen(f"{self._inbox}.*.*", self._on_answer)

    def _on_answer(self, subject: bytes, _: bytes, __: bytes, headers: bytes | None) -> None:
        if parse_status(headers)[0] == "503":
            run, agent = subject.decode().rsplit(".", 2)[1:]
            if listener := self._listeners.get(run):
                listener(agent)

    def listen(self, run: str, nobody: Nobody) -> None:
        """Call `nobody` when nobody listens on the subject of an agent of this run."""
        self._listeners[run] = nobody

    def forget(self, run: str) -> None:
        """Stop listening for this run."""
        self._listeners.pop(run, None)

    async def send(
        self,
        kind: str,
        run: str,
        epoch: int,
        payload: bytes,
        agents: Iterable[str],
        good_seconds: float = GOOD_SECONDS,
    ) -> None:
        """Send one command to each of these agents."""
        expires = self._broker.server_now() + good_seconds
        names = self._broker.names
        for agent in agents:
            headers = self._headers(kind, agent, run, epoch, expires, payload)
            reply = f"{self._inbox}.{run}.{agent}"
            await self._broker.publish(names.agent(agent, kind), payload, headers, reply)

    def _headers(
        self, kind: str, agent: str, run: str, epoch: int, expires: float, payload: bytes
    ) -> Headers:
        if self._signer:
            return self._signer.sign(
                kind=kind, agent=agent, run=run, epoch=epoch, expires=expires, payload=payload
            )
        return {
            H_COMMAND: kind,
            H_AGENT: agent,
            H_RUN: run,
            H_EPOCH: str(epoch),
            H_EXPIRES: str(int(expires * 1000)),
        }
