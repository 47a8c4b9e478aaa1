"""What a taskiq process exposes: a file while it is ready, and a port for health and metrics.

The port answers as that of every Holdfast role does (`holdfast.health`). `taskiq worker` runs
several processes with one configuration: each takes the next free port, from the given one up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Final

from holdfast.errors import ConfigError
from holdfast.health import Health, HealthServer, ReadyFile
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.taskiq")

LOOK_SECONDS: Final = 0.25
"""Probes look every few seconds, so a state this old is fresh enough."""
PORTS: Final = 32
"""How many ports are tried: more than the workers that one `taskiq worker` runs."""


class Monitor:
    """Reports whether one process works, from `start` to `stop`."""

    def __init__(
        self, ready_file: str, port: int, telemetry: Telemetry, look: Callable[[], list[str]]
    ) -> None:
        """`look` returns what keeps the process from being ready, and updates gauges."""
        self._ready = ReadyFile(ready_file)
        self._port = port
        self._telemetry = telemetry
        self._look = look
        self._server = AsyncExitStack()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve, and keep the file up to date."""
        self._ready.set(False)
        if self._port:
            await self._serve()
        self._task = asyncio.create_task(self._watch(), name="holdfast-taskiq-monitor")

    async def _serve(self) -> None:
        for port in range(self._port, self._port + PORTS):
            try:
                await self._server.enter_async_context(HealthServer("0.0.0.0", port, self.health))
            except ConfigError as error:
                log.debug("%s", error)
            else:
                log.info("health and metrics on port %d", port)
                return
        raise ConfigError(
            f"none of the health ports {self._port} to {self._port + PORTS - 1} is free: choose "
            "another health_port, or 0 for none"
        )

    def health(self) -> Health:
        """What the port answers."""
        problems = self._look()
        return Health(not problems, problems, self._telemetry.render)

    async def _watch(self) -> None:
        while True:
            self._ready.set(not self._look())
            await asyncio.sleep(LOOK_SECONDS)

    async def stop(self) -> None:
        """Stop being ready."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._ready.set(False)
        await self._server.aclose()
