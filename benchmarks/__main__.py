"""`make bench`: measure everything, print the table, write `results.json` and the chart."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import chart, document, measures, peers, report, schedules
from benchmarks.measures import Figures
from benchmarks.plan import ROOT, Subject, floors, holdfast
from benchmarks.results import Results, machine
from benchmarks.services import Missing
from benchmarks.stage import Failed

CORE = ("holdfast", "raw-fetch", "raw-callback")
FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.json"
CHART = ROOT / "docs" / "benchmarks.svg"
PAGE = ROOT / "docs" / "benchmarks.md"


@dataclass(frozen=True)
class Extent:
    """How thorough a run is."""

    rounds: int
    """Samples of the floor and of Holdfast, whose ratios are close to each other."""
    other_rounds: int
    """Samples of the rest."""
    seconds: float
    """Length of a sample of throughput."""
    latencies: int
    idle_seconds: float
    recovery_seconds: float
    """After which the wait for a recovery is given up."""
    full: bool = False


QUICK = Extent(3, 1, 1.0, 150, 6.0, 40.0)
FULL = Extent(7, 5, 3.0, 1_000, 30.0, 330.0, full=True)


def main() -> int:
    """Measure, print, write."""
    options = _options()
    extent = FULL if options.full else QUICK
    subjects = [s for s in _subjects() if not options.only or s.system in options.only]
    results = Results(machine(peers.versions()), {"recovery": extent.recovery_seconds})
    results.subjects = [(s.system, s.variant) for s in subjects]
    begin = time.monotonic()
    Bench(extent, subjects, results, options.measures).run()
    print(
        f"\n{report.table(results)}\n\n{report.schedules(results)}\n\n{report.goals(results)}\n\n{report.spread(results)}\n"
    )
    print(report.notes(results))
    print(f"\n{time.monotonic() - begin:.0f} s; load before {results.machine['load_before']}")
    if options.dry:
        return 0
    results.write(RESULTS)
    CHART.write_text(chart.draw(results), encoding="utf-8")
    document.renew(PAGE, results)
    print(f"written: {', '.join(str(p.relative_to(ROOT)) for p in (RESULTS, CHART, PAGE))}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--full", action="store_true", help="more and longer samples")
    parser.add_argument("--only", nargs="*", metavar="SYSTEM", help="only these systems")
    parser.add_argument("--measures", nargs="*", metavar="MEASURE", help="only these measures")
    parser.add_argument("--dry", action="store_true", help="print only, write nothing")
    return parser.parse_args()


def _subjects() -> list[Subject]:
    return [*floors(), *holdfast(), *peers.taskiq_on_holdfast(), *peers.subjects()]


class Bench:
    """Takes the samples: measure by measure, round by round, every system in each round."""

    def __init__(
        self, extent: Extent, subjects: list[Subject], results: Results, only: list[str] | None
    ) -> None:
        self._extent = extent
        self._subjects = subjects
        self._results = results
        self._only = set(only or [])

    def run(self) -> None:
        """Everything."""
        for subject in self._subjects:
            if subject.missing:
                for measure in sorted(subject.measures):
                    self._results.note(subject, measure, subject.missing)
        extent = self._extent
        most, less, few = extent.rounds, (extent.rounds + 1) // 2, extent.other_rounds
        self._rounds("drain", most, lambda s: measures.drain(s, extent.seconds))
        self._rounds("latency", less, lambda s: measures.latency(s, extent.latencies))
        self._rounds("enqueue", less, lambda s: measures.enqueue(s, extent.seconds))
        self._rounds("drain_2", few, lambda s: measures.drain(s, extent.seconds, 2))
        self._rounds("io", few, lambda s: measures.naps(s, extent.seconds))
        self._together("memory_idle", lambda s: measures.idle(s, extent.idle_seconds))
        self._together("recovery", lambda s: measures.recovery(s, extent.recovery_seconds))
        self._rounds("schedules", 1, schedules.schedules)

    def _wanted(self, measure: str) -> list[Subject]:
        if self._only and measure not in self._only:
            return []
        return [
            s
            for s in self._subjects
            if measure in s.measures
            and not s.missing
            and (self._extent.full or measure not in s.in_full)
        ]

    def _rounds(self, measure: str, rounds: int, take: Callable[[Subject], Figures]) -> None:
        for number in range(rounds):
            for subject in self._wanted(measure):
                core = subject.system in CORE and not subject.always
                if core or number < self._extent.other_rounds:
                    self._sample(measure, subject, number, take)

    def _sample(
        self,
        measure: str,
        subject: Subject,
        number: int,
        take: Callable[[Subject], Figures],
        *,
        again: bool = True,
    ) -> None:
        begin = time.monotonic()
        try:
            figures = take(subject)
        except (Failed, Missing) as error:
            _say(f"{measure:<12} {subject.name:<40} {error}")
            if again:
                self._sample(measure, subject, number, take, again=False)
            else:
                self._results.note(subject, measure, str(error))
            return
        self._results.add(subject, figures, number)
        text = ", ".join(f"{m} {report.number(v, m)}" for m, v in figures.items())
        _say(f"{measure:<12} {subject.name:<40} {text}  ({time.monotonic() - begin:.1f} s)")

    def _together(
        self, measure: str, take: Callable[[list[Subject]], dict[str, Figures | str]]
    ) -> None:
        subjects = self._wanted(measure)
        if not subjects:
            return
        _say(f"{measure:<12} {len(subjects)} workers side by side")
        for name, figures in take(subjects).items():
            subject = next(s for s in subjects if s.name == name)
            if isinstance(figures, str):
                self._results.note(subject, measure, figures)
            else:
                self._results.add(subject, figures)
            _say(f"{measure:<12} {name:<40} {figures}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
