"""Options and arguments: those that every command takes, and those that several share.

`option` and `argument` describe a parameter of a command in one line:

    delay: Annotated[str | None, option("Start it after a delay.", "TIME")] = None

An option has the name of its parameter. Completions come from the server.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


@dataclass(frozen=True, slots=True)
class Given:
    """The options that every command takes; None for one that was not given."""

    nats_url: str | None = None
    namespace: str | None = None
    credentials: str | None = None
    json: bool | None = None
    verbose: bool | None = None
    debug: bool | None = None
    arguments: tuple[str, ...] = ()
    """The whole command, without the program's name."""


current: ContextVar[Given] = ContextVar("holdfast_given", default=Given())  # noqa: B039 - frozen


def given() -> Given:
    """The common options of the command that is running."""
    return current.get()


def connection_given() -> dict[str, Any]:
    """The connection options given, as overrides for `load(ConnectionConfig, …)`."""
    return {
        "nats_url": given().nats_url,
        "namespace": given().namespace,
        "credentials_file": given().credentials,
    }


def option(help: str, metavar: str | None = None, *names: str, **more: Any) -> Any:
    """An option of a command; named like its parameter unless `names` says otherwise."""
    found = typer.Option(help=help, metavar=metavar, **more)
    found.param_decls = names
    return found


def argument(help: str, metavar: str | None = None, complete: str = "", **more: Any) -> Any:
    """An argument of a command; `complete` is the kind of names that a shell offers."""
    return typer.Argument(help=help, metavar=metavar, autocompletion=offering(complete), **more)


def offering(kind: str) -> Callable[[typer.Context, str], list[str]] | None:
    """What a shell offers for a word: the names of a kind, asked of the server."""
    if not kind:
        return None

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        from holdfast.cli.completing import offers

        return offers(kind, ctx, incomplete)

    return complete


COMMON: dict[str, Any] = {
    "nats_url": Annotated[str | None, option("Servers to connect to, separated by commas.", "URL")],
    "namespace": Annotated[str | None, option("First part of every name on the server.", "NAME")],
    "credentials": Annotated[str | None, option("Credentials file of 'holdfast auth'.", "FILE")],
    "json": Annotated[bool | None, option("Print JSON.")],
    "verbose": Annotated[
        bool | None, option("Log more, to standard error.", None, "--verbose", "-v")
    ],
    "debug": Annotated[bool | None, option("Show tracebacks.", hidden=True)],
}
"""The options that every command takes."""

RunArgument = Annotated[
    str, argument("The run's id, or its job and key: ocr/page-7.", "RUN", "runs")
]
AppArgument = Annotated[str, argument("The app, as module:object (shop:app).", "APP")]
DataArgument = Annotated[
    str | None,
    argument(
        "Data: JSON, a file, or - for standard input. Default: null.",
        "JSON|@FILE|-",
        show_default=False,
    ),
]
JobOption = Annotated[str, option("Only this job.", "NAME", autocompletion=offering("jobs"))]
GroupOption = Annotated[str, option("Only this group.", "NAME", autocompletion=offering("groups"))]
SinceOption = Annotated[
    str | None, option("Only newer ones: an age such as 10m, or a time.", "TIME")
]
BeforeOption = Annotated[
    str | None, option("Only older ones: an age such as 10m, or a time.", "TIME")
]
LimitOption = Annotated[int, option("Show at most N.", "N", min=1)]
MostOption = Annotated[int, option("Take at most N.", "N", min=1)]
YesOption = Annotated[bool, option("Do not ask for confirmation.", None, "--yes", "-y")]
DryRunOption = Annotated[bool, option("Only show what would happen.")]
HeaderOption = Annotated[
    list[str] | None, option("A header to send; may be repeated.", "NAME=VALUE")
]
ReleaseOption = Annotated[str | None, option("Release of the app: 41, 1.10.2.", "N")]
SeedOption = Annotated[Path | None, option("Account seed; default: auth/account.seed.", "FILE")]
LogLevel = Annotated[str | None, option("debug, info, warning or error.")]
LogFormat = Annotated[str | None, option("text or json.")]

STATES = "queued, delayed, waiting, running, failed, parked, done, cancelled, dead, lost"
RUN_FILTERS: dict[str, Any] = {
    "job": JobOption,
    "group": GroupOption,
    "state": Annotated[
        str, option(f"Only this state: {STATES}.", "STATE", autocompletion=offering("states"))
    ],
    "prefix": Annotated[str, option("Only runs whose id or key starts with TEXT.", "TEXT")],
    "search": Annotated[str, option("Only runs whose id, key or error contains TEXT.", "TEXT")],
    "since": SinceOption,
}
"""Which runs a command is about."""
