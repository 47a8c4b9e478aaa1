"""Limits for operators: who holds a place, who waits; change, pause, repair.

A gate may name a run that no longer needs its place: its message was purged, its worker died after
it had acknowledged (`at_most_once`), or the job's limits have changed. `Limits.repair` frees such
places and finishes what a dead process left half done; coordinators call it regularly, and after a
death. A place is freed when the run's record has ended or has moved on to a newer message, or when
there is neither a running record nor a message of the run, twice in a row. The message of a run
that waits for its second limit is in that limit's line; it keeps its first place.

Changing a rule also applies it to every gate of the limit at once, so that a higher number, or the
end of a pause, lets waiting runs start.
"""

from __future__ import annotations

import builtins
import logging
from collections.abc import Sequence, Set
from typing import Final

import msgspec

from holdfast.broker.kv import direct_page, parse_time
from holdfast.client import Client
from holdfast.errors import InvalidInput, NotFound, Unreadable
from holdfast.model import run as runs
from holdfast.model.limit import EVERYBODY, GATE, Gate, Numbers, Rule, numbers, starts_text
from holdfast.names import GATES, H_SEQUENCE, check_name, decode, is_event_run, parse_gate_key
from holdfast.ownership.gates import GateKey, Gates
from holdfast.ownership.line import NatsLine
from holdfast.ownership.rules import Rules
from holdfast.status.messages import in_line, oldest, subject_counts

log = logging.getLogger("holdfast.limits")

SEARCH_MOST: Final = 100_000
"""Most messages that are searched for a run that holds a place; in a longer queue, a missing
message proves nothing."""
SHOWN_KEYS: Final = 100
"""Most keys shown of one limit, the busiest first."""
SHOWN_RUNS: Final = 20
"""Most holders shown of one key: they fit on a screen."""


DUE_SECONDS: Final = 5.0
"""How long after its due time a scheduled message may take to reach its queue: servers deliver up
to a second late."""


_Place = tuple[GateKey, str, int]
"""A run in a gate, and the number of the message that holds the place."""


class UnknownLimit(InvalidInput):
    """No limit has that name."""


class LimitInfo(msgspec.Struct, frozen=True):
    """One limit, all its keys together."""

    name: str
    running: int | None
    """How many may run at the same time; None: any number."""
    starts: str | None
    """How many may start, as `100/s`; None: any number."""
    burst: int | None
    per: str
    paused: bool
    set_by_operator: bool
    """Whether an operator has set the numbers."""
    jobs: Sequence[str]
    keys: int
    """How many keys are in use."""
    held: int
    """Places that are taken."""
    waiting: int
    oldest_seconds: float | None = None
    """How long the first in line has been waiting."""


class KeyInfo(msgspec.Struct, frozen=True):
    """One key of a limit."""

    key: str
    held: int
    waiting: int
    oldest_seconds: float | None
    runs: Sequence[str]
    """Some of the runs that hold a place."""


class HolderInfo(msgspec.Struct, frozen=True):
    """A run that holds a place."""

    run: str
    key: str
    state: str
    """`running`; `failed`: it waits for its next attempt; `granted`: it has not started yet."""
    seconds: float | None = None
    """How long it has been running."""


class WaiterInfo(msgspec.Struct, frozen=True):
    """A run that waits for a place."""

    run: str
    key: str
    seconds: float


class LimitDetail(msgspec.Struct, frozen=True):
    """A limit, its busiest keys, some of its holders, and the first in line."""

    info: LimitInfo
    keys: Sequence[KeyInfo]
    holders: Sequence[HolderInfo] = ()
    waiters: Sequence[WaiterInfo] = ()


class Limits:
    """The limits of one namespace."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._broker = client.broker
        self._names = client.broker.names
        self.rules = Rules(client.broker)
        self.gates = Gates(
            self.rules.bucket,
            NatsLine(client.broker),
            client.broker.clock,
            now=client.broker.server_now,
            rules=self.rules,
        )
        self._suspects: Set[_Place] = frozenset()
        """Places whose run had neither a record nor a message at the last check."""

    # ---- reading

    async def list(self) -> Sequence[LimitInfo]:
        """Every limit, by name."""
        try:
            rules = await self.rules.read()
            gates = await self._gates()
        except NotFound:
            return []
        by_name: dict[str, dict[GateKey, Gate]] = {}
        for key, gate in gates.items():
            by_name.setdefault(key.limit, {})[key] = gate
        return [
            await self._info(name, rules[name], by_name.get(name, {})) for name in sorted(rules)
        ]

    async def show(self, name: str) -> LimitDetail:
        """One limit, with its busiest keys."""
        rule = await self._rule(name)
        gates = {key: gate for key, gate in (await self._gates(name)).items() if not gate.idle}
        found = [await self._key(key, gate) for key, gate in gates.items()]
        found.sort(key=lambda one: (-one.waiting, -one.held, one.key))
        return LimitDetail(
            await self._info(name, rule, gates),
            found[:SHOWN_KEYS],
            await self._holders(gates),
            await self._waiters(name),
        )

    async def _holders(self, gates: dict[GateKey, Gate]) -> Sequence[HolderInfo]:
        held = [(key, run) for key, gate in gates.items() for run in gate.held][:SHOWN_RUNS]
        found, now = [], self._broker.server_now()
        for key, run in held:
            entry = await self._client.runs.get(run)
            record = self._client.runs.read(runs.decode, entry) if entry else None
            state = record.state if record and not record.terminal else "granted"
            running = record is not None and state == "running" and record.started
            took = max(0.0, now - record.started) if record and running else None
            found.append(HolderInfo(run, _shown(key.key), state, took))
        return found

    async def _waiters(self, name: str) -> Sequence[WaiterInfo]:
        subject, now = self._names.line(name, "*", "*"), self._broker.server_now()
        page = await direct_page(self._broker, self._names.jobs, subject, 1, size=SHOWN_RUNS)
        found = []
        for message in page.messages:
            where = self._names.parse_line(message.headers["Nats-Subject"])
            if where is not None:
                since = parse_time(message.headers["Nats-Time-Stamp"])
                (_, key), run = where
                found.append(WaiterInfo(run, _shown(key), max(0.0, now - since)))
        return found

    async def _rule(self, name: str) -> Rule:
        try:
            rules = await self.rules.read()
        except NotFound:
            rules = {}
        if name not in rules:
            raise UnknownLimit(f"there is no limit {name!r}: 'holdfast limits list' shows them")
        return rules[name]

    async def _gates(self, name: str = "") -> dict[GateKey, Gate]:
        prefix = f"{GATES}.{name}" if name else GATES
        found = {}
        async for entry, gate in self.rules.bucket.records(GATE.decode, prefix):
            if (where := parse_gate_key(entry.key)) is not None:
                found[GateKey(*where)] = gate
        return found

    async def _info(self, name: str, rule: Rule, gates: dict[GateKey, Gate]) -> LimitInfo:
        now = rule.numbers
        waiting, oldest_seconds = await self._line(name, "*")
        return LimitInfo(
            name,
            now.running or None,
            starts_text(now.rate) if now.rate else None,
            now.burst or None,
            rule.per,
            rule.paused,
            rule.chosen is not None,
            rule.jobs,
            sum(not gate.idle for gate in gates.values()),
            sum(len(gate.held) for gate in gates.values()),
            waiting,
            oldest_seconds,
        )

    async def _key(self, key: GateKey, gate: Gate) -> KeyInfo:
        waiting, oldest_seconds = await self._line(*key)
        return KeyInfo(
            _shown(key.key), len(gate.held), waiting, oldest_seconds, [*gate.held][:SHOWN_RUNS]
        )

    async def _line(self, name: str, key: str) -> tuple[int, float | None]:
        """How many wait, and for how long the first has waited."""
        subject = self._names.line(name, key, "*")
        page = await direct_page(self._broker, self._names.jobs, subject, 1, size=1)
        if not page.messages:
            return 0, None
        since = parse_time(page.messages[0].headers["Nats-Time-Stamp"])
        return page.left + 1, max(0.0, self._broker.server_now() - since)

    async def place(self, run: str) -> tuple[str, str, int] | None:
        """The limit for which a run waits, its key, and its place in the line."""
        names = self._names
        subjects = await subject_counts(self._broker, names.jobs, names.line("*", "*", run))
        for subject in subjects:
            where = names.parse_line(subject)
            if where is None:
                continue
            (limit, key), _ = where
            page = await direct_page(self._broker, names.jobs, subject, 1, size=1)
            if page.messages:
                sequence = int(page.messages[0].headers[H_SEQUENCE])
                pattern = names.line(limit, key, "*")
                total, _ = await self._line(limit, key)
                after = await direct_page(self._broker, names.jobs, pattern, sequence + 1, size=1)
                behind = after.left + len(after.messages)
                return limit, _shown(key), max(1, total - behind)
        return None

    # ---- changing

    async def set(
        self,
        name: str,
        *,
        running: int | None = None,
        starts: str | None = None,
        burst: int | None = None,
    ) -> Rule:
        """Set other numbers; without any, those of the code apply again."""
        rule = await self._rule(name)
        chosen: Numbers | None = None
        if running is not None or starts is not None or burst is not None:
            if starts is None and running is None and rule.code.rate:
                starts = starts_text(rule.numbers.rate)
            chosen = numbers(running, starts, burst)
            if bool(chosen.running) != bool(rule.code.running):
                kind = "running" if rule.code.running else "starts"
                raise InvalidInput(f"limit {name!r} is one of {kind}: set that")
            if rule.ordered and chosen.running != 1:
                raise InvalidInput(f"limit {name!r} keeps an order: only one run at a time can")
        return await self._change(name, chosen=chosen)

    async def pause(self, name: str) -> Rule:
        """Let nothing start: running runs finish, and the rest wait."""
        await self._rule(name)
        return await self._change(name, paused=True)

    async def resume(self, name: str) -> Rule:
        """Let runs start again."""
        await self._rule(name)
        return await self._change(name, paused=False)

    async def _change(self, name: str, **changes: object) -> Rule:
        def changed(old: Rule | None) -> Rule:
            return msgspec.structs.replace(old or Rule(), **changes)

        rule = await self.rules.change(check_name(name, "limit"), changed)
        for key in await self._gates(name):
            await self.gates.look(key)
        return rule

    # ---- repairing

    async def repair(self, *, lines: bool = False) -> Sequence[str]:
        """Free places that no run needs, and serve every line; returns what was freed.

        `lines`: also look for lines whose gate is gone.
        """
        try:
            await self.rules.read()
            gates = await self._gates()
        except NotFound:
            return []
        if lines:
            waiting = await in_line(self._broker)
            gates = {GateKey(*where): Gate() for where, _ in waiting} | gates
        gone = await self._gone(gates)
        for key, run, number in gone:
            log.warning("run %s no longer needs its place in limit %s: freed", run, key.limit)
            await self.gates.leave(key, run, number)
        for key, gate in gates.items():
            if not gate.idle or gate == Gate():
                try:
                    await self.gates.look(key)
                except Unreadable as error:
                    log.debug("gate not served: %s", error)
        return [f"{key.limit}: {run}" for key, run, _ in gone]

    async def leaked(self) -> Sequence[str]:
        """The places that runs hold without needing them, according to two checks."""
        try:
            await self.rules.read()
            await self._gone(await self._gates())
            first = {*await self._gone(await self._gates())}
            found = first & {*await self._gone(await self._gates())}
        except NotFound:
            return []
        return sorted(f"{key.limit}: {run}" for key, run, _ in found)

    async def _gone(self, gates: dict[GateKey, Gate]) -> Sequence[_Place]:
        """Places whose runs have ended, or whose holders are lost.

        A run keeps its place in an ordered limit until its next attempt is due.
        """
        now = self._broker.server_now()
        ended: builtins.list[_Place] = []
        lost: Set[_Place] = frozenset()
        for key, gate in gates.items():
            rule, _ = self.rules(key.limit)
            ordered = rule is not None and rule.ordered
            for run, number in gate.held.items():
                entry = await self._client.runs.get(run)
                record = self._client.runs.read(runs.decode, entry) if entry else None
                if entry is not None and record is None:
                    continue  # unreadable: a person has to look at it
                kept = ordered and record is not None and record.state == "failed"
                over = record is not None and (record.terminal or record.message > number)
                if record and over and not record.vacant and not kept:
                    ended.append((key, run, number))
                elif kept and record and record.due > now - DUE_SECONDS:
                    continue
                elif number == 1 and is_event_run(run):
                    continue  # its message is the event itself
                elif record is None or record.state == "failed":
                    lost |= {(key, run, number)}
        again, self._suspects = lost & self._suspects, lost
        if again:
            missing = await self._missing({run for _, run, _ in again})
            ended += [one for one in again if one[1] in missing]
        return ended

    async def _missing(self, wanted: Set[str]) -> Set[str]:
        """Which of these runs have a message neither in a line nor in a queue.

        Messages move in both directions meanwhile, so the lines are read before and after the
        queues.
        """
        wanted = wanted - {run for _, run in await in_line(self._broker)}
        if not wanted:
            return wanted
        found = await self._queued(wanted)
        if found is None:
            log.warning(
                "%d runs that hold places may be lost, and more than %d messages are queued: "
                "too many to search",
                len(wanted),
                SEARCH_MOST,
            )
            return frozenset()
        return wanted - found - {run for _, run in await in_line(self._broker)}

    async def _queued(self, wanted: Set[str]) -> Set[str] | None:
        """Which of these runs have a message in a queue; None if there are too many messages to
        search."""
        (subject,) = self._names.queues()
        found: builtins.set[str] = builtins.set()
        looked = 0
        async for kept in oldest(self._broker, self._names.jobs, subject):
            looked += 1
            if looked > SEARCH_MOST:
                return None
            if kept.run in wanted:
                found.add(kept.run)
        return found


def _shown(key: str) -> str:
    return "" if key == EVERYBODY else decode(key)
