"""An agent: a node on a host that takes commands addressed to it, and reports facts.

It has functions it may run (an allow-list), optionally credentials (then it obeys only commands
signed by the dispatchers of its account), and a folder for state that must survive a restart: the
runs it has seen, so that none is executed twice (`journal`), and returns, until the server has
stored them (`outbox`).

It depends on no dispatcher: it starts before them, outlives them, and recovers when they come back.
Nor does it need a server to start: it loads what is on its disk (settings, schedules, unsent
returns), runs its schedules, and connects when it can. Only a refused login ends it. It may share a
connection with others: `start` and `close` leave the connection open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.agent.builtins import builtins
from holdfast.agent.commands import Commands
from holdfast.agent.execution import CommandExecutor
from holdfast.agent.facts import HostFacts
from holdfast.agent.functions import Function, Functions
from holdfast.agent.journal import Journal
from holdfast.agent.outbox import ReturnOutbox
from holdfast.agent.presence import Presence
from holdfast.agent.renewing import Renewing
from holdfast.agent.schedules import Schedules
from holdfast.agent.settings import AgentSettings
from holdfast.app import Holdfast
from holdfast.broker import Broker, Received
from holdfast.config import AgentConfig, ConnectionConfig
from holdfast.errors import BrokerError, ConfigError, NotConnected, SettingsError, TryAgain
from holdfast.identity.commands import CommandVerifier
from holdfast.identity.credentials import AgentCredentials
from holdfast.identity.reports import ReportSigner
from holdfast.identity.requests import RequestRefused
from holdfast.model.fleet import REHEARSE
from holdfast.names import check_name
from holdfast.ownership.membership import Pong
from holdfast.rates import Sparse
from holdfast.role import Role
from holdfast.settings.renderer import Renderer
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.agent")

PING_SECONDS: Final = 10
"""Between checks of the connection. An agent may notice a silent network later than others do:
commands and returns are repeated, and ten thousand agents share a server."""
CONNECT_SECONDS: Final = 5.0
"""Pause between two tries while no server answers at the start. The agent works from its disk
meanwhile, and thousands of hosts may be trying."""
DRAIN_SECONDS: Final = 2.0
"""How long returns may take to be sent on shutdown; the journal keeps the rest."""
TAKING: Final = "agent"
"""The task that takes commands."""
ASKED: Final = "settings"
"""The verb with which operators ask for an agent's settings. It shares the subscription of all
other questions, because a login may only answer what arrived on a subscription."""
NO_KEYS: Final = "this agent has no credentials, so it receives no settings"


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
        renderer: Renderer | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        """`renderer` is shared by the agents of a process; without one, each has its own."""
        self.id = _id(config, credentials)
        self.config = config
        self.credentials = credentials
        self.folder = state_folder(config, self.id)
        broker = broker or Broker(
            connection or ConnectionConfig(),
            name=f"agent {self.id}",
            options={"ping_interval": PING_SECONDS},
            spread=config.reconnect_seconds,
        )
        super().__init__(broker, telemetry or Telemetry(), config)
        self._refusals = Sparse(log, self.broker.clock)
        self._signer = ReportSigner(credentials) if credentials else None
        self.facts = HostFacts(self.id, self.folder, config.facts_file)
        self.settings = self._followed(renderer)
        self.functions = self._offered(app, functions)
        self._journal = Journal(self.folder)
        self._outbox = ReturnOutbox(self.broker, self.id, self._signer, self._journal.sent)
        self._executor = CommandExecutor(
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
            self._described,
            self.settings.facts_changed if self.settings else lambda: None,
        )
        self._renewing = self._renewed()
        self.schedules = Schedules(
            self.folder,
            self.broker.clock,
            self.broker.server_now,
            lambda: self.settings.schedules if self.settings else {},
            self._commands,
        )
        self._loaded = False
        self._forget: Callable[[], None] = lambda: None
        self._subscriptions: list[Any] = []

    def _offered(self, app: Holdfast | None, functions: Iterable[Function]) -> Functions:
        offered = Functions()
        own = builtins(
            self.facts,
            lambda: self._presence.publish_facts(),
            lambda path: self._needed().shown(path),
            commands=self.config.commands == "yes",
        )
        rehearse = Function(REHEARSE, offered.rehearse, mutating=False)
        for function in (*own, *functions, rehearse):
            offered.add(function)
        if app is not None:
            offered.add_jobs(app, lambda: self._needed().settings)
        return offered

    # ---- its settings

    def _followed(self, renderer: Renderer | None) -> AgentSettings | None:
        """Its settings; None without credentials, because they hold the keys that verify
        publishers."""
        if self.credentials is None:
            return None
        return AgentSettings(
            self.broker,
            self.id,
            self.credentials.keys,
            self.facts.items,
            self.folder,
            telemetry=self.telemetry,
            renderer=renderer,
            changed=lambda: self.schedules.wake.set(),
        )

    def _needed(self) -> AgentSettings:
        if self.settings is None:
            raise SettingsError(NO_KEYS)
        return self.settings

    # ---- life

    async def connect(self, ending: contextlib.AsyncExitStack) -> None:
        """Start with what is on the disk, and connect if a server answers."""
        ending.push_async_callback(self.broker.close)
        ending.push_async_callback(self.close)
        self._load()
        try:
            await self.broker.open()
        except NotConnected as error:
            if self.broker.refused:
                raise
            log.warning("%s. Working from local state until a server answers", error)

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Take commands. Starting is a task, because it waits for a server and a dispatcher."""
        return {TAKING: self._take_commands()}

    async def _take_commands(self) -> None:
        """Raises the error of any task that `start` started, so that a half-working agent is
        restarted."""
        await self._connected()
        await self.start()
        await asyncio.gather(*(task for name, task in self.running.items() if name != TAKING))

    async def _connected(self) -> None:
        """Connect, however long it takes; meanwhile, end a canary's settings when their time is
        over."""
        while not self.broker.connected:
            await self.broker.clock.sleep(random.uniform(0.5, 1.0) * CONNECT_SECONDS)
            if self.settings:
                await self.settings.end_trial()
            try:
                await self.broker.open()
            except (NotConnected, TryAgain) as error:
                if self.broker.refused:
                    raise
                log.debug("still not connected: %s", error)

    def _load(self) -> None:
        """Load what is on the disk, and run the schedules of the settings that are in force."""
        if self._loaded:
            return
        self._loaded = True
        self._journal.open()
        self._commands.resume()  # before any new command can arrive
        self.facts.open()
        if self.settings:
            self.settings.load()
        self._begin("schedules", self.schedules.run())

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self.running[name] = asyncio.create_task(work, name=f"holdfast-{name}")

    async def start(self) -> None:
        """Take commands from now on. The connection must be open."""
        await self._check_alone()
        self._load()
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
        self._forget = self.broker.on_reconnect(self._commands.send_again)
        if self.settings:  # these need no dispatcher; presence waits for one
            self._begin("settings", self.settings.run())
        await self._presence.start()
        self._begin("presence", self._presence.run())
        if self._renewing:
            self._begin("renewing", self._renewing.run())
        log.info("agent %s takes commands (%s)", self.id, ", ".join(self.functions.names))

    def _renewed(self) -> Renewing | None:
        """What renews the login, if it ends and is in a file."""
        login, file = self.credentials, self.broker.config.credentials_file
        if login is None or not login.ends or not file:
            return None
        return Renewing(self.broker, login, Path(file), self.folder)

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
        self._forget()
        self._forget = lambda: None  # an agent may be closed twice
        for subscription in self._subscriptions:
            await self.broker.unsubscribe(subscription)
        await self._end_tasks()
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
            log.debug("the end of this agent was not recorded: its record will expire")

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
        answers: dict[str, Callable[[], bytes]] = {
            "ping": lambda: msgspec.json.encode(Pong(0, "RUNNING")),
            "drain": lambda: b"draining",
            ASKED: lambda: self._asked(message.body.decode("utf-8", "replace")),
        }
        if message.reply and verb in answers:
            with contextlib.suppress(BrokerError):
                await self.broker.publish(message.reply, answers[verb]())

    def _asked(self, path: str) -> bytes:
        """Its settings below a path, for an operator."""
        try:
            found = self._needed()
            answer = {"values": found.shown(path), "revision": found.settings.revision}
        except SettingsError as error:
            answer = {"error": str(error)}
        return msgspec.json.encode(answer)

    def _described(self) -> dict[str, Any]:
        """What its record says about it."""
        return {
            "running": self._executor.running,
            "jobs": self.functions.names,
            "metrics": self.settings.numbers() if self.settings else {},
            "renewal": self._renewing.request if self._renewing else "",
        }

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
    return agent_id(config)


def agent_id(config: AgentConfig) -> str:
    """The id of an agent without credentials: the configured one, or the host's name."""
    return check_name(config.id or socket.gethostname().replace(".", "-"), "agent id")


def state_folder(config: AgentConfig, id: str) -> Path:
    """The folder for what must survive a restart."""
    return Path(config.data_dir or Path(".holdfast") / "agents" / id)


def _verifier(credentials: AgentCredentials | None, broker: Broker) -> CommandVerifier | None:
    if credentials is None:
        return None
    broker.guard.trust(credentials.keys.verify)
    keys = credentials.keys.verify
    return CommandVerifier(credentials.agent, keys.values(), broker.names.namespace)
