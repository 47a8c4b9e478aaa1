"""Fan-out runs: one command to many agents, its record, its returns and how it ends.

    claimed ──► running ──► complete | failed | partial | timeout | cancelled
       │ owner lost: sent again      │ owner lost: adopted, with a higher epoch
       └──► claimed                  └──► running          the fourth time: failed

`claimed` proves that no agent has received a command: a dispatcher writes `running` before it sends
the first one. Each change of owner is a compare-and-swap, and its revision is the epoch that the
owner's commands carry.

The final status looks at returns only: all returned and were fine → `complete`; all returned, some
failed → `failed`; some returned → `partial`; none → `timeout`. A run that was cancelled before all
had done their work is `cancelled`; one that stopped itself, or was given up, without any return is
`failed`. An agent that could not be reached has not returned.

`FanOut` is the owner's view of one run: which agents get the command, which get it again, and which
are given up. It has no clock and no I/O: its owner passes in each event with its time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

from holdfast.errors import Unreadable
from holdfast.model.codec import DEEPEST, Codec, Count, Instant, Name, Number, RunId, Seconds

FleetStatus = Literal["claimed", "running", "complete", "failed", "partial", "timeout", "cancelled"]
ENDED: Final = frozenset({"complete", "failed", "partial", "timeout", "cancelled"})
MOST_ADOPTIONS: Final = 3
"""A run that has lost more owners than this probably kills them, and fails."""
VERSION: Final = 1
"""Version of the record's format."""
REHEARSE: Final = "rehearse"
"""The function that says what another would do. Agents of an earlier version lack it, so they
cannot mistake a rehearsal for the real command."""
OF_ANOTHER: Final = "the return cannot be read: it names another run or agent than its subject"
MOST_REFUSALS: Final = 1_000
"""Refusals listed in a record, which has to fit into one message."""

Outcome = Literal[
    "ok", "failed", "timeout", "cancelled", "busy", "refused", "interrupted", "skipped"
]


class FleetRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A client's request to a dispatcher. Unknown members of newer versions are ignored."""

    run: str
    """Checked by the dispatcher, so that its answer can say what is wrong."""
    target: str
    function: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    raw: bool = False
    """The arguments are words of a command line, converted by the function's signature."""
    timeout: float = 60.0
    batch: Number = 0
    """How many agents make a wave; 0: all at once."""
    max_failures: Number = 0
    """With waves: how many agents may fail before sending stops."""
    user: str = ""

    def order(self, deadline: float) -> Order:
        """The part of the request that is sent to agents."""
        return Order(self.function, self.args, self.kwargs, self.raw, deadline, self.user)

    @property
    def intent(self) -> tuple[Any, ...]:
        """The parts that must be equal for two requests with one id to be the same."""
        return (
            self.target,
            self.function,
            self.args,
            sorted(self.kwargs.items()),
            self.raw,
            self.timeout,
            self.batch,
            self.max_failures,
        )


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """The payload of a command: what to run. The same for all agents of a run."""

    function: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    raw: bool = False
    deadline: Instant = 0.0
    """By the server's clock."""
    user: str = ""


class FleetRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """A fan-out run's record."""

    request: FleetRequest
    status: str
    """One of `FleetStatus`; a newer version may know more."""
    targets: tuple[Name, ...] = ()
    owner: Name = ""
    """The dispatcher that sends and finishes it; empty: handed over, free to adopt."""
    token: str = ""
    """Unique per write: tells after a lost answer whether the write was ours."""
    epoch: Count = 0
    """The revision of the claim; in the record from an owner's second write on."""
    created: Instant = 0.0
    updated: Instant = 0.0
    deadline: Instant = 0.0
    """The deadline by the server's clock, counted from the claim."""
    adoptions: Count = 0
    offline: tuple[str, ...] = ()
    """Targets without a heartbeat when it was sent. Commands were sent to them as well."""
    cancelled_by: str = ""
    reason: str = ""
    returned: Count = 0
    succeeded: Count = 0
    unreachable: tuple[str, ...] = ()
    unsent: tuple[str, ...] = ()
    """Targets of waves that were not sent."""
    refused: dict[str, str] = {}
    """Unreachable targets that refused, each with the reason in a word; at most a thousand."""
    ended: Instant = 0.0
    v: Count = VERSION

    @property
    def run(self) -> str:
        return self.request.run

    @property
    def over(self) -> bool:
        return self.status in ENDED


class Return(msgspec.Struct, frozen=True, omit_defaults=True):
    """One agent's result of one run."""

    run: RunId
    agent: Name
    outcome: str
    """One of `Outcome`; an unknown one of a newer version is no success."""
    value: Any = None
    error: str = ""
    seconds: Seconds = 0.0
    """How long it took, measured by the agent."""
    at: Instant = 0.0
    epoch: Count = 0
    object: str = ""
    """The name of the value in the object store, when it is too large for a message."""
    note: str = ""
    """What was left out, and why."""

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"


class Ack(msgspec.Struct, frozen=True, omit_defaults=True):
    """An agent's immediate answer to a command."""

    status: str
    """accepted, known, stale, refused; an unknown one of a newer version counts as accepted."""
    epoch: Count
    """The epoch of the command that is acknowledged."""
    newest: Count = 0
    """The highest epoch that the agent has seen of this run."""
    reason: str = ""
    """Why it was refused, in a word."""


class LedgerEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of a run's history in the ledger."""

    run: str
    what: str
    """dispatched, sent, acked, adopted, handed over, cancelled, returned, ended."""
    by: str
    at: Instant
    detail: str = ""


class Cancel(msgspec.Struct, frozen=True):
    """A client's request to stop a run."""

    run: str
    user: str = ""


class FleetReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """A dispatcher's answer to a client."""

    record: FleetRun | None = None
    agents: tuple[str, ...] | None = None
    error: str = ""
    again: bool = False
    """The client should retry shortly."""


class Active(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entry of the index of runs that have not ended."""

    owner: Name
    updated: Instant = 0.0


def final_status(
    targets: int,
    returned: int,
    succeeded: int,
    *,
    cancelled: bool = False,
    cut_short: int = 0,
    given_up: bool = False,
) -> FleetStatus:
    """How a run ends. `cut_short`: returns that only say that they were cancelled."""
    if cancelled and returned - cut_short < targets:
        return "cancelled"
    if returned >= targets:
        return "complete" if succeeded >= targets else "failed"
    if returned:
        return "partial"
    return "failed" if given_up else "timeout"


def adopted(record: FleetRun, *, owner: str, token: str, now: float, lost: bool) -> FleetRun:
    """The record under its next owner; an adoption counts only if the last owner was lost."""
    return msgspec.structs.replace(
        record,
        owner=owner,
        token=token,
        updated=now,
        epoch=0,
        adoptions=record.adoptions + lost,
    )


def exit_code(record: FleetRun) -> int:
    """0: all succeeded, 2: some failed, 3: some did not answer, 4: both; 1 is for other errors.

    Agents that did not get the command count as not answering.
    """
    failed = record.succeeded < record.returned
    missing = record.returned < len(record.targets)
    return (2 if failed else 0) if not missing else (4 if failed else 3)


# ---------------------------------------------------------------- bytes

REQUEST: Final = Codec[FleetRequest](FleetRequest, "the request")
CANCEL: Final = Codec[Cancel](Cancel, "the cancel")
RUN: Final = Codec[FleetRun](FleetRun, "the record of a fan-out run")
RETURN: Final = Codec[Return](Return, "the return")
REPLY: Final = Codec[FleetReply](FleetReply, "the dispatcher's answer")
ACK: Final = Codec[Ack](Ack, "the acknowledgement")
ORDER: Final = Codec[Order](Order, "the command")
ACTIVE: Final = Codec[Active](Active, "an entry of the index of active runs")
VALUE: Final = Codec[Any](Any, "what it returned", deepest=DEEPEST - 1)
"""A return's value; the return itself adds one level."""
FACTS: Final = Codec[dict[str, Any]](dict[str, Any], "the facts")
LEDGER: Final = Codec[LedgerEntry](LedgerEntry, "an entry of the ledger")

decode = RUN.decode
decode_request = REQUEST.decode
decode_return = RETURN.decode
decode_ack = ACK.decode
decode_order = ORDER.decode
decode_active = ACTIVE.decode
decode_ledger = LEDGER.decode


def return_of(run: str, agent: str, body: bytes) -> Return:
    """An agent's return; the subject on which it arrived decides whose it is.

    One that cannot be read counts as failed: the run must end, and no better one will come. So does
    one that names another run or agent (`forged`), which anybody may send where nothing is signed.
    """
    try:
        found = decode_return(body)
    except Unreadable as error:
        return Return(run, agent, "failed", error=str(error))
    if (found.run, found.agent) != (run, agent):
        return Return(run, agent, "failed", error=OF_ANOTHER)
    return found


def forged(given: Return) -> bool:
    """Whether a return named another run or agent than the subject that it came on."""
    return given.error is OF_ANOTHER


def encode(record: FleetRun | FleetRequest | Return | Ack | Order | Active | LedgerEntry) -> bytes:
    """A record as it travels and is stored."""
    return msgspec.json.encode(record)


# ---------------------------------------------------------------- the owner's view


class FanOut:
    """Which agents get the command, which get it again, and which are given up.

    Waves: the next one is due when every target before it has returned or was given up, and at most
    `max_failures` have failed. A target that does not acknowledge in time gets the command once
    more; if it stays silent, or nobody listens on its subject, it is unreachable, unless it returns
    later. After an outage (`start_over`) no target is unreachable for a while: agents that lost the
    same servers reconnect one by one, and commands are repeated until then.
    """

    def __init__(
        self,
        targets: Iterable[str],
        *,
        batch: int = 0,
        max_failures: int = 0,
        ack_seconds: float = 5.0,
        grace_seconds: float = 5.0,
    ) -> None:
        self.targets = tuple(dict.fromkeys(targets))
        self._known = frozenset(self.targets)
        self._batch = batch or len(self.targets)
        self._max_failures = max_failures
        self._waves = bool(batch)
        self._ack_seconds = ack_seconds
        self._grace_seconds = grace_seconds
        self._patient_until = -math.inf
        """Until then, silent agents are not given up."""
        self._next = 0
        """How many targets were processed."""
        self._silent: dict[str, tuple[float, int]] = {}
        """Targets that have not answered: when to act next, and how often the command was sent."""
        self._alarms: list[tuple[float, str]] = []
        """The same as a heap by time, including stale entries: a run with 10,000 targets must not
        scan all of them after each return."""
        self._open: set[str] = set()
        """Targets that got the command and have neither returned nor been given up."""
        self.returned: dict[str, bool] = {}
        """Who has returned, and whether it succeeded."""
        self.succeeded = 0
        self.unreachable: set[str] = set()
        self.stopped = False
        """Too many have failed: no further wave."""
        self.refusals: dict[str, str] = {}
        """Who refused, and why."""

    @property
    def failures(self) -> int:
        return len(self.unreachable) + len(self.returned) - self.succeeded

    @property
    def begun(self) -> bool:
        """Whether this owner has sent anything."""
        return self._next > 0

    @property
    def all_sent(self) -> bool:
        """Whether every target was processed."""
        return self._next >= len(self.targets)

    @property
    def unsent(self) -> tuple[str, ...]:
        """Targets that got no command from this owner and did not return to an earlier one."""
        return tuple(t for t in self.targets[self._next :] if t not in self.returned)

    @property
    def over(self) -> bool:
        """Whether nothing is outstanding and nothing more will be sent."""
        return not self._open and (self.stopped or self.all_sent)

    @property
    def heard_all(self) -> bool:
        """Whether every target that got the command has acknowledged, returned or been given up."""
        return self.begun and not self._silent

    def pending(self) -> list[str]:
        """Targets that got the command and have not returned: a cancel has to reach them."""
        return [t for t in self.targets[: self._next] if t not in self.returned]

    # ---- what happened

    def heard_ack(self, agent: str) -> None:
        """The agent acknowledged, for the first time or again."""
        self._silent.pop(agent, None)
        if agent in self.unreachable:
            self.unreachable.discard(agent)
            self._open.add(agent)

    def heard_return(self, agent: str, ok: bool) -> bool:
        """A return arrived; False if its agent is no target, or has returned before."""
        if agent not in self._known or agent in self.returned:
            return False
        self.returned[agent] = ok
        self.succeeded += ok
        self._silent.pop(agent, None)
        self._open.discard(agent)
        self.unreachable.discard(agent)
        return True

    def heard_nobody(self, agent: str) -> None:
        """Nobody listens on the agent's subject."""
        found = self._silent.get(agent)
        if found and found[1] >= 2:
            self._give_up(agent)

    def heard_refusal(self, agent: str, why: str) -> None:
        """An agent refused. Reported only, because a forged command can cause it too."""
        if agent in self._known:
            self.refusals[agent] = why

    @property
    def refused(self) -> dict[str, str]:
        """Unreachable targets that refused, and why."""
        found = sorted(self.refusals.keys() & self.unreachable)
        return {agent: self.refusals[agent] for agent in found[:MOST_REFUSALS]}

    def stop(self) -> None:
        """Send the command to no further target."""
        self.stopped = True

    def start_over(self, now: float, patient_until: float) -> None:
        """The owner was cut off: send to silent targets again, and give up none before a time."""
        self._patient_until = patient_until
        for agent in self._silent:
            self._wait(agent, now, 1)

    # ---- what to do

    def due(self, now: float) -> tuple[list[str], list[str]]:
        """The targets to send to now: the next wave, and silent ones again."""
        again = []
        while (when := self.next_at()) is not None and when <= now:
            _, agent = heapq.heappop(self._alarms)
            if self._silent[agent][1] >= 2:
                self._give_up(agent)
            else:
                self._wait(agent, now + self._grace_seconds, 1 if now < self._patient_until else 2)
                again.append(agent)
        return self._wave(now), again

    def _wait(self, agent: str, until: float, sent: int) -> None:
        self._silent[agent] = (until, sent)
        heapq.heappush(self._alarms, (until, agent))

    def _wave(self, now: float) -> list[str]:
        if self._open or self.stopped or self.all_sent:
            return []
        if self._waves and self._next and self.failures > self._max_failures:
            self.stopped = True
            return []
        wave: list[str] = []
        while len(wave) < self._batch and not self.all_sent:
            agent = self.targets[self._next]
            self._next += 1
            if agent not in self.returned:
                wave.append(agent)
        for agent in wave:
            self._wait(agent, now + self._ack_seconds, 1)
            self._open.add(agent)
        return wave

    def next_at(self) -> float | None:
        """When to call `due` again, if nothing happens before."""
        while self._alarms:
            when, agent = self._alarms[0]
            if self._silent.get(agent, (None,))[0] == when:
                return when
            heapq.heappop(self._alarms)
        return None

    def _give_up(self, agent: str) -> None:
        self._silent.pop(agent, None)
        self._open.discard(agent)
        self.unreachable.add(agent)
