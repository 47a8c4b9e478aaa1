"""Every link leads somewhere, and every test that proves a promise exists."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.pages import ROOT, Page, pages

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
TEST = re.compile(r"\btests/[\w/]+\.py::\w+")
FILE = re.compile(r"`((?:src|tests|tools|docs|benchmarks)/[\w./-]+\.(?:py|md|toml))`")


@lru_cache
def _anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as they are made on the usual hosts."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", Page(path).without_blocks, re.MULTILINE):
        text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_page_links_resolve(page: Page) -> None:
    """A link inside the documentation names a file that exists, and a heading that it has."""
    for target in LINK.findall(page.prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = unquote(target).partition("#")
        path = (page.path.parent / name).resolve() if name else page.path
        assert path.exists(), f"{page.name}: {target} does not exist"
        assert path.is_relative_to(ROOT), f"{page.name}: {target} is outside"
        if anchor and path.suffix == ".md":
            assert anchor in _anchors(path), f"{page.name}: {target} has no such heading"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_page_names_tests_and_files_that_exist(page: Page) -> None:
    """`tests/…::name` is a test of that name, and a file in code marks is a file."""
    for name in TEST.findall(page.text):
        path, _, function = name.partition("::")
        assert function in _functions(ROOT / path), f"{page.name}: {name} does not exist"
    for name in FILE.findall(page.text):
        assert (ROOT / name).exists(), f"{page.name}: {name} does not exist"


def test_architecture_names_files_that_exist() -> None:
    """Where the page says that something is, there is a file."""
    page = Page(ROOT / "docs" / "architecture.md")
    found = re.findall(r"`([\w/]+\.py)`", page.text)
    assert len(found) > 50
    missing = [f for f in found if not any((ROOT / d / f).exists() for d in ("src/holdfast", "."))]
    assert not missing


@lru_cache
def _functions(path: Path) -> set[str]:
    if not path.exists():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_page_is_reached_from_the_index() -> None:
    """Nobody has to guess a page's name: the index of its directory links to it."""
    for index in (ROOT / "docs" / "index.md", ROOT / "docs" / "decisions" / "index.md"):
        linked = {unquote(t).partition("#")[0] for t in LINK.findall(Page(index).prose)}
        missing = {p.name for p in index.parent.glob("*.md")} - linked - {"index.md"}
        assert not missing, f"{index.relative_to(ROOT)} lacks {', '.join(sorted(missing))}"
    operations = ROOT / "docs" / "operations.md"
    linked = {unquote(t).partition("#")[0] for t in LINK.findall(Page(operations).prose)}
    below = {f"operations/{p.name}" for p in (ROOT / "docs" / "operations").glob("*.md")}
    assert below <= linked, f"docs/operations.md lacks {', '.join(sorted(below - linked))}"
