"""Runs for operators: list, find, cancel, send again.

A run is its record; before its first attempt it has none and is only a message: `queued`, or
`delayed` until it is due. Lists show both, newest change first. Every number comes from the server.

`cancel` and `retry` are decided by compare-and-swap or by the claim, never by what was read; both
are written to the ledger.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast import durations
from holdfast.broker import Bucket
from holdfast.client import Client
from holdfast.clock import rfc3339
from holdfast.errors import InvalidName, NoRecord, NotFound, RunError, RunNotFound
from holdfast.model import node as nodes
from holdfast.model.message import next_message, queue_of
from holdfast.model.run import RunRecord
from holdfast.names import consumer, spelled_runs
from holdfast.status.dead import DeadLetters
from holdfast.status.finding import Carrier, Finder, Found, replayed
from holdfast.status.jobs import Jobs
from holdfast.status.limits import Limits
from holdfast.status.listing import RunFilter, RunInfo, first_runs, of_message, of_record
from holdfast.status.messages import Kept, delete
from holdfast.status.rerun import run_again
from holdfast.status.stranded import Stranded

CLAIM_SECONDS: Final = 2.0
"""How long a worker may take from a delivery to its claim; after that no claim is expected."""


class RunDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything about one run."""

    info: RunInfo
    where: str
    """A sentence: where it is, and what happens next."""
    record: RunRecord | None = None
    dead_letter: int = 0


class Runs:
    """The runs of one namespace."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._broker = client.broker
        self._names = client.broker.names
        self._finder = Finder(client)
        self._dead = DeadLetters(client)

    # ---- reading

    async def list(self, wanted: RunFilter | None = None, limit: int = 50) -> Sequence[RunInfo]:
        """The runs that match, newest change first, read page by page up to `limit`."""
        return await first_runs(self._client, wanted or RunFilter(), limit)

    async def find(self, run: str) -> Found:
        """Find a run by its id, or by its job and key as they were given.

        Raises `RunNotFound` when there is no trace of it.
        """
        first, *others = spelled_runs(run)
        try:
            return await self._finder.find(first)
        except InvalidName:
            if "/" in run:
                raise
            raise InvalidName(
                f"{run!r} is not a run id; a run with a key is named by its job and key: JOB/{run}"
            ) from None
        except RunNotFound:
            for other in others:
                with contextlib.suppress(RunNotFound):
                    return await self._finder.find(other)
            raise

    async def show(self, run: str) -> RunDetail:
        """One run: its record and where it is."""
        return await self.describe(await self.find(run))

    async def describe(self, found: Found) -> RunDetail:
        """Describe a run that is already found."""
        letter = found.letter.sequence if found.letter else 0
        return RunDetail(self._info(found), await self._where(found), found.record, letter)

    def _info(self, found: Found) -> RunInfo:
        if found.record:
            record = found.record
            changed = max(record.created, record.started, record.ended)
            return of_record(found.run, record, changed)
        info = of_message(found.carrier.kept, self._names) if found.carrier else None
        if info:
            return info
        at = found.letter.stored if found.letter else 0.0
        return RunInfo(found.run, "dead", found.group, found.job, at, ended=at)

    async def _where(self, found: Found) -> str:
        record, carrier, letter = found.record, found.carrier, found.letter
        if record and record.state == "running":
            return f"running on {record.node}, which is {await self._how(record)}"
        if record and record.state == "parked":
            return f"a flow that waits for {record.waits}: see 'holdfast flows show'"
        if letter and (record is None or record.terminal):
            return f"dead letter {letter.sequence}: 'holdfast runs retry' sends it again"
        if record and record.terminal:
            return f"ended {rfc3339(record.ended)}"
        if carrier and (place := await self._place(found.run, carrier)):
            return place + await self._hint(carrier)
        if carrier and carrier.later:
            return f"delayed until {rfc3339(carrier.kept.due)}{await self._hint(carrier)}"
        if carrier:
            place = f"in the queue of {found.job} as message {carrier.kept.sequence}"
            return place + await self._hint(carrier)
        if record and replayed(record):
            return "replayed; its message is gone: it was executed by a job that keeps no records"
        return "waiting, but its message is gone: a coordinator sends it again, or ends the run"

    async def _place(self, run: str, carrier: Carrier) -> str:
        """Why a run waits for a limit, and where in its line; empty if it does not."""
        if self._names.parse_line(carrier.kept.subject) is None:
            return ""
        place = await Limits(self._client).place(run)
        if place is None:
            return "about to start: it has just got its place"
        limit, key, number = place
        of = f" for {key!r}" if key else ""
        since = durations.text(round(max(0.0, self._broker.server_now() - carrier.kept.stored)))
        return f"waiting for a place in limit {limit}{of}: number {number} in line, for {since}"

    async def _how(self, record: RunRecord) -> str:
        """The state of the node that holds a run, and what that means for the run."""
        bucket = Bucket(self._broker, self._names.nodes)
        entry = await bucket.get(record.node)
        node = bucket.read(nodes.decode, entry) if entry else None
        if node is not None and node.alive:
            return "alive" if node.state == "RUNNING" else f"alive ({node.state})"
        after = "another worker takes the run over"
        if record.restart == "after_grace":
            after += " when its grace period is over"
        elif record.restart == "never":
            after = "the run is recorded as lost"
        return f"{node.state if node else 'gone'}: {after}"

    async def _hint(self, carrier: Carrier) -> str:
        said = await Jobs(self._client).unserved(carrier.job, carrier.group)
        return f"; {said}" if said else ""

    # ---- acting

    async def cancel(self, wanted: str | Found) -> bool:
        """Cancel a run in whatever state it is; False when it had already ended."""
        found = wanted if isinstance(wanted, Found) else await self.find(wanted)
        run = found.run
        if found.record is None and found.carrier is None:
            raise RunError(f"run {run} has ended: it is dead letter {_id(found)}", run=run)
        if found.record is None and found.carrier and not found.carrier.later:
            await self._need_record_or_queue(run, found.carrier)
        payload = found.carrier.kept.body if found.carrier else None
        cancelled = await self._client.cancel(run, found.group, found.job, payload)
        if cancelled and found.carrier and not found.carrier.later:
            # Jobs that keep no records ignore this one; without a message that does not matter.
            await delete(self._broker, self._names.jobs, found.carrier.kept.sequence)
        return cancelled

    async def _need_record_or_queue(self, run: str, carrier: Carrier) -> None:
        """Refuse a run in flight that has no record: only its record could cancel it."""
        clock = self._broker.clock
        deadline = clock.monotonic() + CLAIM_SECONDS
        while await self._handed_out(carrier) and await self._client.runs.get(run) is None:
            if clock.monotonic() > deadline:
                raise NoRecord(
                    f"run {run} was handed to a worker and has no record: its job keeps none "
                    "(delivery='at_least_once'), so it can no longer be cancelled",
                    run=run,
                )
            await clock.sleep(0.1)

    async def _handed_out(self, carrier: Carrier) -> bool:
        queue = self._names.parse_queue(carrier.kept.subject)
        name = consumer(carrier.group, carrier.job, queue=queue)
        try:
            info = await self._broker.api(f"CONSUMER.INFO.{self._names.jobs}.{name}")
        except NotFound:
            return False
        return int(info["delivered"]["stream_seq"]) >= carrier.kept.sequence

    async def retry(self, wanted: str | Found, edited: bytes | None = None) -> str:
        """Send a run again, or start its next attempt now; returns a sentence about it.

        `edited` is sent instead of its payload; only a run that has ended can be sent so.
        """
        found = wanted if isinstance(wanted, Found) else await self.find(wanted)
        record, carrier = found.record, found.carrier
        state = record.state if record else ("dead" if found.letter and not carrier else "queued")
        if found.letter and (state in ("dead", "lost") or (record and replayed(record))):
            return await self._replay(found, found.letter, edited)
        if edited is not None and not (record and record.terminal):
            raise RunError(
                f"run {found.run} has not ended: it is {state}. Cancel it before you send another "
                "payload",
                run=found.run,
            )
        if carrier and (place := await self._place(found.run, carrier)):
            raise RunError(f"run {found.run} is {place}", run=found.run)
        if state == "failed" and carrier:
            return await self._attempt_now(found, carrier)
        if state == "failed":
            return await self._bring_back(found)
        if record and record.terminal:
            return await run_again(self._client, found, edited)
        raise RunError(f"run {found.run} {_refusal(state, found)}", run=found.run)

    async def _bring_back(self, found: Found) -> str:
        """Its message does not exist: send it again, or end the run."""

        async def alive(node: str) -> bool:
            return await Bucket(self._broker, self._names.nodes).get(node) is not None

        stranded = Stranded(self._client, alive)
        case = await stranded.one(found.run)
        done = await stranded.repair(case) if case else ""
        if not done:
            raise RunError(f"run {found.run} has just changed: try again", run=found.run)
        record, _ = await self._finder.record(found.run)
        if record and record.terminal:
            raise RunError(f"run {found.run} was not sent again: {record.error}", run=found.run)
        return done

    async def _replay(self, found: Found, letter: Kept, edited: bytes | None) -> str:
        if edited is not None:
            await Jobs(self._client).check(found.job, found.group, edited)
        outcome = (await self._dead.replay([letter.sequence], edited=edited))[0]
        if outcome.result == "replayed":
            how = " with the edited payload" if edited is not None else ""
            return f"dead letter {letter.sequence} was sent again{how}"
        raise RunError(
            f"run {found.run} was not sent again: {outcome.why or 'gone'}", run=found.run
        )

    async def _attempt_now(self, found: Found, carrier: Carrier) -> str:
        """Publish the waiting message again under the next number, due at once.

        It is published before the old one is removed: after a crash in between the run has two
        messages, of which the claim drops the older one.
        """
        record = found.record
        assert record is not None
        kept, number = carrier.kept, max(record.message, carrier.kept.stamp) + 1
        message = next_message(
            self._names,
            found.group,
            found.job,
            found.run,
            kept.body,
            kept.headers,
            number=number,
            failures=record.failures,
            created=record.created,
            queue=queue_of(self._names, kept.subject, kept.headers),
        )
        await self._client.store_surely(*message)
        if carrier.later:
            await self._client.topology.purge(self._names.jobs, kept.subject)
        waited = max(0.0, record.due - self._broker.server_now())
        return f"its next attempt was due in {durations.text(round(waited))} and starts now"


def _id(found: Found) -> int:
    return found.letter.sequence if found.letter else 0


def _refusal(state: str, found: Found) -> str:
    if state == "running":
        return f"is running on {found.record.node if found.record else '?'}"
    if state == "queued":
        return "has not run yet: it waits in the queue, or for the time it was delayed to"
    if state == "parked":
        waits = found.record.waits if found.record else ""
        return f"is a flow that waits for {waits}: 'holdfast flows resume' calls it now"
    return "no longer has a dead letter, so its payload is gone: enqueue it again"
