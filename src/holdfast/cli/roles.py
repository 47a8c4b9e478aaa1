"""What the commands that run a role share: options, logging, startup."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.common import connection_given, given

if TYPE_CHECKING:
    from holdfast.app import Holdfast
    from holdfast.config import ConnectionConfig

AppArgument = Annotated[
    str, typer.Argument(metavar="APP", help="The app, as module:object (shop:app).")
]
Made = Callable[..., Any]
"""Makes a role inside its event loop. Typer evaluates annotations, so this names no class."""
LogLevel = Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error.")]
LogFormat = Annotated[str | None, typer.Option("--log-format", help="text or json.")]
ReadyFile = Annotated[
    str | None,
    typer.Option("--ready-file", metavar="FILE", help="Create FILE while the process is ready."),
]

_EVERY_ROLE: dict[str, Any] = {
    "health_port": Annotated[
        int | None,
        typer.Option("--health-port", help="Port for health and metrics; 0 means none."),
    ],
    "health_host": Annotated[
        str | None,
        typer.Option("--health-host", metavar="HOST", help="Address on which that port listens."),
    ],
    "log_level": LogLevel,
    "log_format": LogFormat,
}


def role_command(start: Callable[..., Made | int | None]) -> Callable[..., None]:
    """A command that runs a role, with the options that every role has.

    `start` checks its arguments and returns what makes the role, an exit code, or None when there
    is nothing to run. It gets the health options as `served`, for its configuration.
    """
    own = inspect.signature(start, eval_str=True)

    @functools.wraps(start)
    def command(**values: Any) -> None:
        given_here = {name: values.pop(name) for name in _EVERY_ROLE}
        level, style = given_here.pop("log_level"), given_here.pop("log_format")
        start_logging(level, style)
        made = start(**values, served=given_here)
        if made is None:
            return
        if isinstance(made, int):
            raise typer.Exit(made)
        from holdfast.process import run_role

        raise typer.Exit(run_role(made))

    kept = [p for name, p in own.parameters.items() if name != "served"]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in _EVERY_ROLE.items()
    ]
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept]
    command.__signature__ = own.replace(parameters=[*keyword, *added])  # type: ignore[attr-defined]
    return command


def start_logging(level: str | None, style: str | None) -> None:
    """Configure logging from flags, environment and file."""
    from holdfast.config import LogConfig, load
    from holdfast.telemetry import configure_logging

    config = load(LogConfig, level=level or ("debug" if given().verbose else None), format=style)
    configure_logging(config.level, config.format)


def app_and_connection(target: str | None) -> tuple[Holdfast | None, ConnectionConfig]:
    """The named app, if any, and how to connect."""
    from holdfast.cli.loading import load_app
    from holdfast.config import ConnectionConfig, load

    if not target:
        return None, load(ConnectionConfig, **connection_given())
    app = load_app(target)
    return app, app.connection_config(**connection_given())
