"""The programs of the taskiq pages do on a real server what the pages say."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from holdfast.integrations.taskiq import ResilientPullBroker
from holdfast.server import Server
from holdfast.testing import RunningWorker
from tests.docs.pages import ROOT, Page
from tests.integration.taskiq_support import receiving
from tests.support import until


@pytest.fixture
def programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats: Server
) -> Iterator[dict[str, ModuleType]]:
    """Every file of both pages, imported with the test's server; by name."""
    monkeypatch.setenv("NATS_URL", nats.url)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []
    for page in ("taskiq.md", "taskiq-to-jobs.md"):
        for block in Page(ROOT / "docs" / page).blocks("python"):
            if file := block.word("file"):
                (tmp_path / file).write_text(block.text, encoding="utf-8")
                names.append(file.removesuffix(".py"))
    importlib.invalidate_caches()
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


async def test_page_of_taskiq_nats_moves_in_one_line(programs: dict[str, ModuleType]) -> None:
    """Broker, results and schedules of the page work together, and its scheduler has them all."""
    page: Any = programs["resized"]
    async with receiving(page.broker):
        sent = await page.resize.kiq("cat.png")
        assert (await sent.wait_result(timeout=20)).return_value == "cat.png at 200"
        await page.dynamic.startup()
        await page.resize.kicker().schedule_by_interval(page.dynamic, 5, "dog.png")
        [found] = await page.dynamic.get_schedules()
        await page.dynamic.shutdown()
    assert found.args == ["dog.png"]
    assert len(page.scheduler.sources) == 2


async def test_page_of_jobs_forwards_what_is_sent_the_old_way(
    programs: dict[str, ModuleType], nats: Server, namespace: str
) -> None:
    """Old senders, the old worker, and the run that it makes of each message."""
    both: Any = programs["both"]
    broker: ResilientPullBroker = programs["forward"].broker
    async with RunningWorker(both.app, nats.url, namespace) as app, receiving(broker):
        sent = await both.resize_with_taskiq.kiq("cat.png")
        runs = f"resize/{sent.task_id}"
        backend: Any = await app.backend()
        record = await until(lambda: backend.read(runs), 20, "the run")
        await until(lambda: _state(backend, runs), 20, "its end")
    assert record


async def _state(backend: Any, run: str) -> bool:
    record = await backend.read(run)
    return bool(record) and record.state == "done"
