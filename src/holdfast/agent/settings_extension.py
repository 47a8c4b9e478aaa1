"""Settings as a part of an agent: `settings.get`, `settings.items`, and following the server.

The functions' return values are stored with the run, so secrets in them are always masked. An agent
without credentials has no keys to verify a publisher with: it takes no settings and logs that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.agent.functions import Function
from holdfast.agent.settings import ASKED, AgentSettings
from holdfast.broker import Broker, Received
from holdfast.errors import BrokerError, SettingsError
from holdfast.model.settings import Settings

if TYPE_CHECKING:
    from holdfast.agent.agent import Agent

log = logging.getLogger("holdfast.agent.settings")

NO_KEYS: Final = "this agent has no credentials, and so takes no settings"


class SettingsExtension:
    """The settings of the agent it belongs to."""

    def __init__(self) -> None:
        self._own: AgentSettings | None = None
        self._broker: Broker | None = None
        self._run: asyncio.Task[None] | None = None

    def functions(self) -> Iterable[Function]:
        """The functions that operators may call."""

        def settings_get(path: str) -> Any:
            """A value of this agent's settings by its dotted path; secrets are masked."""
            return self._needed().shown(path)

        def settings_items() -> Any:
            """All settings of this agent; secrets are masked."""
            return self._needed().shown()

        return [
            Function("settings.get", settings_get, mutating=False, quick=True),
            Function("settings.items", settings_items, mutating=False, quick=True),
        ]

    async def start(self, agent: Agent) -> None:
        """Load the settings in force, and follow the server."""
        self._broker = agent.broker
        if agent.credentials is None:
            log.info("agent %s has no credentials, and so takes no settings", agent.id)
            return
        self._own = AgentSettings(
            agent.broker,
            agent.id,
            agent.credentials.keys,
            agent.facts.items,
            agent.folder,
            telemetry=agent.telemetry,
            asked=False,
        )
        self._own.load()
        self._run = asyncio.create_task(self._own.run(), name="holdfast-settings")

    async def stop(self) -> None:
        """Stop following the server."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)

    def describe(self) -> dict[str, float]:
        """The revision in force and the number of refusals."""
        if self._own is None:
            return {}
        report = self._own.report
        return {
            "settings_revision": float(report.number),
            "settings_refused": float(self._own.refused),
        }

    def settings(self) -> Settings:
        """The settings in force, for jobs that run on the agent."""
        return self._needed().settings

    async def answer(self, verb: str, message: Received) -> None:
        """Answer operators' questions."""
        if verb == ASKED and self._own is not None:
            await self._own.answer(message)
        elif verb == ASKED and message.reply and self._broker is not None:
            with contextlib.suppress(BrokerError):
                await self._broker.publish(message.reply, msgspec.json.encode({"error": NO_KEYS}))

    def _needed(self) -> AgentSettings:
        if self._own is None:
            raise SettingsError(NO_KEYS)
        return self._own
