"""Upkeep: a role's streams and buckets exist, and are created again when deleted.

Each is checked every few seconds, and all of them at once when a write or a read finds one missing.
The first process that notices creates it again, empty; the others see that it is a new one
(`created` differs) and call `on_made`, since what they had in it is gone.

What cannot be created is a problem, and the role is not ready; after `GIVE_UP_SECONDS` `run` ends
with `Unavailable`, so that the process exits and is restarted instead of looking healthy. A stream
that merely has no leader is not missing: the cluster elects one.

Optional streams (created on first use) are created again only once they were seen.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from holdfast import errors
from holdfast.broker.streams import LOOK_SECONDS, Config, Topology, bucket_config, stream_configs

log = logging.getLogger("holdfast.upkeep")

ROUND_SECONDS: Final = 5.0
"""How often each stream is checked: a handful of small requests per second for ten nodes."""
PACE_SECONDS: Final = 0.5
"""The shortest time between two rounds: during an election every write seems to miss its stream."""
GIVE_UP_SECONDS: Final = 60.0
"""As long as a pull loop tries to restore its consumer."""

OnMade = Callable[[str], None]


def _ignore(_: str) -> None:
    return None


class Upkeep:
    """Recreates what one role needs on the server, while `run` runs."""

    def __init__(
        self,
        topology: Topology,
        *,
        core: bool = True,
        buckets: Iterable[str] = (),
        optional: Iterable[str] = (),
        on_made: OnMade = _ignore,
    ) -> None:
        """`core`: the streams and buckets of every namespace; `buckets` and `optional` are nouns of
        further ones; `on_made` is called for each stream that was created again."""
        self._topology = topology
        self._broker = topology.broker
        self._core = core
        self._buckets = tuple(buckets)
        self._optional = tuple(optional)
        self._on_made = on_made
        self._created: dict[str, str] = {}
        self._denied: set[str] = set()
        self._failing: dict[str, tuple[float, str]] = {}
        """Streams that are missing and cannot be created: since when, and why."""
        self._look = asyncio.Event()

    async def ensure(self) -> None:
        """Create what is missing before the role starts, without the optional ones."""
        if self._core:
            await self._topology.ensure()
        await self._topology.ensure_buckets(*self._buckets)

    @property
    def problems(self) -> list[str]:
        """What is missing and could not be created."""
        return [f"{name} is missing: {why}" for name, (_, why) in self._failing.items()]

    async def run(self) -> None:
        """Check until cancelled; raises when something cannot be created again."""
        stop = self._broker.on_missing(self._look.set)
        try:
            while True:
                hurried = await self._round()
                self._look.clear()
                await self._sleep(PACE_SECONDS if hurried else ROUND_SECONDS)
        finally:
            stop()

    async def _sleep(self, seconds: float) -> None:
        await self._broker.clock.sleep(PACE_SECONDS)
        try:
            async with asyncio.timeout(max(0.0, seconds - PACE_SECONDS)):
                await self._look.wait()
        except TimeoutError:
            return

    async def _round(self) -> bool:
        """Check each stream; True if one of them is still missing."""
        if not self._broker.connected:
            self._failing.clear()
            return False
        try:
            wanted = await self._wanted()
            for config, optional in wanted:
                await self._keep(config, optional)
        except (errors.NotConnected, errors.Unavailable, errors.OutcomeUnknown) as error:
            log.debug("streams not checked: %s", error)
        self._give_up()
        return bool(self._failing)

    async def _wanted(self) -> list[tuple[Config, bool]]:
        topology = self._topology
        replicas = await topology.wanted_replicas()
        names = self._broker.names
        core = stream_configs(names, topology.records, replicas) if self._core else []
        found = [(c, False) for c in core]
        found += [(bucket_config(names, noun, replicas), False) for noun in self._buckets]
        found += [(bucket_config(names, noun, replicas), True) for noun in self._optional]
        return [(c, optional) for c, optional in found if c["name"] not in self._denied]

    async def _keep(self, config: Config, optional: bool) -> None:
        name = config["name"]
        try:
            created = await self._created_at(name)
        except errors.PermissionDenied as error:
            self._denied.add(name)
            log.debug("%s is not checked: %s", name, error)
            return
        if not created and (not optional or name in self._created):
            created = await self._make(config)
        if not created:
            return
        self._failing.pop(name, None)
        before, self._created[name] = self._created.get(name), created
        if before not in (None, created):
            log.warning("%s was deleted and created again: its content is gone", name)
            self._on_made(name)

    async def _make(self, config: Config) -> str:
        """Create a missing stream; returns when it was created, or nothing if that failed."""
        name = config["name"]
        if name not in self._failing and self._created.get(name) != "":
            log.error("%s does not exist: making it again", name)
            self._created.setdefault(name, "")
        try:
            await self._topology.ensure_stream(config)
            return await self._created_at(name)
        except errors.NotConnected:
            raise
        except errors.BrokerError as error:
            if name == self._broker.names.run_logs:
                return ""  # no role needs it
            since = self._failing.get(name, (self._broker.clock.monotonic(), ""))[0]
            self._failing[name] = since, str(error)
            return ""

    async def _created_at(self, name: str) -> str:
        """When a stream was created; empty if it does not exist."""
        try:
            info = await self._broker.api(f"STREAM.INFO.{name}", timeout=LOOK_SECONDS)
        except errors.NotFound:
            return ""
        return str(info.get("created", ""))

    def _give_up(self) -> None:
        now = self._broker.clock.monotonic()
        for name, (since, why) in self._failing.items():
            if now - since > GIVE_UP_SECONDS:
                raise errors.Unavailable(
                    f"{name} could not be brought back in {GIVE_UP_SECONDS:.0f} s: {why}"
                )
