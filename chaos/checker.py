"""The checker: compares what was asked with what happened, after everything has healed.

Violations, each a sentence with the names in it:

* lost        accepted, and an effect of it is missing
* missed      a slot that was due and had no effect
* duplicated  one mark had its effect under two runs, or one epoch was used twice
* phantom     an effect that nobody asked for, or of an operation that was refused
* torn        an operation without answer of which only a part happened
* stale       a settle was accepted from somebody who no longer held the run
* early       a delayed run that started before its time
* wrong       a result that was not written by the attempt that ended the run
* spared      a run that takes every process down was not given up
* unrestored  accepted before a backup, and missing after its restore
* unexplained a handler was started again although nothing had happened to the one before, or a
              process ended by itself
* over        more runs of a limit's key at the same time than it allows (`chaos.limits`)
* overtaken   a run of an ordered key that started before an earlier one was done
* stuck       a flow, or a child of one, that has not ended (`chaos.flows`)
* orphan      a child of a flow that is unknown
* dead        a run was given up
* open        a fault that could not be healed, work that was still waiting at the end, or a place
              in a limit that nobody needs

Attempts may repeat: a crash between an effect and its settle makes the next holder do it again. A
repeat is fine when the previous one failed as intended, or when a fault that may have affected it
lies between the two; any other repeat is a violation.

Pure: all input is values, so it can be run again over the files of a finished run.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from chaos import flows
from chaos.effects import Line
from chaos.fleet import Exit
from chaos.history import Operation
from chaos.limits import NARROW, over, overtaken
from chaos.nemesis import Wound
from chaos.plan import SERVERS
from holdfast.model.run import RunRecord

AFTERMATH_SECONDS: Final = 20.0
"""How long after its end a fault can still cause a new start."""
GIVEN_UP: Final = ("dead", "lost")
EARLY_SECONDS: Final = 0.3
"""How early a delayed run may start: the server's clock is not ours."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken."""

    kind: str
    subject: str
    story: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.subject}: {self.story}"


@dataclass(slots=True)
class Verdict:
    """What the checker found."""

    violations: list[Violation] = field(default_factory=list)
    effects: int = 0
    starts: int = 0
    repeats: Counter[str] = field(default_factory=Counter)
    """Starts beyond the first of a run, by their explanation."""
    repeated_effects: int = 0
    """Repeated effects of the same run: rejected by its id."""
    stale_refused: int = 0
    """Effects with a smaller epoch after a larger one: rejected by the fence."""
    written_off: int = 0
    """Runs that must not start twice, whose worker died: given up, and recorded as such."""
    unknown_applied: int = 0
    """Operations without an answer that did happen."""

    @property
    def repeated_share(self) -> float:
        """The share of starts that were repeats, not counting retries after intended failures."""
        again = sum(self.repeats.values()) - self.repeats["meant to fail"]
        return again / self.starts if self.starts else 0.0

    def add(self, kind: str, subject: str, story: str) -> None:
        self.violations.append(Violation(kind, subject, story))

    @property
    def counts(self) -> Counter[str]:
        """Violations by kind."""
        return Counter(violation.kind for violation in self.violations)


class Checker:
    """Checks one run; call `check` once."""

    def __init__(
        self,
        operations: Iterable[Operation],
        lines: Sequence[Line],
        wounds: Sequence[Wound],
        *,
        exits: Sequence[Exit] = (),
        slots: Iterable[str] = (),
        known: str = "slot ",
        records: Mapping[str, RunRecord] | None = None,
        results: Mapping[str, int] | None = None,
    ) -> None:
        """`slots` are the marks that had to appear; other marks that start with `known` are slots
        too, due after the checked period. `records` are the runs' records, `results` the epochs
        named in large results."""
        self._operations = list(operations)
        self._lines = lines
        self._wounds = wounds
        self._exits = exits
        self._slots = list(slots)
        self._known = known
        self._records = records or {}
        self._results = results or {}
        self.verdict = Verdict()

    def check(self) -> Verdict:
        """Run every check."""
        self._fold()
        self._check_operations()
        self._check_slots()
        self._check_starts()
        self._check_records()
        self._check_exits()
        self._check_limits()
        self._check_flows()
        for wound in self._wounds:
            if wound.error:
                self.verdict.add("open", f"fault {wound.fault.number}", wound.error)
        return self.verdict

    # ---- the effect store

    def _fold(self) -> None:
        """Judge each effect in log order, as the store would."""
        self._applied: dict[str, Line] = {}
        highest: dict[str, int] = {}
        for line in self._lines:
            if line.what != "effect":
                continue
            first = self._applied.get(line.mark)
            if line.epoch < highest.get(line.run, 0):
                self.verdict.stale_refused += 1
            elif first is None:
                self._applied[line.mark] = line
            elif first.run != line.run:
                story = f"its effect came from two runs, {first.run} and {line.run}"
                self.verdict.add("duplicated", line.mark, story)
            elif line.epoch == highest[line.run]:
                story = f"two effects under epoch {line.epoch}"
                self.verdict.add("duplicated", line.mark, story)
            else:
                self.verdict.repeated_effects += 1
            highest[line.run] = max(highest.get(line.run, 0), line.epoch)
        self.verdict.effects = len(self._applied)

    # ---- what was asked

    def _check_operations(self) -> None:
        asked = {mark for operation in self._operations for mark in operation.marks}
        for operation in self._operations:
            if operation.doomed:
                self._check_doomed(operation)
            else:
                self._check_operation(operation)
            self._check_early(operation)
        for mark in self._applied:
            if mark not in asked and not mark.startswith(self._known):
                self.verdict.add("phantom", mark, "nobody asked for it")

    def _check_operation(self, operation: Operation) -> None:
        missing = [mark for mark in operation.marks if mark not in self._applied]
        happened = len(missing) < len(operation.marks)
        if operation.at_most_once and missing and self._written_off(operation):
            self.verdict.written_off += 1
        elif operation.required and missing:
            story = f"accepted as {', '.join(operation.runs) or 'an event'}, never happened"
            self.verdict.add("lost", missing[0], story)
        elif operation.forbidden and happened:
            self.verdict.add(
                "phantom", operation.name, "refused or withdrawn, and happened all the same"
            )
        elif happened and missing and operation.kind != "bulk":
            self.verdict.add("torn", operation.name, f"{', '.join(missing)} did not happen")
        elif happened and not operation.required:
            self.verdict.unknown_applied += 1

    def _check_doomed(self, operation: Operation) -> None:
        if operation.required and not self._written_off(operation):
            self.verdict.add("spared", operation.name, "it was not given up")

    def _written_off(self, operation: Operation) -> bool:
        """Whether a run was given up and that is recorded (or the record was deleted)."""
        records = [self._records.get(run) for run in operation.runs]
        if not any(records) and self._forgotten(operation.invoked):
            return True
        return any(record is not None and record.state in GIVEN_UP for record in records)

    def _forgotten(self, since: float, until: float = math.inf) -> bool:
        """Whether the records of all runs were deleted in that time."""
        dropped = [w for w in self._wounds if w.fault.what == "runs"]
        return any(w.ended >= since and w.began <= until for w in dropped)

    def _check_early(self, operation: Operation) -> None:
        line = self._applied.get(operation.marks[0])
        if line and self._forgotten(operation.invoked, line.at):
            return  # the records say who waits
        if line and line.at < operation.not_before - EARLY_SECONDS:
            story = f"{operation.not_before - line.at:.1f} s before its time"
            self.verdict.add("early", operation.name, story)

    def _check_slots(self) -> None:
        for mark in self._slots:
            if mark not in self._applied:
                self.verdict.add("missed", mark, "it was due, and nothing happened")

    # ---- starts

    def _check_starts(self) -> None:
        by_run: dict[str, list[Line]] = defaultdict(list)
        failed = {(line.run, line.epoch) for line in self._lines if line.what == "fail"}
        for line in self._lines:
            if line.what == "start":
                by_run[line.run].append(line)
        self._starts = by_run
        for run, starts in by_run.items():
            self.verdict.starts += len(starts)
            epochs = Counter(line.epoch for line in starts)
            for epoch, count in epochs.items():
                if count > 1:
                    self.verdict.add("duplicated", run, f"{count} starts under epoch {epoch}")
            for before, after in pairwise(starts):
                self._explain(run, before, after, failed)

    def _explain(self, run: str, before: Line, after: Line, failed: set[tuple[str, int]]) -> None:
        if (run, before.epoch) in failed:
            self.verdict.repeats["meant to fail"] += 1
            return
        since, until = before.at - AFTERMATH_SECONDS, after.at
        mine = {before.member, after.member}
        causes = self._faults(mine, since, until)
        if causes:
            fault = causes[-1].fault
            whose = "its worker" if fault.target in mine else "NATS"
            self.verdict.repeats[f"{fault.kind} of {whose}"] += 1
        elif any(e.member in mine and since <= e.at <= until for e in self._exits):
            self.verdict.repeats["end of its worker"] += 1
        else:
            story = (
                f"{before.mark}: started on {before.member} (epoch {before.epoch}) and "
                f"{after.at - before.at:.1f} s later on {after.member} (epoch {after.epoch})"
            )
            self.verdict.add("unexplained", run, story)

    def _check_exits(self) -> None:
        """A process may only exit after a fault of its own or of the servers."""
        for end in self._exits:
            if end.expected:
                continue
            if not self._faults({end.member}, end.at - AFTERMATH_SECONDS, end.at):
                self.verdict.add("unexplained", end.member, f"it ended with code {end.code}")

    def _check_limits(self) -> None:
        """Records say who holds a claim: where they were deleted, nothing can be said."""
        if self._forgotten(0.0):
            return
        for subject, story in over(self._lines, NARROW):
            self.verdict.add("over", subject, story)
        for subject, story in overtaken(self._operations, self._lines):
            self.verdict.add("overtaken", subject, story)

    def _check_flows(self) -> None:
        whole = not self._forgotten(0.0)
        for violation in flows.astray(self._operations, self._records, whole=whole):
            self.verdict.add(*violation)

    def _faults(self, targets: set[str], since: float, until: float) -> list[Wound]:
        """Faults of these targets or of servers that may have mattered; the targets' own last."""
        found = [w for w in self._wounds if w.began <= until and w.ended >= since]
        servers = [w for w in found if w.fault.role in SERVERS and w.fault.target not in targets]
        return servers + [w for w in found if w.fault.target in targets]

    # ---- records

    def _check_records(self) -> None:
        once = {run for o in self._operations if o.at_most_once for run in o.runs}
        given_up = once | {run for o in self._operations if o.doomed for run in o.runs}
        given_up |= flows.meant_to_fail(self._operations, self._records)
        # If the answer to its sender was lost, only its record says which run it is.
        given_up |= {run for run, record in self._records.items() if record.job == "poison"}
        for run in once:
            if len(self._starts.get(run, ())) > 1:
                self.verdict.add("duplicated", run, "started twice, though at most once")
        for run, record in self._records.items():
            if record.state in GIVEN_UP and run not in given_up:
                self.verdict.add("dead", run, f"{record.state}: {record.error}")
            if record.state != "done":
                continue
            won = max((a.epoch for a in record.attempts if a.outcome == "done"), default=0)
            if self._results.get(run, won) != won:
                story = f"done under epoch {won}, its result is of epoch {self._results[run]}"
                self.verdict.add("wrong", run, story)
            later = [line for line in self._starts.get(run, ()) if line.epoch > won]
            if later:
                story = (
                    f"done under epoch {won}, though {later[0].member} had started it under "
                    f"epoch {later[0].epoch}"
                )
                self.verdict.add("stale", run, story)
