"""The examples of flows do what their pages say."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.errors import RunFailed
from holdfast.testing import memory

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs" / "examples"
COMPARED = ("order_saga", "compared/celery_saga", "compared/temporal_saga", "compared/dbos_saga")


def load(name: str) -> ModuleType:
    """A fresh copy of an example."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


async def test_order_saga_ships_or_undoes() -> None:
    """What was done is undone in reverse order."""
    saga = load("order_saga")
    async with memory(saga.app) as mem:
        good = await saga.order.enqueue("o1", "4242", ["tea", "cup"])
        await mem.drain()
        assert await good.result() == ["parcel of tea", "parcel of cup"]
        saga.ledger.clear()
        bad = await saga.order.enqueue("o2", "4242", ["unicorn"])
        await mem.drain()
        with pytest.raises(RunFailed, match="out of stock"):
            await bad.result()
        assert saga.ledger == ["charge 10 with 0", "refund payment-4242"]


async def test_map_reduce_counts_words(tmp_path: Path) -> None:
    """A child for each file."""
    words = load("map_reduce")
    (tmp_path / "a.md").write_text("tea tea cup")
    (tmp_path / "b.md").write_text("tea pot")
    async with memory(words.app) as mem:
        run = await words.count_all.enqueue(str(tmp_path))
        await mem.drain()
        assert await run.result() == {"tea": 3, "cup": 1, "pot": 1}


async def test_approval_reminds_and_expires() -> None:
    """A week in milliseconds."""
    approval = load("approval")
    async with memory(approval.app) as mem:
        first = await approval.expense.enqueue("e1", 120)
        second = await approval.expense.enqueue("e2", 130)
        await mem.advance("2d")
        await approval.app.publish("decided", {"approved": False}, key="e1", by="ann")
        await mem.advance("8d")
        assert (await first.result(), await second.result()) == ("rejected by ann", "expired")
        assert sorted(approval.mails) == [
            "please decide about e1: 120",
            "please decide about e2: 130",
            "reminder: e1 waits for you",
            "reminder: e2 waits for you",
        ]


async def test_llm_pipeline_retries_and_combines() -> None:
    """An overloaded provider is asked again."""
    llm = load("llm_pipeline")
    async with memory(llm.app) as mem:
        run = await llm.digest.enqueue(["tea", "flaky"])
        await mem.advance("10m")
        assert await run.result() == "TEA FLAKY"
        assert llm.prompts.count("summarise: flaky") == 2


@pytest.mark.parametrize("name", ["order_saga", "map_reduce", "approval", "llm_pipeline"])
def test_page_shows_the_example_as_it_is(name: str) -> None:
    """Nobody copies a program that is not tested."""
    page = (PAGES / f"{name.replace('_', '-')}.md").read_text()
    assert f"```python file={name}.py\n{(HERE / name).with_suffix('.py').read_text()}```" in page


def test_comparison_counts_lines_of_code() -> None:
    """Without docstrings and blank lines, as the page says."""
    counts = [_code_lines((HERE / name).with_suffix(".py").read_text()) for name in COMPARED]
    row = "| lines of code, without blank ones and docstrings | {} | {} | {} | {} |"
    assert row.format(*counts) in (PAGES / "compared.md").read_text()


def _code_lines(text: str) -> int:
    tree = ast.parse(text)
    lines = {n for n, line in enumerate(text.splitlines(), 1) if line.strip()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)
