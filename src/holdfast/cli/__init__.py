"""The command line: `holdfast <noun> <verb>`, each registered by `@command` in a module here.

A command whose first word is known imports only that word's module, any other all of them; so heavy
imports belong inside the commands, not at the top.

Exit codes: 0 done · 1 refused or failed, one line on standard error · 2 wrong usage · 130 Ctrl-C. A
command may add others and documents them in its help.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from holdfast.cli.command import REGISTERED, run_cli, with_common_options
from holdfast.cli.options import option
from holdfast.cli.out import say
from holdfast.version import __version__

SECTIONS = {
    "Begin": "demo new dev server",
    "Run": "worker control scheduler coordinator dispatcher relay web agent",
    "Jobs": "enqueue publish runs jobs flows limits schedules dead",
    "Fleet": "fleet agents settings secrets",
    "Operate": "top nodes alerts doctor unreadable backup restore auth deploy",
}
"""The first words of commands, as `holdfast --help` shows them."""
NOUNS = {
    "agents": "Look at the agents and their facts.",
    "alerts": "List alerts and rules; test the channels.",
    "auth": "Logins, keys and permissions of the server's users.",
    "dead": "Look at dead letters, send them again, drop them.",
    "deploy": "Deploy a project to Kubernetes.",
    "fleet": "Send commands to agents and see what they return.",
    "flows": "Look at flows and what they wait for; signal, resume, cancel.",
    "jobs": "Look at jobs and their queues; pause, resume, purge.",
    "limits": "Look at limits and who waits for them; set, pause, resume.",
    "new": "Start a project, or add a job to it.",
    "nodes": "Look at the processes of Holdfast and drain them.",
    "runs": "Look at runs, cancel them, send them again.",
    "schedules": "Schedules and their slots.",
    "secrets": "Set, edit and seal secrets of the settings; rotate their keys.",
    "settings": "Publish settings to agents, and see who has which.",
    "unreadable": "Find and remove records that cannot be read.",
}
"""The first words that are followed by a verb, and what their verbs do."""
MODULES = {
    **dict.fromkeys(("control", "coordinator", "dispatcher"), "processes"),
    **dict.fromkeys(("relay", "scheduler", "web"), "processes"),
    "publish": "enqueue",
    "restore": "backup",
    "runs": "runs rerun",
    "settings": "settings settings_history",
    "unreadable": "doctor",
}
"""The modules of a first word, where they have other names."""
WORDS = tuple(word for words in SECTIONS.values() for word in words.split())


class Sectioned(TyperGroup):
    """A command line whose help shows the commands in sections."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, words in SECTIONS.items():
            shown = [(word, self.get_command(ctx, word)) for word in words.split()]
            with formatter.section(title):
                formatter.write_dl([(w, c.get_short_help_str(60)) for w, c in shown if c])


def _typer(**options: Any) -> typer.Typer:
    """A group of commands whose help is plain text: no need to import rich."""
    plain: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
    return typer.Typer(**plain, no_args_is_help=True, **options)


def build(first: str = "") -> typer.Typer:
    """The whole command line, or only the commands that begin with one word."""
    root = _typer(
        name="holdfast", help="Highly available background jobs on NATS JetStream.", cls=Sectioned
    )
    root.callback()(with_common_options(_root))
    for word in (first,) if first in WORDS else WORDS:
        for module in _modules(word):
            importlib.import_module(f"holdfast.cli.{module}")
        _add(root, word)
    return root


def _modules(word: str) -> list[str]:
    return MODULES.get(word, word).split()


def _add(root: typer.Typer, word: str) -> None:
    """Add a command, or a noun with its verbs, in an order that does not depend on imports."""
    order = [f"holdfast.cli.{module}" for module in _modules(word)]
    mine = [words for words in REGISTERED if words[0] == word]
    mine.sort(key=lambda words: order.index(REGISTERED[words].function.__module__))
    found = {words: REGISTERED[words] for words in mine}
    alone = found.pop((word,), None)
    if not found and alone:
        root.command(word, **alone.options)(alone.function)
        return
    noun = _typer(help=NOUNS.get(word), add_completion=False)
    if alone:  # `holdfast web` has a verb, and is a command
        noun = _typer(help=alone.function.__doc__, add_completion=False)
        noun.callback(**alone.options)(alone.function)
    for (_, verb), one in found.items():
        noun.command(verb, **one.options)(one.function)
    root.add_typer(noun, name=word)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process."""
    given = sys.argv[1:] if arguments is None else arguments
    if "_HOLDFAST_COMPLETE" in os.environ:  # a shell asks for completions
        typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
        given = typed.split()[1:-1]
    sys.exit(run_cli(build(given[0] if given else ""), arguments))


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"holdfast {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, option("Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Common options may stand before or after a command's name."""
