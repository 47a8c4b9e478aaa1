"""Every `holdfast …` that the documentation tells somebody to type is a command that exists."""

from __future__ import annotations

import re
import shlex
from functools import cache
from typing import Any

import pytest
import typer

from holdfast.cli import build
from tests.docs.pages import ROOT, Page, pages

SHELLS = ("sh", "bash", "console", "shell", "")
TYPED_LINE = re.compile(r"(\$ )?([A-Z_]+=\S* )*holdfast ")
STOPS = frozenset({"|", "||", "&&", "&", ";", ">", ">>", "<", "2>", "2>&1"})


def _commands(text: str) -> list[list[str]]:
    """The words of each `holdfast …` in a shell block: up to a pipe, without prompt and comment."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        if prompt := TYPED_LINE.match(line):
            words = shlex.split(line[prompt.end() :], comments=True)
            end = next((n for n, word in enumerate(words) if word in STOPS), len(words))
            found.append(words[:end])
    return found


TYPED = [
    (page, block.line, words)
    for page in pages()
    for block in page.blocks(*SHELLS)
    for words in _commands(block.text)
]


@cache
def _root() -> Any:
    return typer.main.get_command(build())


def _parse(command: Any, name: str, words: list[str], parent: Any = None) -> None:
    """Parse as the command line would, down to the last verb, and execute nothing."""
    context = command.make_context(name, list(words), parent=parent)
    if hasattr(command, "commands"):
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if not rest and command.invoke_without_command:
            return  # a noun that is a command too
        verb, inner, inner_words = command.resolve_command(context, rest)
        _parse(inner, verb, inner_words, context)


@pytest.mark.parametrize(
    ("page", "line", "words"), TYPED, ids=[f"{p.name}:{n}-{' '.join(w[:2])}" for p, n, w in TYPED]
)
def test_command_parses(page: Page, line: int, words: list[str]) -> None:
    """The command, its arguments and its options exist and take such values."""
    try:
        _parse(_root(), "holdfast", words)
    except typer.Exit:
        return  # --version and --help have said what they had to say
    except Exception as error:  # noqa: BLE001 - typer's own errors are not public
        told = getattr(error, "message", None) or str(error) or type(error).__name__
        pytest.fail(f"{page.name}:{line}: holdfast {' '.join(words)}: {told}")


def test_make_targets_exist() -> None:
    """Every `make …` that the documentation names is a target, here or in a new project."""
    project = ROOT / "src" / "holdfast" / "deploy" / "templates" / "project" / "Makefile.jinja"
    rules = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "Makefile", project))
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", rules, re.MULTILINE))
    for page in pages():
        named = re.findall(r"(?:`|^\$? ?)make ([a-z][a-z0-9-]*)", page.text, re.MULTILINE)
        assert set(named) <= targets, page.name


def test_shell_blocks_are_recognised() -> None:
    """Pipes, comments, variables and continued lines do not hide a command from the test."""
    text = (
        "# a comment\n$ holdfast dead list --json | jq length\n"
        "A=1 holdfast runs \\\n  list\nmake demo\n"
    )
    assert _commands(text) == [["dead", "list", "--json"], ["runs", "list"]]
