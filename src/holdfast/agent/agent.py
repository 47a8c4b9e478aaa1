"""An agent: a node on a host that takes commands addressed to it, and reports facts.

It has functions it may run (an allow-list), optionally credentials (then it obeys only commands
signed by the dispatchers of its account), and a folder for state that must survive a restart: the
runs it has seen, so that none is executed twice (`journal`), and returns, until the server has
stored them (`outbox`).

It depends on no dispatcher: it starts before them, outlives them, and recovers from any absence. It
may share a connection with others: `start` and `close` leave it open.

`Extension` lets other parts join (settings), with functions, a start and an end, and numbers for
the agent's record.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from holdfast.agent.builtins import builtins
from holdfast.agent.commands import Commands
from holdfast.agent.execution import Executor
from holdfast.agent.facts import HostFacts
from holdfast.agent.functions import Function, Functions
from holdfast.agent.journal import Journal
from holdfast.agent.outbox import Outbox
from holdfast.agent.presence import Presence
from holdfast.app import Holdfast
from holdfast.broker import Broker, Received
from holdfast.config import AgentConfig, ConnectionConfig
from holdfast.errors import BrokerError, ConfigError
from holdfast.identity import AgentCredentials, CommandVerifier, ReportSigner, RequestRefused
from holdfast.identity.sparse import Sparse
from holdfast.model.settings import Settings
from holdfast.names import check_name
from holdfast.ownership.membership import Pong
from holdfast.role import Role
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.agent")

DRAIN_SECONDS: Final = 2.0
"""How long returns may take to be sent on shutdown; the journal keeps the rest."""


class Extension(Protocol):
    """A part of an agent beside its functions."""

    def functions(self) -> Iterable[Function]:
        """Functions that it adds."""
        ...

    async def start(self, agent: Agent) -> None:
        """Called when the agent is connected and has an id."""
        ...

    async def stop(self) -> None:
        """Called when the agent ends."""
        ...

    def describe(self) -> dict[str, float]:
        """Numbers for the agent's record."""
        ...

    def settings(self) -> Settings:
        """The value of `ctx.settings` for jobs on the agent."""
        ...

    async def answer(self, verb: str, message: Received) -> None:
        """Answer a request to this node; ignore verbs meant for others."""
        ...


class Agent(Role):
    """One agent."""

    role = "agent"

    def __init__(
        self,
        config: AgentConfig,
        *,
        connection: ConnectionConfig | None = None,
        broker: Broker | None = None,
        credentials: AgentCredentials | None = None,
        app: Holdfast | None = None,
        functions: Iterable[Function] = (),
        extensions: Sequence[Extension] = (),
        telemetry: Telemetry | None = None,
    ) -> None:
        self.id = _id(config, credentials)
        self.config = config
        self.credentials = credentials
        self.folder = Path(config.data_dir or Path(".holdfast") / "agents" / self.id)
        broker = broker or Broker(connection or ConnectionConfig(), name=f"agent {self.id}")
        super().__init__(broker, telemetry or Telemetry(), config)
        self._extensions = extensions
        self._refusals = Sparse(log, self.broker.clock)
        self._signer = ReportSigner(credentials) if credentials else None
        self.facts = HostFacts(self.id, self.folder, config.facts_file)
        self.functions = self._offered(app, functions)
        self._journal = Journal(self.folder)
        self._outbox = Outbox(self.broker, self.id, self._signer, self._journal.sent)
        self._executor = Executor(
            self.functions,
            lambda found: self._commands.finish(found),
            now=self.broker.server_now,
            monotonic=self.broker.clock.monotonic,
            queue_size=config.queue_size,
            concurrency=config.concurrency,
        )
        self._commands = Commands(
            self.broker,
            self.id,
            self._journal,
            self._executor,
            self._outbox,
            self.telemetry,
            verifier=_verifier(credentials, self.broker),
            signer=self._signer,
        )
        self._presence = Presence(
            self.broker,
            self.id,
            config,
            self.facts,
            lambda: self.functions.names,
            lambda: self._executor.running,
            self._numbers,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._subscriptions: list[Any] = []
        self._begun: list[Extension] = []

    def _offered(self, app: Holdfast | None, functions: Iterable[Function]) -> Functions:
        offered = Functions()
        own = builtins(self.facts, self._facts_changed, commands=self.config.commands == "yes")
        added = [f for extension in self._extensions for f in extension.functions()]
        for function in (*own, *functions, *added):
            offered.add(function)
        if app is not None:
            offered.add_jobs(app, next((e.settings for e in self._extensions), None))
        return offered

    # ---- life

    async def prepare(self, ending: contextlib.AsyncExitStack) -> None:
        """Register `close`, which ends whatever was started."""
        ending.push_async_callback(self.close)

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Take commands. Starting is a task, because it waits for a first dispatcher."""
        return {"agent": self._take_commands()}

    async def _take_commands(self) -> None:
        await self.start()
        await asyncio.Event().wait()

    async def start(self) -> None:
        """Take commands from now on. The connection must be open."""
        await self._check_alone()
        self._journal.open()
        self._commands.resume()  # before any new command can arrive
        self.facts.open()
        if self.credentials is None:
            log.warning(
                "agent %s has no credentials: it obeys whoever can reach this server. For anything "
                "but development see 'holdfast auth agent %s'",
                self.id,
                self.id,
            )
        names = self.broker.names
        commands = names.agent(self.id, "*")
        self._subscriptions = [
            await self.broker.listen(commands, self._commands.on_message),
            await self.broker.subscribe(names.node(self.id, "*"), self._on_node),
        ]
        for extension in self._extensions:  # they need no dispatcher; presence waits for one
            await extension.start(self)
            self._begun.append(extension)
        await self._presence.start()
        self._tasks.append(asyncio.create_task(self._presence.run(), name="holdfast-presence"))
        log.info("agent %s takes commands (%s)", self.id, ", ".join(self.functions.names))

    async def _check_alone(self) -> None:
        """Refuse to start beside a running agent with the same id: both would execute commands."""
        try:
            answer = await self.broker.request(self.broker.names.node(self.id, "ping"), timeout=1.0)
        except BrokerError:
            return
        if not answer.status:
            raise ConfigError(
                f"an agent {self.id!r} is running already: give this one another --id, or stop "
                "the other"
            )

    async def close(self) -> None:
        """Take no more commands, finish or report what runs, and record the end."""
        self._commands.closed = True
        for subscription in self._subscriptions:
            await self.broker.unsubscribe(subscription)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for extension in reversed(self._begun):
            await extension.stop()
        await self._executor.close(self.config.grace_seconds)
        await self._outbox.drain(DRAIN_SECONDS)
        await self._say_goodbye()
        self._journal.close()

    async def _say_goodbye(self) -> None:
        if self._presence.confirmed < 0:
            return  # never started: the record may be another agent's
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._presence.beat("TERMINATED_GRACEFULLY")
        except (BrokerError, TimeoutError):
            log.debug("the end of this agent was not written down: its record will expire")

    # ---- being a node

    async def _on_node(self, message: Received) -> None:
        verb = message.subject.rpartition(".")[2]
        if verb == "drain":
            try:
                sender = self.broker.sender(message, self.broker.names.node(self.id, "drain"))
            except RequestRefused as refused:
                self._refusals.warn(refused.reason, "not drained: %s", refused)
                return
            log.info("asked to drain by %s", sender.user or "an operator")
            self.stop()
        for extension in self._extensions:
            await extension.answer(verb, message)
        if message.reply and verb in ("ping", "drain"):
            body = b"draining" if verb == "drain" else msgspec.json.encode(Pong(0, "RUNNING"))
            with contextlib.suppress(BrokerError):
                await self.broker.publish(message.reply, body)

    async def _facts_changed(self) -> None:
        await self._presence.publish_facts()

    def _numbers(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for extension in self._extensions:
            found |= extension.describe()
        return found

    def trouble(self) -> list[str]:
        """Whether others see it as online."""
        silent = self.broker.clock.monotonic() - self._presence.confirmed
        if self.broker.connected and silent > self.config.timeout_seconds:
            return ["its heartbeat is not confirmed"]
        return []

    def describe(self) -> dict[str, Any]:
        """Its id, and the number of running commands."""
        return {"agent": self.id, "running": self._executor.running}


def _id(config: AgentConfig, credentials: AgentCredentials | None) -> str:
    if credentials is not None:
        if config.id and config.id != credentials.agent:
            raise ConfigError(
                f"the credentials are those of agent {credentials.agent!r}, not of {config.id!r}"
            )
        return credentials.agent
    return check_name(config.id or socket.gethostname().replace(".", "-"), "agent id")


def _verifier(credentials: AgentCredentials | None, broker: Broker) -> CommandVerifier | None:
    if credentials is None:
        return None
    broker.guard.trust(credentials.keys.verify)
    return CommandVerifier(
        credentials.agent,
        credentials.keys.verify.values(),
        broker.names.namespace,
        accept_earlier=broker.config.accept_unsigned,
    )
