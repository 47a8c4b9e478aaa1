"""`holdfast web`: the API and the pages; `holdfast web token`: who may use them."""

from __future__ import annotations

import inspect
from functools import partial
from types import ModuleType
from typing import Annotated, Any

import typer

from holdfast.cli.common import Cli, emit, given, note, say
from holdfast.cli.roles import Made, ReadyFile, app_and_connection, role_command


def register(app: Cli) -> None:
    """Add `holdfast web`."""
    noun = app.noun("web", help=inspect.getdoc(web) or "")
    noun.root(role_command(web), invoke_without_command=True, no_args_is_help=False)
    noun.command("token")(token)


def web(
    served: dict[str, Any],
    context: typer.Context,
    host: Annotated[
        str | None, typer.Option("--host", metavar="HOST", help="Address to listen on.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", help="Port to listen on; 0 means any free port.")
    ] = None,
    app: Annotated[
        str | None,
        typer.Option("--app", metavar="APP", help="Check payloads by the jobs of this app."),
    ] = None,
    ready_file: ReadyFile = None,
) -> Made | None:
    """Serve the API and the pages until SIGTERM or Ctrl-C. Any number may run.

    Without tokens it listens on this machine only. Options without a flag are in
    docs/configuration.md.
    """
    if context.invoked_subcommand:
        return None
    from holdfast.config import LivenessConfig, RecordConfig, WebConfig, load
    from holdfast.model.liveness import from_config

    loaded, connection = app_and_connection(app)
    config = load(WebConfig, host=host, port=port, **served)
    serve = _module("serve")
    serve.check_reachable(config)
    return partial(
        serve.WebServer,
        config,
        connection,
        app=loaded,
        records=load(RecordConfig),
        liveness=from_config(load(LivenessConfig)),
        started=None if ready_file else _say_address,  # then the parent prints it
        ready_file=ready_file or "",
    )


def _say_address(url: str) -> None:
    import sys

    say(f"holdfast web is on {url}")
    sys.stdout.flush()


def _module(name: str) -> ModuleType:
    """A module of the web package, whose dependencies are an extra."""
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
