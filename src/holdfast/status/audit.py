"""The audit of what operators do: one record in the ledger stream for each action.

With logins in use, an entry is signed by the login that wrote it, and readers see that login. An
entry is written after the action, with what it changed. If the ledger cannot be written, the action
still stands; a log line says that its entry is missing.
"""

from __future__ import annotations

import getpass
import logging
import os
import socket
from collections.abc import Callable
from typing import Any, Final

import msgspec

from holdfast.client import Client
from holdfast.errors import BrokerError
from holdfast.identity.credentials import Credentials
from holdfast.identity.grants import ROLES, covers
from holdfast.identity.requests import RequestRefused
from holdfast.model.codec import Codec, Count, Instant
from holdfast.names import H_MSG_ID, IdMaker
from holdfast.status.messages import Kept, newest

log = logging.getLogger("holdfast.audit")

NAMED_MOST = 500
"""Runs named in one line, so that it fits into a message; the count is always complete."""

FORGED, UNSIGNED = "forged", "unsigned"
"""Shown in place of a login: the signature is wrong, or is missing although this reader could
verify one (entries of earlier versions)."""

_make_id = IdMaker()


class AuditLine(msgspec.Struct, omit_defaults=True, frozen=True):
    """What an operator did, and to what."""

    verb: str
    who: str
    host: str
    at: Instant
    """When, by the server's clock."""
    runs: tuple[str, ...] = ()
    group: str = ""
    job: str = ""
    count: Count = 0
    detail: str = ""
    noun: str = ""
    """The kind of object, as in `ACTIONS`; empty for logins and in lines of older versions."""


LINE: Final = Codec[AuditLine](AuditLine, "a line of the audit")


class Audit:
    """Writes and reads operators' actions."""

    def __init__(self, client: Client, who: str = "") -> None:
        self._broker = client.broker
        self._client = client
        self.who = who or operator()

    async def write(self, verb: str, **what: Any) -> None:
        """Write a line; `what` holds members of `AuditLine`."""
        subject = self._broker.names.log("operator", verb)
        if not self._may_write(subject):
            return
        runs = tuple(what.pop("runs", ()))
        action = AuditLine(
            verb,
            self.who,
            socket.gethostname(),
            self._broker.server_now(),
            runs=runs[:NAMED_MOST],
            count=what.pop("count", len(runs)),
            **what,
        )
        try:
            body = msgspec.json.encode(action)
            signature = self._broker.signature(subject, body) or {}
            await self._client.store_surely(subject, body, {**signature, H_MSG_ID: _make_id("o")})
        except BrokerError as error:
            log.warning("%s is done, but not written to the ledger: %s", verb, error)

    def _may_write(self, subject: str) -> bool:
        """Whether this login's role may write to the ledger; a client's or a backup's may not."""
        file = self._broker.config.credentials_file
        grant = ROLES.get(Credentials.load(file).role) if file else None
        return grant is None or any(covers(g, subject) for g in grant(self._broker.names).publish)

    async def actions(
        self, run: str = "", most: int = 1_000, since: float = 0.0
    ) -> list[AuditLine]:
        """The newest actions, newest first; with `run`, only those that name it."""
        return (await self.page(run, most, look=most, since=since))[0]

    async def page(
        self,
        run: str = "",
        limit: int = 50,
        before: int = 0,
        look: int = 1_000,
        *,
        since: float = 0.0,
        matches: Callable[[AuditLine], bool] = lambda _: True,
    ) -> tuple[list[AuditLine], int]:
        """A page starting at a position in the ledger, and where the next one starts (0: no
        more)."""
        found: list[AuditLine] = []
        looked, at = 0, 0
        subject = self._broker.names.log("operator", "*")
        async for kept in newest(self._broker, self._broker.names.ledger, subject, before):
            if kept.stored < since:
                return found, 0
            if looked >= look or len(found) >= limit:
                return found, at
            looked, at = looked + 1, kept.sequence
            ledger = self._broker.names.ledger
            place = str(kept.sequence)
            action = self._broker.unreadable.read(LINE.decode, ledger, place, kept.body)
            if action is not None and (not run or run in action.runs):
                action = msgspec.structs.replace(action, who=self._named(kept, action.who))
                found += [action] if matches(action) else []
        return found, 0

    def _named(self, kept: Kept, declared: str) -> str:
        """The login that signed an entry, and the user it says it acted for."""
        guard = self._broker.guard
        try:
            sender = guard.identify(kept.headers, kept.subject, kept.body)
        except RequestRefused:
            return f"{FORGED}: {declared}"
        if guard.strict and not sender.user:
            return f"{UNSIGNED}: {declared}"
        return sender.named(declared)


def operator() -> str:
    """The operating-system user."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may have no name for its user
        return f"uid {os.getuid()}" if hasattr(os, "getuid") else "unknown"
