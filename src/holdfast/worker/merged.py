"""The health and the metrics of several processes as one, on one port.

Each process serves its own on a Unix socket; they are asked when somebody asks us, so that nothing
here is ever old. Ready: all of them are. Metrics: every series of every process, with the label
`process` added; help and type of a metric stand there once. A process that does not answer in time
is a problem of its own and leaves its series out; it never makes the whole answer fail.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from holdfast.health import Health
from holdfast.worker.supervisor import Keeper

ANSWER_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one process said about itself."""

    name: str
    ready: bool
    problems: list[str]
    facts: dict[str, Any]


class Merged:
    """Asks the processes of a supervisor; a process's label is its place among them."""

    def __init__(self, keepers: Sequence[Keeper]) -> None:
        self._keepers = keepers

    async def health(self) -> Health:
        """All processes as one."""
        answers = await asyncio.gather(*(self._ready(keeper) for keeper in self._keepers))
        return Health(
            ready=all(answer.ready for answer in answers),
            problems=[f"{a.name}: {problem}" for a in answers for problem in a.problems],
            metrics=self.metrics,
            facts={"processes": [answer.facts for answer in answers]},
        )

    async def metrics(self) -> bytes:
        """Every series of every process."""
        texts = await asyncio.gather(*(self._metrics(keeper) for keeper in self._keepers))
        return merge(enumerate(texts))

    async def _ready(self, keeper: Keeper) -> Answer:
        name = keeper.spec.name
        if keeper.trouble or keeper.child is None:
            return Answer(name, False, [f"does not run ({keeper.trouble})"], {})
        pid = keeper.child.pid
        if not keeper.up.is_set():
            return Answer(name, False, ["is starting"], {"pid": pid})
        try:
            found = json.loads(await _get(keeper.spec.announces, "/health/ready"))
        except (OSError, TimeoutError, ValueError):
            return Answer(name, False, [f"does not answer (pid {pid})"], {"pid": pid})
        ready, problems = bool(found.pop("ready")), list(found.pop("problems"))
        return Answer(name, ready, problems, {"pid": pid, **found})

    async def _metrics(self, keeper: Keeper) -> str:
        if not keeper.up.is_set():
            return ""
        try:
            return (await _get(keeper.spec.announces, "/metrics")).decode()
        except (OSError, TimeoutError):
            return ""


def merge(texts: Iterable[tuple[int, str]]) -> bytes:
    """Prometheus texts as one, each series with the number of its text as label `process`."""
    families: dict[str, Metric] = {}
    for number, text in texts:
        for family in text_string_to_metric_families(text):
            kept = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {**sample.labels, "process": str(number)}
                kept.add_sample(sample.name, labels, sample.value)
    return generate_latest(cast(CollectorRegistry, _Families(families.values())))


class _Families(Collector):
    """As much of a registry as writing the text needs."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


async def _get(path: Path | None, target: str) -> bytes:
    """The body of a GET over a Unix socket, whatever its status."""
    async with asyncio.timeout(ANSWER_SECONDS):
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            writer.write(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            await writer.drain()
            answer = await reader.read()
        finally:
            writer.close()
    return answer.partition(b"\r\n\r\n")[2]
