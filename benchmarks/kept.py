"""What it costs to keep log lines and payloads: `python -m benchmarks.kept [ROUNDS]`.

Drain and start latency of a job that logs nothing, with everything kept (the default) beside
nothing kept (`run_log = off`, `keep_payload=False`), in turns. Prints medians and their distance.
Exit code 1 if keeping costs more than `MOST` of the drain or of the median latency; the 99th
percentile is printed only, since it says more about the machine.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections import defaultdict

from benchmarks import measures
from benchmarks.plan import holdfast

OFF = {"HOLDFAST_WORKER_RUN_LOG": "off", "BENCH_KEEP": "off"}
SECONDS = 2.0
LATENCIES = 200
MOST = 0.10


def main(rounds: int) -> int:
    subject = next(s for s in holdfast() if s.variant == "effectively_once")
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(rounds):
        for how in ("kept", "off") if number % 2 else ("off", "kept"):
            for name in OFF:
                os.environ.pop(name, None)
            os.environ.update(OFF if how == "off" else {})
            figures = measures.drain(subject, SECONDS) | measures.latency(subject, LATENCIES)
            for measure in ("drain", "latency_p50", "latency_p99"):
                found[measure, how].append(figures[measure])
    costly = []
    for measure in ("drain", "latency_p50", "latency_p99"):
        kept, off = (statistics.median(found[measure, how]) for how in ("kept", "off"))
        unit = measures.UNITS[measure]
        print(f"{measure}: kept {kept:,.2f}, off {off:,.2f} {unit}: {kept / off - 1:+.1%}")
        cost = 1 - kept / off if measure == "drain" else kept / off - 1
        if cost > MOST and measure != "latency_p99":
            costly.append(measure)
    if costly:
        print(f"keeping costs more than {MOST:.0%} of: {', '.join(costly)}")
    return bool(costly)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
