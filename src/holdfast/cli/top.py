"""`holdfast top`: a live view of a namespace in the terminal.

Into a pipe or a file, or with --json, it prints one snapshot and ends. On a terminal it uses the
alternate screen, so the scrollback stays as it was, and restores it however it ends. While NATS is
away, the last snapshot stays on the screen, with a line that says how old it is; then it continues
by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

from holdfast.cli import out
from holdfast.cli.command import command, connected
from holdfast.cli.options import given, option
from holdfast.errors import BrokerError, InvalidInput

if TYPE_CHECKING:
    from rich.live import Live

    from holdfast.client import Client
    from holdfast.status.glance import Glance

SHARE = 4
"""The pause is at least this many times as long as a snapshot took: on a large server that takes a
while, and the view must not put load on it."""
LEAST_SECONDS = 0.5  # faster than people can read
PIPE_WIDTH = 200  # a pipe has no size: enough for whole names and errors
PIPE_HEIGHT = 1_000


@command("top")
async def top(
    every: Annotated[str, option("Time between updates, e.g. 2s.", "TIME")] = "2s",
) -> None:
    """Watch runs by state, throughput, queues, nodes and the latest failures, until q or Ctrl-C.

    Into a pipe, or with --json, it prints one snapshot and ends.
    """
    from holdfast.durations import seconds
    from holdfast.status.glance import glance

    pause = seconds(every, "--every")
    if pause < LEAST_SECONDS:
        raise InvalidInput(f"--every is at least {LEAST_SECONDS:g} s")
    async with connected() as client:
        if given().json:
            out.emit(await glance(client))
        elif not sys.stdout.isatty():
            _print(await glance(client), client)
        else:
            await Watching(client, pause).run()


def _print(look: Glance, client: Client) -> None:
    from holdfast.cli.top_screen import Header, screen

    lines = screen(look, Header(_where(client), None), PIPE_WIDTH, PIPE_HEIGHT)
    out.block("\n".join(line.plain for line in lines))


def _where(client: Client) -> str:
    from holdfast.broker.connecting import shown_url

    config = client.broker.config
    return f"{config.namespace} on {shown_url(config.nats_url)}"


class Watching:
    """The view on a terminal."""

    def __init__(self, client: Client, pause: float) -> None:
        self._client = client
        self._pause = pause
        self._stop = asyncio.Event()
        self._look: Glance | None = None
        self._looked = 0.0
        self._rate: float | None = None
        self._problem = ""

    async def run(self) -> None:
        """Draw until somebody quits."""
        from rich.console import Console
        from rich.live import Live

        console = Console()
        view = Live(console=console, screen=True, auto_refresh=False)
        with _quiet(), _keys(self._stop), view:
            _on(signal.SIGWINCH, lambda: self._draw(view))
            while not self._stop.is_set():
                took = await self._see(view)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), max(self._pause, SHARE * took))

    async def _see(self, view: Live) -> float:
        """Take a snapshot, unless somebody quits meanwhile; returns how long it took."""
        began = time.monotonic()
        looking = asyncio.create_task(self._refresh())
        leaving = asyncio.create_task(self._stop.wait())
        try:
            # A server that does not answer must not freeze the view.
            while not looking.done() and not self._stop.is_set():
                both = {looking, leaving}
                await asyncio.wait(both, timeout=1, return_when=asyncio.FIRST_COMPLETED)
                self._draw(view)
        finally:
            for task in (looking, leaving):
                task.cancel()
            await asyncio.gather(looking, leaving, return_exceptions=True)
        if not self._stop.is_set():
            looking.result()
        return time.monotonic() - began

    async def _refresh(self) -> None:
        from holdfast.status.glance import glance

        try:
            look = await glance(self._client)
        except BrokerError as error:
            self._problem = str(error)
            return
        if self._look is not None and look.at > self._look.at:
            ended = max(0, look.history - self._look.history)
            self._rate = ended / (look.at - self._look.at)
        self._look, self._problem, self._looked = look, "", time.monotonic()

    def _draw(self, view: Live) -> None:
        from rich.console import Group
        from rich.text import Text

        from holdfast.cli.top_screen import Header, screen

        width, height = view.console.size
        if self._look is None:
            view.update(Text(self._problem or "looking …"), refresh=True)
            return
        old = time.monotonic() - self._looked
        problem = f"{self._problem} (as of {old:.0f} s ago)" if self._problem else ""
        header = Header(_where(self._client), self._rate, problem, "q quits")
        lines = screen(self._look, header, width, height)
        view.update(Group(*lines), refresh=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log lines would be written over the view."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _keys(stop: asyncio.Event) -> Iterator[None]:
    """q, Ctrl-C, SIGTERM and a closed terminal end the view."""
    import termios
    import tty

    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        _on(one, stop.set)
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def read() -> None:
        typed = os.read(terminal, 64)
        if not typed or b"q" in typed or b"Q" in typed:
            stop.set()

    tty.setcbreak(terminal)
    loop = asyncio.get_running_loop()
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _on(number: signal.Signals, act: Callable[[], None]) -> None:
    asyncio.get_running_loop().add_signal_handler(number, act)
