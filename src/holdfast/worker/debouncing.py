"""How a worker handles the runs of a debounced job (`model.debounce`).

    message ──► what waits for its key is replaced, by compare-and-swap ──► the replaced run ends
            ──► ack                         … quiet …                    ──► message ──► claim

The message is acknowledged last, so a crash in between repeats the steps: a message that finds
itself waiting only ends the run that it had replaced.

Not prevented: a run that arrives in the instant at which the waiting one is due begins a new burst.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Final, Protocol

import msgspec

from holdfast.errors import Conflict, PayloadTooLarge
from holdfast.model.debounce import Debounce, decide, read_mark
from holdfast.model.limit import key_of
from holdfast.model.message import RunMessage, next_message
from holdfast.model.run import RunRecord
from holdfast.names import H_CAUSE, H_DEBOUNCE, H_RUN, H_SLOT, Names
from holdfast.ownership.claims import Claims
from holdfast.telemetry import Telemetry
from holdfast.worker.attempt import Held
from holdfast.worker.settling import Quiet

log = logging.getLogger("holdfast.worker")

NO_ROOM_SECONDS: Final = 2.0
"""Redelivery delay of a message whose headers leave no room for ours."""


class QuietStore(Protocol):
    """Where the last run of each burst waits."""

    names: Names

    async def quiet(self, subject: str) -> Quiet | None:
        """The message that waits under a subject, according to the stream's leader."""
        ...

    async def make_quiet(
        self, message: RunMessage, subject: str, due: float, expected: int
    ) -> None:
        """Replace the waiting message with this sequence; `Conflict` if it is no longer there."""
        ...

    def file(
        self, run: str, record: RunRecord, payload: bytes | None, headers: dict[str, str]
    ) -> Awaitable[None]: ...


class Debouncer:
    """Parks the last run of each burst, for one worker."""

    def __init__(self, store: QuietStore, claims: Claims, telemetry: Telemetry) -> None:
        self._store = store
        self._claims = claims
        self._telemetry = telemetry

    def applies(self, held: Held) -> bool:
        """Whether a message begins or joins a burst: only a run's first one does."""
        return held.stamp == 1 and H_DEBOUNCE not in held.message.headers

    async def take(self, held: Held, rule: Debounce, fresh: RunRecord) -> None:
        """Park its run until the key is quiet, or end the run if a newer one waits."""
        spec, message = held.job.spec, held.message
        key = key_of(rule.per, message.body, held.job.signature.parameters)
        subject = self._store.names.quiet(spec.group, spec.name, key)
        while True:
            found = await self._store.quiet(subject)
            mark = read_mark(found.headers) if found else None
            waiting = (found.headers.get(H_RUN, ""), mark) if found and mark else None
            decision = decide(rule, held.run, message.stored_ns, waiting)
            if decision.mark is None:
                break
            following = self._following(held, str(decision.mark))
            try:
                expected = found.sequence if found else 0
                await self._store.make_quiet(following, subject, decision.due, expected)
                break
            except Conflict:
                continue  # another worker was faster, or the one that waited is due
            except PayloadTooLarge:
                await message.nak(NO_ROOM_SECONDS)
                return
        if decision.end:
            await self._end(held, fresh, decision.end, found)
        self._telemetry.claims.labels("debounced").inc()
        await message.ack()

    def _following(self, held: Held, mark: str) -> RunMessage:
        """The message that delivers the run once its key is quiet."""
        spec, message, names = held.job.spec, held.message, self._store.names
        found = next_message(
            names,
            spec.group,
            spec.name,
            held.run,
            message.body,
            message.headers,
            number=held.stamp + 1,
            created=held.created,
            queue=names.parse_queue(message.subject),
        )
        kept = {k: v for k, v in message.headers.items() if k in (H_CAUSE, H_SLOT)}
        return found._replace(headers=found.headers | kept | {H_DEBOUNCE: mark})

    async def _end(self, held: Held, fresh: RunRecord, run: str, found: Quiet | None) -> None:
        """End a run that a newer one has replaced."""
        known = await self._claims.read(run)
        if known is not None and known[0].state != "failed":
            return  # it has ended, or was already due
        record, revision = known or (msgspec.structs.replace(fresh, state="failed"), 0)
        error = "debounced: another run of its key came after it"
        ended = await self._claims.give_up(run, record, revision, state="cancelled", error=error)
        if ended is None:
            return
        body: bytes | None = None
        if held.job.spec.keep_payload:
            body = held.message.body if run == held.run else found.body if found else None
        await self._store.file(run, ended, body, {})
        log.debug("run %s is debounced", run)
