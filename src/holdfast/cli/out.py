"""What commands print: results on standard output, remarks on standard error, JSON with `--json`.

Only this module prints. What it prints may be untrusted, so characters that control a terminal are
shown as escapes (`holdfast.visible`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer

from holdfast import visible
from holdfast.cli.options import given
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.status.operators import Action, Operator

P = ParamSpec("P")
Item = TypeVar("Item")


# ---- results


def as_json(value: Any) -> bool:
    """Print a result as JSON if that was asked for; else the caller prints it for people."""
    if given().json:
        emit(value)
    return bool(given().json)


def result(value: Any, text: str) -> None:
    """Print a result: as JSON, or as a line for people."""
    if not as_json(value):
        say(text)


def lines(values: Iterable[object]) -> None:
    """Print a result of several texts: as JSON, or one per line."""
    texts = [str(value) for value in values]
    if not as_json(texts):
        for text in texts:
            say(text)


def listing(
    found: Sequence[Item],
    *columns: str | tuple[str, Callable[[Item], Any]],
    empty: str = "nothing found",
) -> None:
    """Print what was found: as JSON, or as a table.

    A column is the name of an attribute, or a title and a function of the item.
    """
    if as_json(found):
        return
    titles = [c.replace("_", " ") if isinstance(c, str) else c[0] for c in columns]
    table(titles, ([_of(item, c) for c in columns] for item in found), empty=empty)


def _of(item: Item, column: str | tuple[str, Callable[[Item], Any]]) -> Any:
    return getattr(item, column) if isinstance(column, str) else column[1](item)


def emit(value: Any) -> None:
    """Print a value as JSON: records, dataclasses, lists, plain values."""
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    print(visible.json_text(text.decode()), flush=True)


def emit_line(value: Any) -> None:
    """Print a value as one line of JSON, as one of many."""
    import msgspec

    print(visible.json_text(msgspec.json.encode(value).decode()), flush=True)


def say(text: str, *, colour: tuple[int, str] | None = None) -> None:
    """Print a line of the result; on a terminal, its first characters in a colour."""
    if colour and sys.stdout.isatty():
        first, rest = text[: colour[0]], text[colour[0] :]
        print(typer.style(visible.one_line(first), fg=colour[1]) + visible.one_line(rest))
    else:
        print(visible.one_line(text), flush=True)


def block(text: str) -> None:
    """Print a multi-line part of the result."""
    print(visible.block(text), flush=True)


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str = "") -> None:
    """Print rows: a drawn table on a terminal, plain aligned text into a pipe or file."""
    texts = [[_cell(value) for value in row] for row in rows]
    if not texts:
        note(empty or "nothing found")
    elif sys.stdout.isatty():
        _draw(headers, texts)
    else:
        _align(headers, texts)


def _cell(value: Any) -> str:
    """A value on one line: whitespace is collapsed."""
    return "" if value is None else " ".join(visible.block(value).split())


def _align(headers: Sequence[str], rows: list[list[str]]) -> None:
    lines = [[h.upper() for h in headers], *rows]
    widths = [max(len(line[n]) for line in lines) for n in range(len(headers))]
    for line in lines:
        print("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip())


def _draw(headers: Sequence[str], rows: list[list[str]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE, pad_edge=False)
    for header in headers:
        drawn.add_column(header, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    Console().print(drawn)


def pairs(facts: Iterable[tuple[str, Any]]) -> None:
    """Print facts one per line, leaving out those without a value."""
    told = [(name, value) for name, value in facts if value not in (None, "", [], {})]
    shown = [(visible.one_line(name), _cell(value)) for name, value in told]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        print(f"{name.ljust(width)}  {value}", flush=True)


def clock_time(at: float) -> str:
    """An instant for people: UTC, to the second."""
    from holdfast.clock import rfc3339

    return rfc3339(at)[:19].replace("T", " ") if at else ""


def age(seconds: float | None) -> str:
    """How long something has lasted, for people."""
    from holdfast import durations

    return "" if seconds is None else durations.text(round(max(0.0, seconds), 1))


def shortened(text: str, most: int = 60) -> str:
    """The first line of a text, cut to fit a table."""
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= most else line[: most - 1] + "…"


# ---- remarks and questions


def note(text: str, *, lines: bool = False) -> None:
    """A remark that is not part of the result; on one line unless `lines` is set."""
    print((visible.block if lines else visible.one_line)(text), file=sys.stderr)


def complain(text: str) -> None:
    """Print an error as one line on standard error."""
    print(f"error: {_cell(text)}", file=sys.stderr)


def confirm(question: str) -> None:
    """Ask before something that cannot be undone; refuse without a terminal to ask on."""
    if not sys.stdin.isatty():
        raise HoldfastError(f"{question} No terminal to confirm on; pass --yes")
    typer.confirm(visible.one_line(question), abort=True, err=True)


async def confirm_action(
    action: Action[P, Any], by: Operator, *args: P.args, **kwargs: P.kwargs
) -> None:
    """Show what an action would do, and ask for confirmation."""
    preview = await action.preview(by, *args, **kwargs)
    for line in (*preview.effects, *preview.listed):
        note(line)
    confirm(preview.title)


class ProgressList(list[Item]):
    """A list that somebody fills, shown as a progress bar if standard error is a terminal."""

    def __init__(self, total: int, label: str) -> None:
        super().__init__()
        self._bar = typer.progressbar(length=total, label=label, file=sys.stderr)
        self._shown = sys.stderr.isatty() and total > 1

    def __enter__(self) -> ProgressList[Item]:
        if self._shown:
            self._bar.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._shown:
            self._bar.__exit__(*exc)

    def append(self, item: Item) -> None:
        super().append(item)
        if self._shown:
            self._bar.update(1)
