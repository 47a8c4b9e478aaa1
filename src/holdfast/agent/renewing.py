"""Renews the agent's login before it ends: makes the next one, asks for it, changes over.

    login ─► two thirds of its life ─► next login made (0600) ─► asked for in the agent's record
                                                                        │
    credentials.json replaced, reconnected ◄── the server admits it ◄───┘

The next login is on disk before it is asked for, so a restarted agent asks for the same one. The
old login works until its end: nothing is interrupted while nobody lists the next one, and the log
says so. An agent whose login has ended must join again, with an operator's word.

A login that does not end (`ends` is 0) is left alone.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Final

import msgspec

from holdfast.agent.joining import not_admitted
from holdfast.broker import Broker
from holdfast.errors import ConfigError
from holdfast.identity import renewing
from holdfast.identity.credentials import AgentCredentials, new_nkey_seed

log = logging.getLogger("holdfast.agent")

FILE: Final = "credentials.next.json"
TRY_SECONDS: Final = 20.0
"""Between two tries with the next login: it is a matter of a reload, and there are days left."""
LONGEST_REST_SECONDS: Final = 3600.0
"""A machine that slept looks at its clock again by then."""

NOBODY: Final = (
    "the login ends soon, and the servers do not know the next one: is 'holdfast agents accept "
    "--follow' running, and do the servers reload their configuration?"
)


class Renewing:
    """Keeps one agent's login valid."""

    def __init__(
        self, broker: Broker, credentials: AgentCredentials, file: Path, folder: Path
    ) -> None:
        self._broker = broker
        self._now = credentials
        self._file = file
        self._next = folder / FILE
        self.request = ""
        """For the agent's record, while a login is asked for."""

    async def run(self) -> None:
        """Renew whenever it is time, until cancelled."""
        while self._now.ends:
            rest = self._now.ends - self._now.lasts / 3 - self._broker.server_now()
            if rest > 0:
                await self._broker.clock.sleep(min(rest, LONGEST_REST_SECONDS))
                continue
            await self._renew()

    async def _renew(self) -> None:
        following = self._made()
        namespace = self._broker.names.namespace
        self.request = renewing.ask(
            self._now.agent,
            namespace,
            self._now.nkey_seed,
            following.nkey_seed,
            following.ends - following.lasts,
        )
        log.info("the login ends soon: asking for the next one")
        late = self._now.ends - self._now.lasts / 6
        trial = dataclasses.replace(self._broker.config, credentials_file=str(self._next))
        while await not_admitted(trial):
            if self._broker.server_now() > late:
                log.error(NOBODY)
                late = self._now.ends
            await self._broker.clock.sleep(TRY_SECONDS)
        following.save(self._file, replace=True)
        self._next.unlink(missing_ok=True)
        self._now, self.request = following, ""
        await self._broker.use_login(following.nkey_seed)
        log.info("the login was renewed")

    def _made(self) -> AgentCredentials:
        """The next login: the one on the disk, or a new one."""
        if self._next.exists():
            try:
                found = AgentCredentials.load(self._next)
                if found.agent == self._now.agent and found.ends > self._broker.server_now():
                    return found
            except ConfigError as error:
                log.error("%s: another login is made", error)
        made = msgspec.structs.replace(
            self._now,
            nkey_seed=new_nkey_seed(),
            ends=float(int(self._broker.server_now())) + self._now.lasts,
        )
        made.save(self._next, replace=True)
        return made
