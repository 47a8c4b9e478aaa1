"""The pages of the documentation, and the code blocks in them.

The words after a block's language say how it is tested:

    ```python              runs, after the blocks before it on the page and in the same namespace;
                           `await` may stand at its top
    ```python worker       the same, while a worker executes the page's `app` on a real server
    ```python file=shop.py is put into a file and imported; its names are there for the next blocks
    ```python pytest       is a test module; pytest must pass it
    ```python fragment     is not a program by itself: it must only be Python

    ```text output         what a reader sees who types the blocks before it, as
                           `make release-check` does; it leaves out ```sh skip, and in
                           ```sh exit=3 a command may end with that code

A line `holdfast …` in a block of `sh`, or of no language, must be a command that exists, with
options that exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = ("configuration.md", "cli.md", "metrics.md")

_FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    words: tuple[str, ...]
    text: str
    line: int

    def word(self, name: str) -> str:
        """The value of `name=value` after the language, or an empty text."""
        return next((w.partition("=")[2] for w in self.words if w.startswith(f"{name}=")), "")


@dataclass(frozen=True)
class Page:
    """A page of the documentation."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def text(self) -> str:
        return _read(self.path)

    def blocks(self, *languages: str) -> list[Block]:
        """Its fenced blocks in some languages, or all."""
        return [b for b in self._blocks() if not languages or b.language in languages]

    def _blocks(self) -> list[Block]:
        found = []
        for match in _FENCE.finditer(self.text):
            language, *words = match[3].split() or [""]
            indent = len(match[1])
            text = "".join(line[indent:] for line in match[4].splitlines(keepends=True))
            line = self.text.count("\n", 0, match.start(4)) + 1
            found.append(Block(language, tuple(words), text, line))
        return found

    @property
    def without_blocks(self) -> str:
        """Its text, with fenced blocks blanked out."""
        return _FENCE.sub(lambda m: "\n" * m[0].count("\n"), self.text)

    @property
    def prose(self) -> str:
        """Its text without any code, fenced or inline."""
        return _CODE.sub(lambda m: "\n" * m[0].count("\n") or " ", self.without_blocks)


@cache
def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def pages() -> list[Page]:
    """Every page."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
    return [Page(path) for path in [*top, *sorted((ROOT / "docs").rglob("*.md"))]]
