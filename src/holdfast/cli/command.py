"""Commands: how they are registered, run and connected.

    @command("runs list")
    async def list_runs(job: JobOption = "") -> None:
        "What it does: the first lines of its help."

A command takes the common options in any position, and may be a coroutine. Errors are one line on
standard error; tracebacks only with --debug.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer
from typer.models import OptionInfo

from holdfast.cli.options import COMMON, Given, connection_given, current, given
from holdfast.cli.out import complain, note
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.client import Client
    from holdfast.status.operators import Operator

T = TypeVar("T", bound=Callable[..., Any])

TOLD = ("holdfast.client", "holdfast.events")
"""Loggers whose warnings a command prints itself: a known key, an event without a job."""
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


@dataclass(frozen=True, slots=True)
class Registered:
    """A command and typer's options for it."""

    function: Callable[..., None]
    options: dict[str, Any]


REGISTERED: dict[tuple[str, ...], Registered] = {}
"""The commands of the modules that are imported, by their words."""


def command(words: str, **options: Any) -> Callable[[T], T]:
    """Register a command by its words; `options` are typer's."""

    def decorate(function: T) -> T:
        REGISTERED[tuple(words.split())] = Registered(with_common_options(function), options)
        return function

    return decorate


def with_options(into: str, added: Mapping[str, Any]) -> Callable[[Callable[..., Any]], Any]:
    """Add options to a command, which gets their values as a dict in its parameter `into`.

    `added` are annotations by name; without the option a text is empty, anything else None.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(function, eval_str=True)

        @functools.wraps(function)
        def run(**values: Any) -> Any:
            values[into] = {name: values.pop(name) for name in added}
            return function(**values)

        options = [_parameter(name, annotation) for name, annotation in added.items()]
        kept = [p for name, p in own.parameters.items() if name != into]
        parameters = [_named(p) for p in (*kept, *options)]
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    default = "" if get_args(annotation)[0] is str else None
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _named(parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter whose option has only its name; typer would add `--no-NAME` to a flag."""
    annotation = parameter.annotation
    for option in get_args(annotation)[1:]:
        if isinstance(option, OptionInfo) and not option.param_decls:
            named = copy.copy(option)
            named.param_decls = (f"--{parameter.name.strip('_').replace('_', '-')}",)
            annotation = Annotated[get_args(annotation)[0], named]
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotation)


def with_common_options(function: Callable[..., Any]) -> Callable[..., None]:
    """A command that takes the common options too, and runs a coroutine to its end."""

    @functools.wraps(function)
    def run(common: dict[str, Any], **values: Any) -> None:
        current.set(replace(given(), **{k: v for k, v in common.items() if v is not None}))
        result = function(**values)
        if inspect.iscoroutine(result):
            with asyncio.Runner() as runner:
                runner.run(result)

    decorated: Callable[..., None] = with_options("common", COMMON)(run)
    return decorated


def run_cli(cli: typer.Typer, arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; tracebacks only on request."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    current.set(Given(debug=bool(os.environ.get("HOLDFAST_DEBUG")), arguments=tuple(words)))
    try:
        cli(args=words, prog_name="holdfast")
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last line of defence: a sentence, not a page
        return _failed(error)
    return 0


def _failed(error: Exception) -> int:
    if given().debug:
        note("".join(traceback.format_exception(error)).rstrip(), lines=True)
    bug = f"{type(error).__name__}: {error} (this is a bug: --debug shows where)"
    complain(str(error) if isinstance(error, HoldfastError) else bug)
    return 1


# ---- connecting


@contextlib.asynccontextmanager
async def connected(*, create: bool = False) -> AsyncIterator[Client]:
    """A client of the namespace given by options, environment and file.

    An empty namespace is created with `create`; otherwise it is an error, because a wrong name is
    likelier than a new namespace.
    """
    from holdfast.broker import Broker
    from holdfast.client import Client
    from holdfast.config import ConnectionConfig, RecordConfig, load

    log_to_stderr()
    async with Broker(load(ConnectionConfig, **connection_given()), name="holdfast cli") as broker:
        client = Client(broker, load(RecordConfig))
        if create:
            await client.topology.ensure()
        else:
            await _need_namespace(client)
        yield client


@contextlib.asynccontextmanager
async def operating(*, create: bool = False) -> AsyncIterator[Operator]:
    """Like `connected`, for a command that changes something: audited under the operator's name."""
    from holdfast.status.operators import Operator

    async with connected(create=create) as client:
        yield Operator(client)


async def _need_namespace(client: Client) -> None:
    from holdfast.errors import NotFound

    try:
        await client.topology.measure_clock()
    except NotFound:
        raise NotFound(
            f"namespace {client.broker.names.namespace!r} does not exist on this server: 'holdfast "
            "control' or a worker makes it when it starts, and so does the first 'holdfast enqueue'"
        ) from None


def log_to_stderr(level: str = "warning") -> None:
    """Logging of a short command: problems only, unless more is requested."""
    import logging

    from holdfast.log_lines import configure_logging

    configure_logging("debug" if given().verbose else level)
    for name in TOLD:
        logging.getLogger(name).setLevel("NOTSET" if given().verbose else "ERROR")
