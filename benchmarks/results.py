"""Samples, and what is made of them: medians, spreads, rows, notes."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.measures import MORE_IS_BETTER, UNITS, Figures
from benchmarks.plan import Subject

Key = tuple[str, str, str]
"""Measure, system, variant."""


class Results:
    """Everything that a run of the benchmark has found."""

    def __init__(self, machine: dict[str, Any], most: dict[str, float] | None = None) -> None:
        """`most` is where measures were cut off: what took longer is given as that, 'or more'."""
        self.machine = machine
        self.most = most or {}
        self.samples: defaultdict[Key, dict[int, float]] = defaultdict(dict)
        """By round, so that what was measured side by side can be compared."""
        self.notes: dict[Key, str] = {}
        self.subjects: list[tuple[str, str]] = []

    def add(self, subject: Subject, figures: Figures, number: int = 0) -> None:
        """The sample of one round; a measure may give several figures."""
        for measure, value in figures.items():
            self.samples[measure, subject.system, subject.variant][number] = value

    def note(self, subject: Subject, measure: str, text: str) -> None:
        """Why there is no figure."""
        self.notes[measure, subject.system, subject.variant] = text

    def value(self, measure: str, system: str, variant: str) -> float | None:
        """The median; None when it was not measured, infinity when it was cut off."""
        samples = self.samples.get((measure, system, variant))
        return statistics.median(samples.values()) if samples else None

    def ratio(self, measure: str, one: tuple[str, str], other: tuple[str, str]) -> float | None:
        """One subject's figure over another's: the median over the rounds of both."""
        above = self.samples.get((measure, *one), {})
        below = self.samples.get((measure, *other), {})
        common = [above[n] / below[n] for n in above.keys() & below.keys() if below[n]]
        return statistics.median(common) if common else None

    def best(self, measure: str, system: str, variants: list[str]) -> float | None:
        """The best median of several variants."""
        found = [v for name in variants if (v := self.value(measure, system, name)) is not None]
        if not found:
            return None
        return max(found) if measure in MORE_IS_BETTER else min(found)

    def variants(self, system: str) -> list[str]:
        """Of one system, in the order of the plan."""
        return [variant for found, variant in self.subjects if found == system]

    # ---- as JSON

    def document(self) -> dict[str, Any]:
        """`results.json`: rows of medians; beside them the samples, and why some are missing."""
        return {
            "machine": self.machine,
            "rows": [self._row(key) for key in self._keys()],
            "samples": [
                dict(zip(("measure", "system", "variant"), key, strict=True))
                | {"samples": [_finite(v) for v in self.samples[key].values()]}
                for key in self._keys()
                if key in self.samples
            ],
            "notes": [
                dict(zip(("measure", "system", "variant"), key, strict=True)) | {"note": text}
                for key, text in self.notes.items()
            ],
        }

    def _keys(self) -> list[Key]:
        return [
            (measure, system, variant)
            for measure in UNITS
            for system, variant in self.subjects
            if (measure, system, variant) in self.samples
            or (measure, system, variant) in self.notes
        ]

    def _row(self, key: Key) -> dict[str, Any]:
        measure, system, variant = key
        value, unit = self.value(*key), UNITS[measure]
        if value is not None and math.isinf(value):
            value, unit = self.most[measure], f"{unit} or more"
        return {
            "measure": measure,
            "system": system,
            "variant": variant,
            "value": None if value is None else _rounded(value),
            "unit": unit,
        }

    def write(self, path: Path) -> None:
        """Write `results.json`, one row a line so that a diff can be read."""
        document = self.document()
        machine = json.dumps(document.pop("machine"), indent=1, ensure_ascii=False)
        parts = [f'"machine": {machine}']
        for name, rows in document.items():
            lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
            parts.append(f'"{name}": [\n{lines}\n]' if rows else f'"{name}": []')
        path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _rounded(value: float) -> float:
    if abs(value) >= 100:
        return round(value)
    return round(value, 3 - max(1, math.ceil(math.log10(abs(value))) if value else 1))


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else _rounded(value)


def machine(versions: dict[str, str]) -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": _commit(),
        "versions": versions,
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip()
