"""What a reader types works as it is written."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import os
import queue
import re
import shlex
import subprocess
import sys
import threading
from contextlib import nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from holdfast.server import Server
from holdfast.testing import RunningWorker
from tests.docs.pages import ROOT, Block, Page, pages

WITH_PYTHON = [page for page in pages() if page.blocks("python")]
KNOWN = ("worker", "fragment", "pytest")
BLOCK_SECONDS = 120


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory in which a page's programs live, as a reader's would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
async def test_page_snippets_run(page: Page, folder: Path, nats: Server, namespace: str) -> None:
    """Every Python block of a page runs, in order, on a real server where it needs one."""
    for block in _before(page):
        (folder / block.word("file")).write_text(block.text, encoding="utf-8")
    imported = set(sys.modules)
    module = sys.modules["page"] = ModuleType("page")
    try:
        for block in page.blocks("python"):
            await _run(block, page, vars(module), folder, nats.url, namespace)
    finally:
        for name in set(sys.modules) - imported:  # two pages may both have a shop.py
            if name == "page" or str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def _before(page: Page) -> list[Block]:
    """The files of earlier chapters, for a chapter of the tutorial."""
    chapters = [p for p in pages() if p.path.parent == page.path.parent and p.path < page.path]
    found = [block for p in chapters for block in p.blocks() if block.word("file")]
    return found if page.path.parent.name == "tutorial" else []


async def _run(
    block: Block, page: Page, names: dict[str, Any], folder: Path, url: str, namespace: str
) -> None:
    if file := block.word("file"):
        (folder / file).write_text(block.text, encoding="utf-8")
        importlib.invalidate_caches()
        sys.modules.pop(file.removesuffix(".py"), None)  # a later block may have a newer one
        names.update(vars(importlib.import_module(file.removesuffix(".py"))))
        return
    code = _compiled(block, page)
    if "fragment" in block.words or "pytest" in block.words:
        return
    working = "worker" in block.words
    async with RunningWorker(names["app"], url, namespace) if working else nullcontext():
        result = eval(code, names)  # noqa: S307 - the documentation is ours
        if inspect.iscoroutine(result):
            async with asyncio.timeout(BLOCK_SECONDS):
                await result


def _compiled(block: Block, page: Page) -> Any:
    """The block's code, with the page's line numbers in its errors."""
    tree = ast.parse(block.text, page.name)
    ast.increment_lineno(tree, block.line - 1)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return compile(tree, page.name, "exec", flags=flags, dont_inherit=True)


def test_blocks_say_how_they_are_tested() -> None:
    """A word after `python` is one that the tests know: a typing error skips nothing."""
    for page in WITH_PYTHON:
        for block in page.blocks("python"):
            unknown = [w for w in block.words if w not in KNOWN and not w.startswith("file=")]
            assert not unknown, f"{page.name}:{block.line}: {unknown}"


def test_test_snippets_pass(folder: Path) -> None:
    """Test modules in the documentation are run by pytest beside the programs that they test."""
    found = 0
    for page in WITH_PYTHON:
        for number, block in enumerate(page.blocks("python")):
            if file := block.word("file"):
                (folder / file).write_text(block.text, encoding="utf-8")
            elif "pytest" in block.words:
                found += 1
                (folder / f"test_{page.path.stem}_{number}.py").write_text(block.text)
    assert found
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "asyncio_mode=auto", str(folder)]
    if not entry_points(group="pytest11", name="holdfast"):  # run from the sources, not installed
        command += ["-p", "holdfast.testing.plugin"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), str(folder)])
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_first_job_works_as_typed(folder: Path) -> None:
    """The README's first job: its file, `holdfast dev`, and the command of the second terminal."""
    page = Page(ROOT / "README.md")
    [program] = [b for b in page.blocks("python") if b.word("file")]
    assert len(program.text.splitlines()) <= 30
    Path(program.word("file")).write_text(program.text, encoding="utf-8")
    lines = [line for block in page.blocks("sh") for line in block.text.splitlines()]
    [start] = [line for line in lines if line.startswith("holdfast dev ")]
    [send] = [line for line in lines if line.startswith("holdfast enqueue ")]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    dev = subprocess.Popen(
        [*_typed(start), "--port", "0"], env=env, stdout=subprocess.PIPE, text=True
    )
    with dev:
        try:
            env |= {"HOLDFAST_NATS_URL": _address(dev)}
            done = subprocess.run(
                _typed(send), env=env, capture_output=True, text=True, timeout=BLOCK_SECONDS
            )
        finally:
            dev.terminate()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == '"cat.png at 200"'
    assert done.stdout.strip() in page.text


def _typed(line: str) -> list[str]:
    """The words of a line, as a shell would hand them to this very Holdfast."""
    command, *words = shlex.split(line)
    assert command == "holdfast"
    return [sys.executable, "-m", "holdfast", *words]


def _address(dev: subprocess.Popen[str]) -> str:
    """Where `holdfast dev` says that its server is."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        assert dev.stdout
        for line in dev.stdout:
            lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    while True:
        if found := re.search(r"nats://[\d.:]+", lines.get(timeout=BLOCK_SECONDS)):
            return found[0]
