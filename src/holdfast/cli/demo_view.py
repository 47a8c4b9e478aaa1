"""How the demo's board is drawn: a live picture on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from holdfast.cli.common import say
from holdfast.cli.demo_board import Board
from holdfast.visible import one_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

COLUMNS = ("waiting", "running", "done", "retries", "crashes", "dead", "duplicates")
HEADINGS = ("job", *COLUMNS[:-1], "duplicates suppressed")


class View(Protocol):
    """Shows a board again and again."""

    def show(self, board: Board, processes: Sequence[str], seconds: float) -> None:
        """Show how it is now."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def open_view(title: str) -> View:
    """A live picture when somebody looks at a terminal."""
    return Picture(title) if sys.stdout.isatty() else Lines(title)


def summary(board: Board) -> str:
    """The line that matters."""
    return (
        f"accepted {board.accepted}, ended {board.ended}, under way {board.under_way}, "
        f"workers killed {board.kills}, lost: {board.lost}"
    )


class Lines:
    """One line for each happening, and one for the numbers each time."""

    def __init__(self, title: str) -> None:
        self._title = title

    def __enter__(self) -> Self:
        say(self._title)
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def show(self, board: Board, processes: Sequence[str], seconds: float) -> None:
        news, board.news[:] = list(board.news), []
        for text in news:
            say(f"{seconds:6.1f}s  * {text}")
        totals = {name: sum(getattr(t, name) for t in board.jobs.values()) for name in COLUMNS}
        numbers = ", ".join(f"{name} {count}" for name, count in totals.items())
        say(f"{seconds:6.1f}s  {summary(board)} ({numbers})")


class Picture:
    """A table that stays in its place, with the latest happenings below it."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._live: Live | None = None

    def __enter__(self) -> Self:
        from rich.live import Live

        self._live = Live(auto_refresh=False)
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, board: Board, processes: Sequence[str], seconds: float) -> None:
        board.news.clear()
        if self._live:
            self._live.update(self._draw(board, processes, seconds), refresh=True)

    def _draw(self, board: Board, processes: Sequence[str], seconds: float) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        table = Table(expand=True)
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if heading == "job" else "right")
        for job, tally in board.jobs.items():
            table.add_row(Text(one_line(job)), *(str(getattr(tally, name)) for name in COLUMNS))
        colour = "bold red" if board.lost else "bold green"
        happenings = Text(
            "\n".join(map(one_line, board.happenings)) or "nothing yet", overflow="ellipsis"
        )
        return Group(
            Text(f"{self._title}   {seconds:.0f} s"),
            Text(one_line("   ".join(processes))),
            table,
            Text(summary(board), style=colour),
            Panel(happenings, title="what happened", title_align="left"),
            Text("Ctrl-C stops everything."),
        )
