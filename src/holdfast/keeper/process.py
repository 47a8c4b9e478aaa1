"""The keeper's process: one loop that watches a worker and acts for it.

    worker lives           beats, answers pings, extends what the loop has not extended in time
    loop does not move     the same; says so in the record and in the log
      for the timeout      gives back what the worker has not started
      for blocked_seconds  writes ERROR with the culprit, then kills the worker
    worker is stopped      does nothing, so that the node's timeout applies
    worker is gone         says so at once; gives back what it held, unless a coordinator does
    node is lost           does nothing

The worker's loop extends messages too, and sooner: the keeper sends an extension only if the loop's
is late. So while the worker is healthy, the two never extend the same message.

It ends when the worker ends or closes the control socket. It ignores SIGTERM and Ctrl-C, which are
for the worker: the runs that the worker still finishes must be extended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any, Final

from holdfast.keeper import board as words
from holdfast.keeper.board import QUICK, REVISION_BITS, STARTED, Board, fence
from holdfast.keeper.link import Link, LinkError, LinkMessage
from holdfast.keeper.record import Recorder, after_death
from holdfast.keeper.vitals import LATE_SECONDS, Blockage, Condition, Stacks, Vitals

TICK_SECONDS: Final = 0.2
"""The longest sleep of the loop: well below the second after which a blocked loop is reported."""
EXTEND_TICK_SECONDS: Final = 0.25
"""How often extensions are checked: well within the quarter that `OVERDUE` leaves."""
OVERDUE: Final = 1.5
"""The keeper sends an extension that is late by half its interval. The interval is at most half of
`ack_wait`, so a quarter of `ack_wait` is left."""
ANSWER_SECONDS: Final = 1.0
"""How long to wait for the server's answer before the next attempt: a healthy server answers in
milliseconds."""
TAKEN_SECONDS: Final = 1.0
"""How long a coordinator has to take over what a dead worker held, before the keeper does it. One
that runs needs a fraction of it."""
LAST_SECONDS: Final = 5.0
"""How long a keeper outlives its worker to report the death; also how long it waits to kill."""
UNCLAIMED_MOST: Final = 500
"""Most unclaimed messages in the index; the same as in the worker's own index."""
LET_GO_SECONDS: Final = 2.0
"""How long the keeper stays after the control socket was closed. A worker that lives on wants no
keeper; a dying one may close the socket just before its death is visible."""
REPLIES, PINGS = 1, 2

Waiting = tuple[float, Callable[[LinkMessage | None], None]]


class Keeper:
    """Acts for one worker."""

    def __init__(self, control: socket.socket, plan: dict[str, Any]) -> None:
        self.board = Board(plan["board"], plan["places"])
        self.vitals = Vitals(plan["pid"], self.board)
        self.record = Recorder(plan, self.board, self.ask)
        self._control = control
        self._plan = plan
        self._inbox: str = plan["inbox"]
        subjects = {REPLIES: f"{self._inbox}.*", PINGS: plan["ping_subject"]}
        self._link = Link(plan["login"], plan["name"], subjects)
        self._stacks = Stacks(plan, self.board, self.vitals)
        self._waiting: dict[int, Waiting] = {}
        self._token = 0
        self._input = b""
        self._facts: dict[str, Any] = {}
        self._seen: set[tuple[int, int]] = set()
        self._extend_at = 0.0
        self._blockage: Blockage | None = None
        self._asked = 0.0
        self._gave_back = False
        self._ending: float | None = None
        self._gone: float | None = None
        self._over = False
        self._next_look = 0.0
        self._deaf = False
        self._let_go = 0.0

    # ---- the loop

    def run(self) -> None:
        """Run until the worker has ended or closed the control socket."""
        while not self._over:
            self._wait()
            now = time.monotonic()
            self.board.times[words.KEEPER] = now
            if self._link.keep(now):
                self._extend_at = 0.0
            elif not self._link.up:
                self._fail_waiting()
            self._expire(now)
            if self._gone is not None:
                self._report(now)
            else:
                self._look_after(now)

    def _wait(self) -> None:
        poll = select.poll()
        if not self._deaf:
            poll.register(self._control, select.POLLIN)
        for descriptor in (self.vitals.descriptor, self._stacks.descriptor):
            if descriptor >= 0 and self._gone is None:
                poll.register(descriptor, select.POLLIN)
        if self._link.up:
            poll.register(self._link.fileno(), select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(TICK_SECONDS * 1000)}
        if self._link.up and self._link.fileno() in ready:
            for message in self._link.receive():
                self._take(message)
        if self._stacks.descriptor in ready:
            self._stacks.receive()
        if self._control.fileno() in ready:
            self._hear()
        if self.vitals.descriptor in ready and self._gone is None:
            self._worker_ended()

    def _hear(self) -> None:
        """Read the worker's messages; a closed socket means that it ended, or wants no keeper."""
        data = b""
        with contextlib.suppress(OSError):
            data = self._control.recv(65_536)
        if not data:
            self._deaf = True
            self._let_go = time.monotonic() + LET_GO_SECONDS
            if self.vitals.descriptor < 0:
                self._worker_ended()
            return
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            self._facts |= said.get("facts", {})
            if "ahead" in said:
                self._plan["ahead"] = said["ahead"]
            if "blocked" in said:
                found = said["blocked"]
                self._blockage = Blockage(**found) if found else None
                self.record.next = 0.0

    def _look_after(self, now: float) -> None:
        condition = self.vitals.look(now)
        if condition is Condition.GONE:
            self._worker_ended()
            return
        if self._deaf and now > self._let_go:
            self._over = True
        if condition is Condition.STOPPED or self.record.lost or self._cut_off():
            return
        self.record.trust()
        self._judge(now)
        if self._link.up and now >= self.record.next:
            self.record.write(now, self._fresh(now))
        if now >= self._extend_at:
            self._extend_at = now + EXTEND_TICK_SECONDS
            self._extend(now)

    def _cut_off(self) -> bool:
        """Whether the worker itself cannot reach NATS: then it must not look alive."""
        times = self.board.times
        return bool(times[words.LOOP] - times[words.PROVED] > self._timeout)

    @property
    def _timeout(self) -> float:
        return float(self._plan["timeout_seconds"])

    # ---- requests and answers

    def ask(
        self, subject: str, body: bytes, headers: str, done: Callable[[LinkMessage | None], None]
    ) -> None:
        """Send a request; `done` is called with the answer, or with None if there was none."""
        self._token += 1
        seconds = self._plan["request_seconds"]
        self._waiting[self._token] = (time.monotonic() + seconds, done)
        with contextlib.suppress(LinkError):
            self._link.publish(subject, body, f"{self._inbox}.{self._token}", headers)

    def _take(self, message: LinkMessage) -> None:
        if message.sid == PINGS:
            self._pong(message)
            return
        token = message.subject.rpartition(".")[2]
        if token.isdigit() and (entry := self._waiting.pop(int(token), None)):
            entry[1](message)

    def _expire(self, now: float) -> None:
        for token in [t for t, entry in self._waiting.items() if entry[0] <= now]:
            self._waiting.pop(token)[1](None)

    def _fail_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for _, done in waiting.values():
            done(None)

    def _pong(self, message: LinkMessage) -> None:
        now = time.monotonic()
        if self.record.lost or self.vitals.look(now) in (Condition.STOPPED, Condition.GONE):
            return
        if self._cut_off() or not message.reply:
            return
        held = self._index()
        version = zlib.crc32(json.dumps(held).encode())
        record = self.record.record
        pong = {"beat": record.get("beat", 0), "state": record["state"], "version": version}
        pong |= {name: self._facts[name] for name in ("server", "client") if name in self._facts}
        if message.body != str(version).encode():
            pong["held"] = held
        with contextlib.suppress(LinkError):
            self._link.publish(message.reply, json.dumps(pong).encode())

    # ---- held messages

    def _index(self, *, all_of_it: bool = False) -> list[tuple[str, int, str]]:
        """Messages held since an earlier check, in the form of the node's record."""
        board, claimed, unclaimed = self.board, [], []
        for place, number in board.taken():
            if (place, number) not in self._seen and not all_of_it:
                continue
            marks, reply, run = board.marks[place], board.reply(place), board.run(place)
            if board.held[place] != number or board.gave[place] == number:
                continue
            if revision := marks >> REVISION_BITS:
                claimed.append((run, revision, reply))
            elif marks & QUICK:
                unclaimed.append(("", 0, reply))
        return [*claimed, *unclaimed[:UNCLAIMED_MOST]]

    def _fresh(self, now: float) -> dict[str, Any]:
        trouble = ""
        if self._blockage is not None and self.vitals.silence(now) >= LATE_SECONDS:
            trouble = self._trouble(now)
        return {**self._facts, "held": self._index(), "trouble": trouble}

    def _extend(self, now: float) -> None:
        """Extend the messages that the worker holds and has not extended in time."""
        board, taken = self.board, self.board.taken()
        self._seen = set(taken)
        if not self._link.up or not self.record.trusted(now):
            return
        overdue = self._plan["extend_seconds"] * OVERDUE
        for place, number in taken:
            if now - board.extended[place] < overdue or board.sending[place]:
                continue
            reply = board.reply(place)
            board.sending[place] = number
            fence()
            if board.held[place] != number or board.gave[place] == number:
                board.sending[place] = 0
                continue
            board.extended[place] = now
            board.numbers[words.EXTENSIONS] += 1
            self._send(reply, self._plan["progress"], place)

    def _send(self, reply: str, word: str, place: int) -> None:
        """Extend or give back a message; it counts as being sent until the server confirms it."""
        board = self.board

        def confirmed(_: LinkMessage | None) -> None:
            board.sending[place] = 0

        self._token += 1
        self._waiting[self._token] = (time.monotonic() + ANSWER_SECONDS, confirmed)
        try:
            self._link.publish(reply, word.encode(), f"{self._inbox}.{self._token}")
        except LinkError:
            self._waiting.pop(self._token, None)
            confirmed(None)

    # ---- a blocked loop

    def _judge(self, now: float) -> None:
        silence = self.vitals.silence(now)
        if silence < LATE_SECONDS:
            if self._blockage is not None:
                self._blockage, self.record.next = None, 0.0
            self._asked, self._gave_back = 0.0, False
            return
        self._name(now)
        if silence > self._timeout and not self._gave_back:
            self._gave_back = True
            self._give_back_waiting()
        limit = self._plan["blocked_seconds"]
        if limit and silence > limit:
            self._end(now)

    def _name(self, now: float) -> None:
        """Find the culprit while the interpreter is held; else the worker's own thread does."""
        if self._blockage is not None:
            return
        if now - self.board.times[words.THREAD] < LATE_SECONDS:
            return
        if not self._asked:
            self._asked = now
        elif self._asked > 0 and now - self._asked > LATE_SECONDS:
            self._asked = -now
            self._stacks.ask()
        elif self._asked < 0 and now + self._asked > LATE_SECONDS:
            self._blockage = self._stacks.blockage()
            self.record.next = 0.0
            self._log(f"{self._trouble(now)}\n{self._blockage.stack}".rstrip())

    def _trouble(self, now: float) -> str:
        found = self._blockage or Blockage()
        silence = self.vitals.silence(now)
        return f"its event loop has not moved for {silence:.0f} s: {found.describe()}"

    def _log(self, text: str) -> None:
        """Write a line to the worker's log, which a blocked worker cannot do."""
        now = time.time()
        milliseconds = int(now * 1000) % 1000
        if self._plan["log_style"] == "json":
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
            line = json.dumps(
                {
                    "time": f"{stamp}.{milliseconds:03d}Z",
                    "level": "warning",
                    "logger": "holdfast.keeper",
                    "message": text,
                    "node": self._plan["node"],
                }
            )
        else:
            stamp = time.strftime("%H:%M:%S", time.localtime(now))
            line = f"{stamp}.{milliseconds:03d} WARNING keeper: {text}  [node={self._plan['node']}]"
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())

    def _give_back_waiting(self) -> None:
        """Give back messages that were not started."""
        board = self.board
        for place, number in board.taken():
            reply = board.reply(place)
            if board.marks[place] & STARTED or board.sending[place]:
                continue
            board.gave[place] = number
            fence()
            if board.held[place] != number or board.marks[place] & STARTED:
                continue  # the worker has started or released it
            self._send(reply, self._plan["nak"], place)

    def _end(self, now: float) -> None:
        """The worker was blocked for too long: write ERROR, then kill it."""
        if self._ending is not None:
            if now > self._ending:
                self._kill()
            return
        self._ending = now + LAST_SECONDS
        found = self._blockage or Blockage()
        self._log(f"{self._trouble(now)}; the worker is killed")
        changes = {"state": "ERROR", "reason": self._trouble(now), "by": self._plan["node"]}
        changes["culprits"] = list(found.runs)
        self.record.move(changes, lambda _: self._kill())

    def _kill(self) -> None:
        if self._plan["kill"]:
            with contextlib.suppress(OSError):
                self.vitals.kill()
        else:  # a worker embedded in another program: end its node only
            self._worker_ended()

    # ---- a dead worker

    def _worker_ended(self) -> None:
        if self._gone is not None:
            return
        if self.board.numbers[words.ENDING] or self.record.lost:
            self._over = True
            return
        self._gone = time.monotonic()
        record = self.record.record
        before, why = record["state"], "its process is gone: its keeper saw it end"
        if before == "ERROR":
            why = record["reason"]
        after, held = after_death(before), self._index(all_of_it=True)
        changes = {"state": after, "reason": why, "by": self._plan["node"], "held": held}
        self.record.move(changes, self._reported)

    def _report(self, now: float) -> None:
        """Keep trying to report the death, until somebody else has."""
        if self._gone is None or now - self._gone > LAST_SECONDS:
            self._over = True
        elif self._link.up and now >= self.record.next:
            self.record.write(now, {})
        elif self._next_look and now >= self._next_look:
            self._next_look = 0.0
            self.record.move({"by": f"{self._plan['node']}.keeper"}, self._recover)
            self.record.next = 0.0

    def _reported(self, written: bool) -> None:
        if not written:
            self._finish()
            return
        self.record.next = float("inf")
        self._next_look = time.monotonic() + TAKEN_SECONDS

    def _recover(self, ours: bool) -> None:
        """No coordinator has taken over: give back what the worker held."""
        if ours:
            for place, number in self.board.taken():
                reply = self.board.reply(place)
                if self.board.gave[place] != number:
                    with contextlib.suppress(LinkError):
                        self._link.publish(reply, self._plan["nak"].encode())
            self._link.flush(LATE_SECONDS)
        self._finish()

    def _finish(self) -> None:
        """The end is reported; a worker that is alive after all must learn of it."""
        self.board.numbers[words.LOST] = 1
        self._over = True


def main() -> None:
    """Run the keeper of the worker that started this process."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    data = b""
    while b"\n" not in data:
        more = control.recv(65_536)
        if not more:
            return
        data += more
    first, _, rest = data.partition(b"\n")
    keeper = Keeper(control, json.loads(first))
    keeper._input = rest
    keeper.run()


if __name__ == "__main__":
    main()
