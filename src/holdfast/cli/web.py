"""`holdfast web`: the API and the pages; `holdfast web token`: who may use them."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import Cli, connection_given, emit, given, note, say
from holdfast.cli.worker import LogFormat, LogLevel, start_logging

if TYPE_CHECKING:
    from holdfast.app import Holdfast
    from holdfast.config import WebConfig
    from holdfast.web.serve import WebServer


def register(app: Cli) -> None:
    """Add `holdfast web`."""
    noun = app.noun("web", help=inspect.getdoc(web) or "")
    noun.root(web, invoke_without_command=True, no_args_is_help=False)
    noun.command("token")(token)


def web(
    context: typer.Context,
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen on.", metavar="HOST")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", help="Port to listen on; 0: any that is free.")
    ] = None,
    app: Annotated[
        str | None,
        typer.Option("--app", metavar="APP", help="Your app: payloads are checked by its jobs."),
    ] = None,
    health_port: Annotated[
        int | None, typer.Option("--health-port", help="Serve health and metrics here; 0: nowhere.")
    ] = None,
    health_host: Annotated[
        str | None, typer.Option("--health-host", help="Address of --health-port.", metavar="HOST")
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option("--ready-file", metavar="FILE", help="Exists while it serves."),
    ] = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Serve the API and the pages until SIGTERM or Ctrl-C. Any number may run.

    Without tokens it listens on this machine only. Whatever has no flag here is in
    docs/configuration.md.
    """
    if context.invoked_subcommand:
        return
    from holdfast.config import WebConfig, load
    from holdfast.process import run_role

    start_logging(log_level, log_format)
    loaded = _load(app) if app else None
    config = load(WebConfig, host=host, port=port, health_port=health_port, health_host=health_host)
    _module("serve").check_reachable(config)
    raise typer.Exit(run_role(lambda: _server(config, loaded, ready_file)))


def _module(name: str) -> ModuleType:
    """A module of the web package, which needs more than the rest of Holdfast."""
    import importlib

    from holdfast.errors import ConfigError

    try:
        return importlib.import_module(f"holdfast.web.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("holdfast"):
            raise
        raise ConfigError(
            f"the web needs {error.name}, which is not installed: pip install 'holdfast[web]'"
        ) from None


def _load(target: str) -> Holdfast:
    from holdfast.cli.loading import load_app

    return load_app(target)


def _server(config: WebConfig, app: Holdfast | None, ready_file: Path | None) -> WebServer:
    from holdfast.config import ConnectionConfig, LivenessConfig, RecordConfig, load
    from holdfast.model.liveness import from_config
    from holdfast.web.serve import WebServer

    if app:
        connection = app.connection_config(**connection_given())
    else:
        connection = load(ConnectionConfig, **connection_given())
    return WebServer(
        config,
        connection,
        app=app,
        records=load(RecordConfig),
        liveness=from_config(load(LivenessConfig)),
        started=_say_address if not ready_file else None,  # whoever waits for the file says it
        ready_file=str(ready_file or ""),
    )


def _say_address(url: str) -> None:
    import sys

    say(f"holdfast web is on {url}")
    sys.stdout.flush()


def token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is: shown in the audit.")],
    role: Annotated[
        str, typer.Option("--role", metavar="ROLE", help="viewer, operator or admin.")
    ] = "viewer",
) -> None:
    """Make a token for a person or a program, and the line that lets it in."""
    text, line = _module("auth").make_token(name, role)
    if given().json:
        emit({"token": text, "line": line})
        return
    say(text)
    note(
        "This is the token: it is shown only now. Add the line below to the file that "
        "web.tokens_file names, or to web.tokens (HOLDFAST_WEB_TOKENS); it is of no use to who "
        f"reads it there.\n{line}",
        lines=True,
    )
