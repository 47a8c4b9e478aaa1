"""The node's record, written by its keeper.

The rules are those of `holdfast.ownership.heartbeat`, which explains them: each write expects the
revision of the last one; after a rejected write the record is read. If somebody else has ended it,
the node is lost. If the worker itself has moved it, its state is adopted. If it has lapsed without
a verdict, it is created again, and trusted only after the worker has checked its claims.

Trust counts from before a confirmed write was sent. Only one write is in progress at a time; one
without an answer is resolved by the next, which is rejected if the first was applied.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, Final

from holdfast.keeper import board as words
from holdfast.keeper.board import Board
from holdfast.keeper.link import LinkMessage

RETRY_SECONDS: Final = 0.5
"""The pause after a write that failed or got no answer: several attempts fit into every timeout."""
STEADY: Final = 0.75
"""The fraction of the timeout without a renewal after which heartbeats no longer count as steady:
leaves a margin, because the record expires at the timeout."""
FORGOTTEN_SECONDS: Final = 1_800.0
"""After this time the node treats itself as lost: a verdict on it may have expired. Half of the
hour for which verdicts are kept."""
ALIVE: Final = frozenset({"CREATED", "RUNNING", "ERROR", "TERMINATING"})
ENDED: Final = frozenset(
    {"DISCONNECTED", "TERMINATED_GRACEFULLY", "TERMINATED_FORCED", "NOT_RUNNING", "INACTIVE"}
)
LATEST: Final = 32_503_680_000
"""The year 3000, as in `model.codec`."""
MOST_BEATS: Final = 2**53
"""The largest number that every JSON reader reads exactly."""
LONGEST_TEXT: Final = 2_000
"""Characters of a reason: it is written again with every heartbeat."""

Ask = Callable[[str, bytes, str, Callable[[LinkMessage | None], None]], None]
Record = dict[str, Any]


class Recorder:
    """Maintains one node's record."""

    def __init__(self, plan: dict[str, Any], board: Board, ask: Ask) -> None:
        self.record: Record = plan["record"]
        self.acknowledged: float = plan["acknowledged"]
        self.next = 0.0
        """When to write next."""
        self._plan = plan
        self._board = board
        self._ask = ask
        self._timeout: float = plan["timeout_seconds"]
        self._revision: int = plan["revision"]
        self._writing = False
        self._move: tuple[Record, Callable[[bool], None]] | None = None
        self._gap = False
        self._confirmed = 0.0
        board.times[words.STEADY] = plan["steady"]
        board.times[words.ACKNOWLEDGED] = self.acknowledged
        board.numbers[words.REVISION] = self._revision

    @property
    def lost(self) -> bool:
        return bool(self._board.numbers[words.LOST])

    def trusted(self, now: float) -> bool:
        """Whether nobody can have seen this node as gone yet."""
        return not self.lost and now - self.acknowledged < self._timeout

    def server_now(self, now: float) -> float:
        """The server's clock, as measured by the worker."""
        return now + float(self._plan["ahead"])

    # ---- writing

    def move(self, changes: Record, done: Callable[[bool], None]) -> None:
        """Write another state as soon as possible; `done` gets whether it was written."""
        self._move = (changes, done)
        self.next = 0.0

    def write(self, now: float, fresh: Record) -> None:
        """Renew the record with fresh values, or make the pending move."""
        if self._writing or self.lost:
            return
        self._writing = True
        self.next = now + self._plan["heartbeat_seconds"]
        record = {**self.record, **fresh, "beat": self.record.get("beat", 0) + 1}
        if self._move:
            record |= {"since": self.server_now(now), **self._move[0]}
        lasting = "ended_ttl" if record["state"] not in ALIVE else "ttl"
        headers = self._plan["headers"].format(expected=self._revision, ttl=self._plan[lasting])
        body = json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode()

        def answered(answer: LinkMessage | None) -> None:
            self._answered(record, now, answer)

        self._ask(self._plan["record_subject"], body, headers, answered)

    def _answered(self, record: Record, sent: float, answer: LinkMessage | None) -> None:
        self._writing = False
        found = _read(answer)
        if found is None:
            self.next = min(self.next, sent + RETRY_SECONDS)
        elif found.get("error"):
            self.next = min(self.next, sent + RETRY_SECONDS)
            if found["error"].get("err_code") in self._plan["refused"]:
                self._resolve()
        else:
            self._revision = int(found["seq"])
            self._board.numbers[words.REVISION] = self._revision
            self._written(record, sent)

    def _written(self, record: Record, sent: float) -> None:
        before, self.record = self.record, record
        if self._gap:
            self._gap = False
            self._board.numbers[words.GAP] += 1
            self._board.times[words.STEADY] = sent  # a new bucket lacks the records of others too
        self._confirmed = sent
        self.trust()
        move, self._move = self._move, None
        if move and record["state"] == move[0].get("state", record["state"]):
            if record["state"] != before["state"]:
                self._ledger(before, record)
            move[1](True)
        elif move:
            self._move = move  # it came while another write was in progress
            self.next = 0.0

    def trust(self) -> None:
        """Count the last confirmed write, unless claims have to be checked first."""
        board = self._board
        if self._confirmed <= self.acknowledged:
            return
        if board.numbers[words.GAP] != board.numbers[words.VERIFIED]:
            return
        if self._confirmed - self.acknowledged > self._timeout * STEADY:
            board.times[words.STEADY] = self._confirmed
        self.acknowledged = self._confirmed
        board.times[words.ACKNOWLEDGED] = self.acknowledged

    def _ledger(self, before: Record, after: Record) -> None:
        step = {
            "node": after["id"],
            "role": after["role"],
            "group": after.get("group", ""),
            "before": before["state"],
            "after": after["state"],
            "reason": after["reason"],
            "by": after["by"],
            "at": after["since"],
            "host": after.get("host", ""),
            "pid": after.get("pid", 0),
        }
        self._ask(self._plan["log_subject"], json.dumps(step).encode(), "", lambda _: None)

    # ---- conflicts

    def _resolve(self) -> None:
        self._writing = True
        question = json.dumps({"last_by_subj": self._plan["record_subject"]}).encode()
        self._ask(self._plan["read_subject"], question, "", self._found)

    def _found(self, answer: LinkMessage | None) -> None:
        self._writing = False
        found = _read(answer)
        if found is None:
            return
        if error := found.get("error"):
            if error.get("code") == 404 and "stream" not in str(error.get("description")):
                self._vanished()
            return
        message = found["message"]
        if any(mark in base64.b64decode(message.get("hdrs", "")) for mark in self._markers()):
            self._vanished()
            return
        other = _verdict(base64.b64decode(message.get("data", "")))
        if other.get("state", "CREATED") not in ALIVE:
            self._ended(other)
            return
        self._revision = int(message["seq"])
        for name in ("state", "reason", "since", "by"):
            if name in other:
                self.record[name] = other[name]
        self.record["beat"] = max(self.record.get("beat", 0), other.get("beat", 0))
        self.next = 0.0

    def _markers(self) -> list[bytes]:
        return [name.encode() for name in self._plan["markers"]]

    def _vanished(self) -> None:
        silent = self._confirmed and self._board.times[words.KEEPER] - self._confirmed
        if silent and silent > FORGOTTEN_SECONDS:
            self._board.numbers[words.LOST] = 1
            return
        self._revision, self._gap, self.next = 0, True, 0.0

    def _ended(self, other: Record) -> None:
        self._board.numbers[words.LOST] = 1
        self.record["state"] = other["state"]
        self.record["by"] = other.get("by", "")
        move, self._move = self._move, None
        if move:
            move[1](False)


def after_death(state: str) -> str:
    """The state of a node whose process ended in this one, as in `model.lifecycle`."""
    return "DISCONNECTED" if state in ("CREATED", "RUNNING") else "NOT_RUNNING"


def _verdict(data: bytes) -> Record:
    """A record written by somebody else; empty if it is unreadable.

    The keeper has no codec, to stay small: only these fields are used, and each is checked. An
    unreadable record is no verdict; our next write replaces it.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    state, since, beat = found.get("state", "CREATED"), found.get("since", 0), found.get("beat", 0)
    if not isinstance(state, str) or state not in ALIVE | ENDED:
        return {}
    if type(since) not in (int, float) or not 0 <= since < LATEST:
        return {}
    if type(beat) is not int or not 0 <= beat < MOST_BEATS:
        return {}
    texts = {name: str(found[name])[:LONGEST_TEXT] for name in ("reason", "by") if name in found}
    return {name: found[name] for name in ("state", "since", "beat") if name in found} | texts


def _read(answer: LinkMessage | None) -> dict[str, Any] | None:
    """The server's decoded answer; None for no answer or "no responders"."""
    if answer is None or not answer.body:
        return None
    try:
        found = json.loads(answer.body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
