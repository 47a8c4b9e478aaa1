"""What Holdfast sets out to reach, as ratios inside one run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.measures import MORE_IS_BETTER
from benchmarks.results import Results

PEERS = ("taskiq-nats", "faststream", "taskiq-redis", "celery", "dramatiq", "arq")
ASYNC_PEERS = ("taskiq-nats", "faststream", "taskiq-redis", "arq")


@dataclass(frozen=True)
class Goal:
    """A figure with its limit."""

    text: str
    limit: float
    found: Callable[[Results], float | None]
    at_most: bool = False
    unit: str = "×"

    def reached(self, results: Results) -> bool | None:
        """None when it could not be measured."""
        value = self.found(results)
        if value is None:
            return None
        return value <= self.limit if self.at_most else value >= self.limit


def _ratio(above: float | None, below: float | None) -> float | None:
    if above is None or not below:
        return None
    return above / below


def _mine(measure: str, variant: str) -> Callable[[Results], float | None]:
    return lambda results: results.value(measure, "holdfast", variant)


def _against(measure: str, variant: str, system: str) -> Callable[[Results], float | None]:
    """Against another system as it starts."""
    return lambda results: results.ratio(measure, ("holdfast", variant), (system, "default"))


def _best_peer(results: Results, measure: str, peers: tuple[str, ...] = PEERS) -> float | None:
    found = [results.best(measure, peer, results.variants(peer)) for peer in peers]
    values = [value for value in found if value is not None]
    if not values:
        return None
    return max(values) if measure in MORE_IS_BETTER else min(values)


def _against_peers(measure: str, variant: str) -> Callable[[Results], float | None]:
    """Against the peer and the variant that come nearest, or are ahead."""

    def found(results: Results) -> float | None:
        ratios = [
            results.ratio(measure, ("holdfast", variant), (peer, other))
            for peer in PEERS
            for other in results.variants(peer)
        ]
        return min((ratio for ratio in ratios if ratio is not None), default=None)

    return found


def _recovery(results: Results) -> float | None:
    mine = results.value("recovery", "holdfast", "effectively_once")
    best = _best_peer(results, "recovery")
    if best is not None and math.isinf(best):
        best = results.most["recovery"]
    return _ratio(best, mine)


def _memory(results: Results) -> float | None:
    mine = results.value("memory_idle", "holdfast", "effectively_once")
    best = _best_peer(results, "memory_idle", ASYNC_PEERS)
    return None if mine is None or best is None else mine - best


def _taskiq(variant: str) -> Callable[[Results], float | None]:
    """The same app on both brokers, with the same batch size."""
    ours, theirs = ("taskiq-holdfast", variant), ("taskiq-nats", variant)
    return lambda results: results.ratio("drain", ours, theirs)


def _two(variant: str) -> Callable[[Results], float | None]:
    return lambda results: _ratio(
        results.value("drain_2", "holdfast", variant), results.value("drain", "holdfast", variant)
    )


GOALS = (
    Goal(
        "drain at_least_once / raw fetch(100) + ack",
        1.3,
        _against("drain", "at_least_once", "raw-fetch"),
    ),
    Goal(
        "drain effectively_once / raw fetch(100) + ack",
        0.6,
        _against("drain", "effectively_once", "raw-fetch"),
    ),
    Goal(
        "drain at_least_once / taskiq-nats as installed",
        10,
        _against("drain", "at_least_once", "taskiq-nats"),
    ),
    Goal(
        "drain at_least_once / best-tuned peer",
        4,
        _against_peers("drain", "at_least_once"),
    ),
    Goal(
        "drain effectively_once / best-tuned peer",
        2,
        _against_peers("drain", "effectively_once"),
    ),
    Goal(
        "drain at_least_once of plain functions / of async ones",
        0.6,
        lambda results: results.ratio(
            "drain", ("holdfast", "at_least_once, def"), ("holdfast", "at_least_once")
        ),
    ),
    Goal("drain at_least_once, synced", 10_000, _mine("drain", "at_least_once+always"), unit="/s"),
    Goal(
        "drain effectively_once, synced",
        8_000,
        _mine("drain", "effectively_once+always"),
        unit="/s",
    ),
    *(
        Goal(f"drain {mode}: two processes / one", 1, _two(mode))
        for mode in ("at_least_once", "effectively_once")
    ),
    Goal(
        "bulk enqueue / raw publish_async",
        0.8,
        _against("enqueue_bulk", "effectively_once", "raw-fetch"),
    ),
    Goal(
        "latency p50 effectively_once / raw fetch loop",
        1.5,
        _against("latency_p50", "effectively_once", "raw-fetch"),
        at_most=True,
    ),
    Goal(
        "latency p50 effectively_once",
        2,
        _mine("latency_p50", "effectively_once"),
        at_most=True,
        unit=" ms",
    ),
    Goal(
        "memory of an idle worker",
        60,
        _mine("memory_idle", "effectively_once"),
        at_most=True,
        unit=" MB",
    ),
    Goal(
        "memory of an idle worker above the leanest asyncio peer",
        20,
        _memory,
        at_most=True,
        unit=" MB",
    ),
    Goal(
        "processor time of an idle worker",
        1,
        _mine("cpu_idle", "effectively_once"),
        at_most=True,
        unit=" %",
    ),
    Goal("recovery of the fastest peer / of Holdfast", 10, _recovery),
    Goal("drain of taskiq on Holdfast / on taskiq-nats, batch 1", 2, _taskiq("default")),
    Goal("drain of taskiq on Holdfast / on taskiq-nats, batch 100", 2, _taskiq("tuned")),
)
