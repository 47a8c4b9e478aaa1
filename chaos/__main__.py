"""`python -m chaos`: break everything for a few minutes and see what was promised.

Exit codes: 0 when every promise was kept, 1 on any violation, 2 on wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from chaos import report
from chaos.drill import Drill, Size
from chaos.plan import ChaosPlan

SMALL = Size(quick=2, steady=1, zoo=1, coordinators=1, rate=15.0, window=10.0)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long faults are made")
    parser.add_argument("--seed", type=int, help="the same seed makes the same faults")
    parser.add_argument("--out", type=Path, help="directory for report, history and logs")
    parser.add_argument("--rate", type=float, help="operations per second")
    parser.add_argument("--small", action="store_true", help="fewer processes")
    parser.add_argument("--fast", action="store_true", help="servers do not sync every write")
    parser.add_argument(
        "--rolling",
        action="store_true",
        help="no accidents: every process and server is restarted in turn, as in a rollout",
    )
    parser.add_argument("--plan", action="store_true", help="print the faults as JSON, make none")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    args = _arguments(given)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    seed = args.seed if args.seed is not None else secrets.randbelow(1_000_000)
    out = args.out or Path(tempfile.mkdtemp(prefix=f"holdfast-chaos-{seed}-"))
    if (out / "history.jsonl").exists():
        say(f"{out} holds the files of another run: choose an empty directory")
        return 2
    size = SMALL if args.small else Size()
    if args.rate:
        size = dataclasses.replace(size, rate=args.rate)
    return asyncio.run(_run(args, seed, out, size))


async def _run(args: argparse.Namespace, seed: int, out: Path, size: Size) -> int:
    began = time.monotonic()
    drill = Drill(
        out,
        size=size,
        fast=args.fast,
        tell=lambda text: say(f"{time.monotonic() - began:6.1f} s  {text}"),
    )
    plan = _plan(args, seed, drill)
    if args.plan:
        say(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode())
        return 0
    say(f"seed {seed}, {len(plan.faults)} faults in {plan.seconds:.0f} s; files in {out}")
    for what in drill.left_out:
        say(f"left out: {what}")
    outcome = await drill.run(plan)
    page = report.write(outcome, out)
    if not outcome.verdict.violations:
        shutil.rmtree(out / "servers", ignore_errors=True)  # gigabytes after an hour
    say(f"\n{report.table(outcome)}\nreport: {page}")
    return 1 if outcome.verdict.violations else 0


def _plan(args: argparse.Namespace, seed: int, drill: Drill) -> ChaosPlan:
    if args.rolling:
        once = ChaosPlan.rolling(drill.victims)
        rounds = max(1, round(args.minutes * 60 / once.seconds))
        return ChaosPlan.rolling(drill.victims, rounds=rounds, seed=seed)
    return ChaosPlan.random(seed, args.minutes * 60, drill.victims)


if __name__ == "__main__":
    sys.exit(main())
