"""The command line: `holdfast <noun> <verb>`, one module per noun.

Every noun module has `register(app)`, which adds its commands. All are imported whenever any
command runs, so heavy imports belong inside the commands, not at the top.

Exit codes: 0 done · 1 refused or failed, one line on standard error · 2 wrong usage · 130 Ctrl-C. A
command may add others and documents them in its help.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from holdfast.cli.common import Cli, run_cli, say
from holdfast.version import __version__

NOUNS = (
    "demo",
    "dev",
    "worker",
    "server",
    "control",
    "web",
    "schedules",
    "nodes",
    "agent",
    "agents",
    "fleet",
    "auth",
    "settings",
    "secrets",
    "doctor",
    "unreadable",
    "backup",
    "enqueue",
    "runs",
    "jobs",
    "dead",
    "new",
    "deploy",
)


def build() -> Cli:
    """The whole command line."""
    app = Cli(
        name="holdfast",
        help="Highly available background jobs on NATS JetStream.",
        no_args_is_help=True,
    )
    app.root(_root)
    for noun in NOUNS:
        if importlib.util.find_spec(f"holdfast.cli.{noun}"):
            importlib.import_module(f"holdfast.cli.{noun}").register(app)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process."""
    sys.exit(run_cli(build(), arguments))


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"holdfast {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Common options may stand before or after a command's name."""
