"""What users may import is listed on one page, and nothing written for users imports more."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import django
import pytest
from django.conf import settings

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "api.md"

settings.configure(INSTALLED_APPS=["holdfast.integrations.django"])  # its models need a project
django.setup()

_SECTION = re.compile(r"^## `(holdfast[\w.]*)`$", re.MULTILINE)
_NAME = re.compile(r"^\| `(\w+)`", re.MULTILINE)
_IMPORT = re.compile(r"^\s*from (holdfast[\w.]*) import (\([^)]*\)|[^\n#]*)", re.MULTILINE)


@cache
def public() -> dict[str, set[str]]:
    """The names of the page, by import path."""
    parts = _SECTION.split(PAGE.read_text(encoding="utf-8"))
    return {m: set(_NAME.findall(text)) for m, text in zip(parts[1::2], parts[2::2], strict=True)}


def written_for_users() -> Iterator[Path]:
    """Every text with code that a user reads or starts from."""
    yield ROOT / "README.md"
    yield from (p for p in (ROOT / "docs").rglob("*.md") if "decisions" not in p.parts)
    yield from (ROOT / "examples").rglob("*.py")
    yield from (ROOT / "apps").rglob("*.py")
    yield from (ROOT / "src" / "holdfast" / "deploy" / "templates").rglob("*.jinja")


@pytest.mark.parametrize("path", list(written_for_users()), ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_import_public_names_only(path: Path) -> None:
    """Docs, examples, the scaffold and the uptime monitor use what the page lists."""
    for module, names in _IMPORT.findall(path.read_text(encoding="utf-8")):
        if all(f"{module}.{name.strip()}" in public() for name in names.split(",")):
            continue
        assert module in public(), f"{module} is not on {PAGE.name}"
        for name in re.findall(r"(\w+)(?: as \w+)?", names):
            known = public()[module] | {m.rpartition(".")[2] for m in public()}
            assert name in known, f"{module}.{name} is not on {PAGE.name}"


@pytest.mark.parametrize("module", list(public()))
def test_page_lists_what_a_module_exports(module: str) -> None:
    """Every name of the page exists, and every exported name is on the page."""
    found = importlib.import_module(module)
    missing = {name for name in public()[module] if not hasattr(found, name)}
    assert not missing, f"{module} has no {missing}"
    exported = {n for n in getattr(found, "__all__", ()) if not n.startswith("_")}
    if module == "holdfast.errors":
        body: list[Any] = ast.parse(inspect.getsource(found)).body
        exported = {n.name for n in body if _is_class(n)}
    assert exported <= public()[module], f"{PAGE.name} lacks {exported - public()[module]}"


def _is_class(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef)


@pytest.mark.parametrize(
    ("module", "name"), [(m, n) for m in public() for n in sorted(public()[m])]
)
def test_public_name_has_a_docstring(module: str, name: str) -> None:
    """A public class or function, and each public method, says what it does."""
    found = getattr(importlib.import_module(module), name)
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        return
    assert inspect.getdoc(found), f"{module}.{name}"
    for method, value in vars(found).items() if inspect.isclass(found) else ():
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if inspect.isfunction(inner) and not method.startswith("_"):
            assert inspect.getdoc(inner), f"{module}.{name}.{method} has no docstring"
