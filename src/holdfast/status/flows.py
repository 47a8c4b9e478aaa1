"""Flows for operators: what they wait for and have done; signal, resume, repair.

`Flows.repair` wakes parked flows that nobody else would wake: those whose time has passed (the
stored wake was deleted), whose event is stored, or whose children have all ended. It also ends
children that have neither a record nor a message in two checks, as after a purge, for their flow.
Flows whose records were deleted with their bucket are found by their journals. Coordinators call it
regularly; an extra wake is harmless.
"""

from __future__ import annotations

import builtins
import logging
from collections.abc import Sequence, Set
from typing import Final

import msgspec

from holdfast.broker.kv import Entry as StoredRecord
from holdfast.broker.kv import direct_batch, parse_time
from holdfast.client import Client
from holdfast.client.client import EventSent
from holdfast.errors import BrokerError, InvalidInput, NotFound, RunNotFound, Unreadable
from holdfast.model import run as runs
from holdfast.model.journal import (
    CHILD_END,
    ENTRIES,
    EXPORTED_END,
    ExportedEnd,
    FlowJournal,
    JournalEntry,
    Parent,
    StoryLine,
    children_of,
    missing,
)
from holdfast.model.run import RunRecord
from holdfast.names import IdMaker, check_event, check_run
from holdfast.status.messages import oldest

log = logging.getLogger("holdfast.flows")

QUIET_SECONDS: Final = 30.0
"""A flow is checked once it has been parked for this long: wakes take milliseconds."""
LATE_SECONDS: Final = 10.0
"""How late a stored wake may be: servers send them up to a second late."""
TOGETHER_SECONDS: Final = 60.0
"""The buckets and streams of a namespace are created within this time of each other."""
SEARCH_MOST: Final = 100_000
"""Most messages that are searched for children without a record; in a longer queue, a missing
message proves nothing."""
GONE: Final = "its message is gone: its queue was purged or deleted"

_make_id = IdMaker()


class FlowInfo(msgspec.Struct, frozen=True):
    """One flow."""

    run: str
    job: str
    group: str
    state: str
    """The state of its run, or `stopped` if its code does not fit its journal."""
    waits: str
    """What it waits for."""
    since: float
    """When its state last changed."""
    due: float
    """When it is called again at the latest; 0 if only a wake can call it."""
    error: str
    parent: str
    """The flow whose child it is."""


class FlowLine(msgspec.Struct, frozen=True):
    """One operation of a flow."""

    number: int
    kind: str
    name: str
    since: float
    until: float
    """When it ended, or is due; 0: it has not ended."""
    attempts: int
    error: str
    by: str
    children: int
    ended: int
    """How many of its children."""
    open: bool
    """Whether the flow waits here."""


class FlowDetail(msgspec.Struct, frozen=True):
    """A flow and its operations."""

    info: FlowInfo
    created: float
    ended: float
    lines: Sequence[FlowLine]
    calls: int
    """How often its function was called: at first, when it was woken, by another process."""
    broken: str
    """Why its journal cannot be read."""


class Flows:
    """The flows of one namespace."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._broker = client.broker
        self._names = client.broker.names
        self._suspects: Set[str] = frozenset()
        """Children that had neither a record nor a message at the last check."""
        self._whole_since = 0.0
        """When the records were created, if every flow that is older has its record."""

    # ---- reading

    async def list(self, *, state: str = "", job: str = "", limit: int = 100) -> Sequence[FlowInfo]:
        """Flows whose record is kept, newest change first."""
        found = []
        flows = self._client.runs.records(runs.decode, wanted=lambda body: b'"flow":true' in body)
        async for entry, record in flows:
            if record.flow and (not job or record.job == job):
                info = _info(entry, record)
                if not state or info.state == state:
                    found.append(info)
        found.sort(key=lambda one: -one.since)
        return found[:limit]

    async def show(self, run: str) -> FlowDetail:
        """One flow with its operations."""
        entry, record = await self._find(run)
        broken = ""
        try:
            journal = await self._client.journals.load(run)
        except Unreadable as error:
            journal, broken = FlowJournal(run), str(error)
        lines = [await self._line(run, journal, record, line) for line in journal.story()]
        return FlowDetail(
            _info(entry, record),
            record.created,
            record.ended,
            _where_it_ended(lines, record),
            journal.calls,
            broken,
        )

    async def export(self, run: str) -> builtins.list[str]:
        """A flow's journal with the ends of its children, as `holdfast.testing.replay_flow` reads
        it: a line for each message, large values in it."""
        stream, lines = self._names.flows, []
        async for message in direct_batch(self._broker, stream, self._names.flow(check_run(run))):
            entries = [await self._whole(entry) for entry in ENTRIES.decode(message.body)]
            lines.append(ENTRIES.encode(tuple(entries)))
        subject = self._names.flow_children(run, "*")
        async for message in direct_batch(self._broker, stream, subject):
            if where := self._names.parse_flow_children(message.subject):
                end = CHILD_END.decode(message.body)
                if end.result_object:
                    body = msgspec.Raw(await self._client.objects.get(end.result_object))
                    end = msgspec.structs.replace(end, result=body, result_object="")
                lines.append(EXPORTED_END.encode(ExportedEnd(where[1], end)))
        return [line.decode(errors="replace") for line in lines]

    async def _whole(self, entry: JournalEntry) -> JournalEntry:
        if not entry.object:
            return entry
        body = msgspec.Raw(await self._client.objects.get(entry.object))
        return msgspec.structs.replace(entry, value=body, object="")

    async def _find(self, run: str) -> tuple[StoredRecord, RunRecord]:
        entry = await self._client.runs.get(check_run(run))
        record = self._client.runs.read(runs.decode, entry) if entry else None
        if entry is None or record is None or not record.flow:
            raise RunNotFound(
                f"{run} is not a flow, has not begun, or its record has expired: 'holdfast flows "
                "list' shows flows, 'holdfast runs show' any run",
                run=run,
            )
        return entry, record

    async def _line(
        self, run: str, journal: FlowJournal, record: RunRecord, line: StoryLine
    ) -> FlowLine:
        ended = line.total
        waits = record.state == "parked" and line.n == max(journal.operations, default=-1)
        if line.kind == "gather" and waits:
            number = journal.gather_number(line.n)
            ended = len(await self._client.journals.ends(run, number, line.total))
        opened = waits and line.kind != "undo" and (line.until == 0 or line.kind == "sleep")
        return FlowLine(
            line.n + 1,
            line.kind,
            line.name,
            line.since,
            line.until,
            line.attempts,
            line.error,
            line.by,
            line.total,
            ended,
            opened,
        )

    # ---- doing

    async def signal(self, event: str, key: str, body: bytes, by: str = "") -> EventSent:
        """Send an event to the flows that wait for it with this key."""
        if not key:
            raise InvalidInput("an event for flows needs a key")
        from holdfast.names import H_MSG_ID, H_USER

        headers = {H_MSG_ID: _make_id("e")} | ({H_USER: by} if by else {})
        pattern = self._names.waits_of(self._names.signal(check_event(event), key))
        # Looked up before: a flow that gets it has removed its wait a moment later.
        waiting = [run async for run, _, _ in self._client.journals.waiting(pattern)]
        stored = await self._client.publish_signal(event, key, body, headers)
        return EventSent(event, headers[H_MSG_ID], stored.duplicate, bool(waiting))

    async def resume(self, run: str) -> RunRecord:
        """Call a parked flow now: after a repair of its code."""
        entry, record = await self._find(run)
        if record.state != "parked":
            raise InvalidInput(f"flow {run} is {record.state}: only a parked one can be resumed")
        await self._wake(run, record, entry.revision)
        return record

    async def _wake(self, run: str, record: RunRecord, revision: int) -> None:
        await self._client.journals.wake(record.group, record.job, run, f"r{revision}")

    # ---- repairing

    async def stuck(self) -> Sequence[str]:
        """Flows that nobody else would wake."""
        return [run for run, _, _ in await self._stuck(set())]

    async def repair(self) -> Sequence[str]:
        """Wake flows that nobody else would wake; returns them."""
        lost: set[str] = set()
        found = await self._stuck(lost)
        for run, record, revision in found:
            log.warning("flow %s was not woken (it waits for %s): woken", run, record.waits)
            await self._wake(run, record, revision)
        self._suspects = frozenset(lost)
        return [run for run, _, _ in found] + await self._wake_forgotten()

    async def _wake_forgotten(self) -> builtins.list[str]:
        """Wake flows whose records were deleted with their bucket: their journals know them.

        Nobody holds a parked flow, so nobody writes its record again.
        """
        created = await self._created(self._client.runs.stream)
        if created == self._whole_since or self._now() - created < QUIET_SECONDS:
            return []
        woken = []
        if created > await self._created(self._names.flows) + TOGETHER_SECONDS:
            journals = self._client.journals
            lost = [run async for run in journals.runs() if not await self._client.runs.get(run)]
            woken = [run for run in lost if await self._wake_by_journal(run)]
        self._whole_since = created
        return woken

    async def _wake_by_journal(self, run: str) -> bool:
        try:
            journal = await self._client.journals.load(run)
        except Unreadable:
            return False
        if not journal.running or journal.start is None:
            return False
        where = " ".join(journal.start.jobs) or " ".join(run.split("/")[:2])
        group, _, job = where.partition(" ")
        if not job:
            log.error("flow %s has lost its record, and its journal does not name its job", run)
            return False
        log.warning("flow %s has lost its record: woken", run)
        await self._client.journals.wake(group, job, run, f"b{journal.last}")
        return True

    async def _created(self, stream: str) -> float:
        info = await self._broker.api(f"STREAM.INFO.{stream}")
        return float(parse_time(info["created"]))

    async def _stuck(self, lost: set[str]) -> builtins.list[tuple[str, RunRecord, int]]:
        now, found = self._broker.server_now(), []
        try:
            parked = self._client.runs.records(runs.decode, wanted=runs.may_be_parked)
            async for entry, record in parked:
                if not record.flow or record.state != "parked":
                    continue
                if now - entry.stored < QUIET_SECONDS:
                    continue
                if await self._is_stuck(entry.key, record, now, lost):
                    found.append((entry.key, record, entry.revision))
        except NotFound:
            return []
        return found

    async def _is_stuck(self, run: str, record: RunRecord, now: float, lost: set[str]) -> bool:
        if record.due and now > record.due + LATE_SECONDS:
            return True
        if "children" not in record.waits and not record.waits.startswith("event "):
            return False
        try:
            journal = await self._client.journals.load(run)
        except (Unreadable, BrokerError):
            return False
        entry = journal.newest
        if entry is None:
            return True  # it parked before its first operation: its message was not given back
        if entry.kind == "gather" and "children" in record.waits:
            return await self._children_ended(journal, record, entry, lost)
        if entry.kind == "event" and entry.n not in journal.ends:
            event, _, key = entry.name.partition(" ")
            last = await self._client.journals.newest(event, key)
            taken = journal.taken.get(entry.name, 0)
            return last is not None and last.at >= journal.created and last.sequence > taken
        return True  # it waits for what its journal knows to be over

    async def _children_ended(
        self, journal: FlowJournal, record: RunRecord, gather: JournalEntry, lost: set[str]
    ) -> bool:
        """Whether all children have ended; stores ends that were not stored."""
        run, number = journal.run, journal.gather_number(gather.n)
        ends = await self._client.journals.ends(run, number, gather.total)
        children = children_of(journal, gather)
        for index in missing(gather.total, ends):
            if index >= len(children):
                break
            child, group, job = children[index]
            parent = Parent(run, record.group, record.job, number, index, gather.total)
            known = await self._client.read(child) or await self._client.recall(child)
            if known is not None and known.terminal:
                await self._client.journals.tell(parent, child, known)
            elif known is None:
                lost.add(child)
                if child in self._suspects and not await self._is_queued(child):
                    gone = RunRecord("lost", group, job, error=GONE, ended=self._now())
                    await self._client.journals.tell(parent, child, gone)
        return len(await self._client.journals.ends(run, number, gather.total)) >= gather.total

    def _now(self) -> float:
        return self._broker.server_now()

    async def _is_queued(self, run: str) -> bool:
        """Whether a run has a message anywhere; True if there are too many to search."""
        names = self._names
        looked = 0
        for subject in (names.job("*", "*"), names.later_or_line):
            async for kept in oldest(self._broker, names.jobs, subject):
                looked += 1
                if kept.run == run or looked > SEARCH_MOST:
                    return True
        return False


def _info(entry: StoredRecord, record: RunRecord) -> FlowInfo:
    stopped = record.state == "parked" and bool(record.error)
    return FlowInfo(
        entry.key,
        record.job,
        record.group,
        "stopped" if stopped else record.state,
        record.waits,
        entry.stored,
        record.due,
        record.error,
        record.parent.partition(" ")[0],
    )


def _where_it_ended(lines: list[FlowLine], record: RunRecord) -> list[FlowLine]:
    """Say so at a wait that was never over: nothing is stored of its end."""
    last = max((n for n, line in enumerate(lines) if line.kind != "undo"), default=-1)
    if record.terminal and record.state != "done" and last >= 0:
        line = lines[last]
        if line.kind in ("gather", "sleep", "event") and not (line.error or line.by):
            lines[last] = msgspec.structs.replace(line, error="the flow ended here")
    return lines
