"""Renews the agent's login before it ends: makes the next one, asks for it, switches to it.

    login ─► after half of its life, ─► next login made (0600) ─► asked for in the agent's record
             before two thirds                                           │
    credentials.json replaced, reconnected ◄── the server admits it ◄────┘

The next login is on disk before it is asked for, so a restarted agent asks for the same one. The
old login works until its end: while nobody lists the next one or the disk is full, work continues
and the log says so. An agent whose login has ended must join again, and an operator must accept it.

Hosts that joined together do not renew together, and the longer nobody lists the next login, the
less often an agent tries it: ten thousand refused logins would cost the servers more than the
actual work.

A login that does not end (`ends` is 0) is left alone.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from pathlib import Path
from typing import Final

import msgspec

from holdfast.agent.joining import not_admitted
from holdfast.broker import Broker
from holdfast.errors import BrokerError, ConfigError
from holdfast.identity import renewing
from holdfast.identity.credentials import AgentCredentials, new_nkey_seed
from holdfast.retrying import repeating

log = logging.getLogger("holdfast.agent")

FILE: Final = "credentials.next.json"
TRY_SECONDS: Final = 20.0
"""The pause before the second try with the next login: a reload of the servers takes seconds. It
doubles each time, up to a fiftieth of the login's life."""
LONGEST_REST_SECONDS: Final = 3600.0
"""The longest pause: a machine that slept looks at its clock again by then."""

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
        self._file = file
        self._next = folder / FILE
        self._rest = 0.0
        self.request = ""
        """For the agent's record, while a login is asked for."""
        self._use(credentials)

    def _use(self, login: AgentCredentials) -> None:
        self._now, self.request = login, ""
        self._due = login.ends - login.lasts * random.uniform(1 / 3, 1 / 2)
        self._late = login.ends - login.lasts / 6

    async def run(self) -> None:
        """Renew whenever it is time, until cancelled."""
        await repeating(
            self._step,
            clock=self._broker.clock,
            every=lambda: self._rest,
            what="renewing the login",
            on=(BrokerError, ConfigError),
            at_once=True,
        )

    async def _step(self) -> None:
        now = self._broker.server_now()
        if self._due > now:
            self._rest = min(self._due - now, LONGEST_REST_SECONDS)
            return
        longest = min(LONGEST_REST_SECONDS, max(TRY_SECONDS, self._now.lasts / 50))
        self._rest = min(2 * self._rest, longest) if self.request else TRY_SECONDS
        self._rest *= random.uniform(0.75, 1.0)
        if now > self._late:
            log.error(NOBODY)
            self._late = self._now.ends
        await self._renew()

    async def _renew(self) -> None:
        following = self._made()
        if not self.request:
            log.info("the login ends soon: asking for the next one")
        self.request = renewing.ask(
            self._now.agent,
            self._broker.names.namespace,
            self._now.nkey_seed,
            following.nkey_seed,
            following.ends - following.lasts,
        )
        trial = dataclasses.replace(self._broker.config, credentials_file=str(self._next))
        if await not_admitted(trial):
            return
        following.save(self._file, replace=True)
        self._next.unlink(missing_ok=True)
        self._use(following)
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
                log.error("%s: making another login", error)
        made = msgspec.structs.replace(
            self._now,
            nkey_seed=new_nkey_seed(),
            ends=float(int(self._broker.server_now())) + self._now.lasts,
        )
        made.save(self._next, replace=True)
        return made
