"""The results' part of `docs/benchmarks.md`, between two marks."""

from __future__ import annotations

from pathlib import Path

from benchmarks import report
from benchmarks.results import Results

BEGIN = "<!-- results: written by make bench -->"
END = "<!-- end of results -->"


def renew(page: Path, results: Results) -> None:
    """Put this run's tables into the page; the rest of it stays as it is."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{_body(results)}\n{END}{after}", encoding="utf-8")


def _body(results: Results) -> str:
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    parts = [
        f"Measured on {machine['date']} at commit {machine['commit']}: {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['memory_gb']} GB, {machine['os']}, "
        f"Python {machine['python']}; load before the run {machine['load_before']}. {versions}.",
        report.goals(results),
        report.table(results),
        report.schedules(results),
        report.spread(results),
        report.notes(results),
    ]
    return "\n\n".join(part for part in parts if part)
