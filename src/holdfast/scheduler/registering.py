"""Registers the schedules that an app's code defines, and reports a refusal.

A refused set (a name that belongs to another app, an empty registration) changes nothing and keeps
no other schedule from firing. But the app's own schedules are then not in force, so its scheduler
is not ready, `holdfast doctor` shows the reason, and the scheduler retries regularly: an operator
may have removed the conflict. The reason is a key with a TTL, renewed by each refusal, so it
expires when the refused process ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from holdfast.app import Holdfast
from holdfast.broker import Bucket
from holdfast.client import Client
from holdfast.client.schedules import REFUSED, RefusedRegistration, Schedules
from holdfast.config import SchedulerConfig
from holdfast.errors import InvalidInput
from holdfast.names import refusal_key
from holdfast.retrying import repeating

log = logging.getLogger("holdfast.scheduler")

AGAIN_SECONDS: Final = 10.0
"""How often a refused registration is retried: the wait after an operator removed the conflict."""
KEPT_SECONDS: Final = 3 * AGAIN_SECONDS
"""A refusal not renewed for this long has expired: its process ended."""
GONE_SECONDS: Final = 1.0
"""The server's shortest TTL: removes a key by a write, where deleting is not permitted."""


class Registering:
    """The registration of one app; does nothing without an app."""

    def __init__(
        self,
        client: Client,
        app: Holdfast | None,
        config: SchedulerConfig,
        now: Callable[[], float],
    ) -> None:
        self._app = app
        self._release = config.release
        self._clock = client.broker.clock
        self._registry = Schedules(client, now=now)
        self._bucket = Bucket(client.broker, client.broker.names.schedules)
        self._refused = ""

    @property
    def problems(self) -> list[str]:
        """Why the app's schedules are not in force."""
        if not self._refused or self._app is None:
            return []
        return [f"the schedules of app {self._app.name} were not registered: {self._refused}"]

    async def register(self) -> None:
        """Register the app's whole set; a refusal is kept as a problem."""
        if self._app is None:
            return
        name, before = self._app.name, self._refused
        try:
            await self._registry.sync(name, self._app.schedules, release=self._release)
        except InvalidInput as error:
            self._refused = str(error)
            if self._refused != before:
                log.error("the schedules of app %s were not registered: %s", name, error)
            await self._write(KEPT_SECONDS)
            return
        if before:
            log.info("the schedules of app %s are registered now", name)
            await self._write(GONE_SECONDS)
        self._refused = ""

    async def _write(self, ttl: float) -> None:
        assert self._app is not None
        body = REFUSED.encode(RefusedRegistration(self._app.name, self._refused))
        await self._bucket.put(refusal_key(self._app.name), body, expected=None, ttl=ttl)

    async def run(self) -> None:
        """Retry regularly while refused."""
        await repeating(
            self._again, clock=self._clock, every=AGAIN_SECONDS, what="registering schedules"
        )

    async def _again(self) -> None:
        if self._refused:
            await self.register()
