"""What limits allow: registered from the code, changed by operators, followed by every worker.

A limit's rule is one record. Workers register the limits of their code when they start: a lower
release changes nothing, and an operator's numbers stay until the code itself changes
(`model.limit.registered`). A worker reads the rules again when one changes, and periodically in
case it missed that. Gates contain the newest rule that any process has applied, so a worker that is
behind cannot bring back old numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from holdfast.broker import Broker, Bucket, Received
from holdfast.errors import Conflict
from holdfast.model.limit import RULE, Limit, Rule, registered
from holdfast.model.schedule import check_release
from holdfast.names import RULES, rule_key
from holdfast.retrying import repeating

LOOK_SECONDS: Final = 5.0
"""How often rules are read again, in case a change was missed: one small request for each
worker."""
TRIES: Final = 20
"""In each round one writer wins; few change rules at once."""


class Rules:
    """The rules of one namespace, as one process knows them."""

    def __init__(self, broker: Broker, limits: Mapping[str, Limit] | None = None) -> None:
        self.bucket = Bucket(broker, broker.names.limits)
        self._broker = broker
        self._known: dict[str, tuple[Rule | None, int]] = {
            name: (Rule(code=limit.numbers), 0) for name, limit in (limits or {}).items()
        }
        self._wake = asyncio.Event()

    def __call__(self, limit: str) -> tuple[Rule | None, int]:
        """A limit's rule and its revision."""
        return self._known.get(limit, (None, 0))

    async def register(self, limit: Limit, app: str, release: str, jobs: tuple[str, ...]) -> None:
        """Register a limit of an app's code."""
        new = Rule(
            code=limit.numbers,
            per=limit.per,
            app=app,
            release=check_release(release),
            jobs=jobs,
            ordered=limit.ordered,
        )
        await self.change(limit.name, lambda old: registered(old, new))

    async def change(self, limit: str, change: Callable[[Rule | None], Rule]) -> Rule:
        """Read, change and write a rule, repeated on a conflict; an unreadable one is replaced."""
        for _ in range(TRIES):
            revision, entry = await self.bucket.last(rule_key(limit))
            old = self.bucket.read(RULE.decode, entry) if entry else None
            new = change(old)
            if new != old:
                try:
                    revision = await self.bucket.put(
                        rule_key(limit), RULE.encode(new), expected=revision
                    )
                except Conflict:
                    continue
            self._known[limit] = new, revision
            return new
        raise Conflict(f"limit {limit!r}: {TRIES} tries lost to other writers; try again")

    async def read(self) -> dict[str, Rule]:
        """Every rule, by the name of its limit."""
        found = {}
        async for entry, rule in self.bucket.records(RULE.decode, RULES):
            name = entry.key.removeprefix(f"{RULES}.")
            found[name] = rule
            if entry.revision >= self(name)[1]:
                self._known[name] = rule, entry.revision
        return found

    async def run(self) -> None:
        """Follow the rules until cancelled."""

        async def heard(_: Received) -> None:
            self._wake.set()

        subject = self._broker.names.changed(self.bucket.name, rule_key("*"))
        await self._broker.subscribe(subject, heard)
        await repeating(
            self.read,
            clock=self._broker.clock,
            every=LOOK_SECONDS,
            what="reading the rules of limits",
            wake=self._wake,
            at_once=True,
        )
