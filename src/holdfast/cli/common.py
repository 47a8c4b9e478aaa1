"""What every command shares: the common options, connecting, printing, errors and exit codes.

`Cli` is a `typer.Typer` whose commands take the common options (`--nats-url`, `--namespace`,
`--credentials`, `--json`, `--verbose`, `--debug`) in any position, and may be coroutines. A command
reads them from `given()`; it prints results with `emit`, `table`, `pairs`, `say` and `block` on
standard output, and remarks with `note` on standard error.

Only these functions print. What they print may be untrusted, so characters that control a terminal
are shown as escapes (`holdfast.visible`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from holdfast import visible
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.client import Client
    from holdfast.status.actions import Action, Operator

P = ParamSpec("P")
T = TypeVar("T", bound=Callable[..., Any])

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


@dataclass(frozen=True, slots=True)
class Given:
    """The common options; None for one that was not given."""

    nats_url: str | None = None
    namespace: str | None = None
    credentials: str | None = None
    json: bool | None = None
    verbose: bool | None = None
    debug: bool | None = None


_given: ContextVar[Given] = ContextVar("holdfast_given", default=Given())  # noqa: B039 - frozen

_OPTIONS: dict[str, tuple[Any, Any]] = {
    "nats_url": (
        str | None,
        typer.Option("--nats-url", metavar="URL", help="Servers to connect to, with commas."),
    ),
    "namespace": (
        str | None,
        typer.Option("--namespace", metavar="NAME", help="First part of every name on the server."),
    ),
    "credentials": (
        str | None,
        typer.Option("--credentials", metavar="FILE", help="Login of 'holdfast auth'."),
    ),
    "json": (bool | None, typer.Option("--json", help="Print JSON.")),
    "verbose": (bool | None, typer.Option("--verbose", "-v", help="Log more, to standard error.")),
    "debug": (bool | None, typer.Option("--debug", help="Show tracebacks.", hidden=True)),
}


# ---- options shared by several commands: one definition, one help text

JobOption = Annotated[str, typer.Option("--job", metavar="NAME", help="Only this job.")]
GroupOption = Annotated[str, typer.Option("--group", metavar="NAME", help="Only this group.")]
SinceOption = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="Only what is newer than 10m, or than a time."),
]
BeforeOption = Annotated[
    str | None,
    typer.Option("--before", metavar="TIME", help="Only what is older than 10m, or than a time."),
]
LimitOption = Annotated[int, typer.Option("--limit", metavar="N", help="Show at most N.", min=1)]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only show what would happen.")]
HeaderOption = Annotated[
    list[str] | None,
    typer.Option("--header", metavar="NAME=VALUE", help="A header to send; may be repeated."),
]


def headers_of(pairs: Sequence[str] | None) -> dict[str, str]:
    """The headers of `HeaderOption`."""
    from holdfast.errors import InvalidInput

    headers: dict[str, str] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals:
            raise InvalidInput(f"--header takes NAME=VALUE, not {pair!r}")
        headers[name.strip()] = value.strip()
    return headers


def given() -> Given:
    """The common options of the command that is running."""
    return _given.get()


# ---- commands


class Cli(typer.Typer):
    """A command line whose commands take the common options and may be coroutines."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            **{
                "add_completion": False,
                "rich_markup_mode": None,  # help is plain text: no need to import rich
                "pretty_exceptions_enable": False,
                "no_args_is_help": True,
                **options,
            }
        )

    def command(self, name: str | None = None, **options: Any) -> Callable[[T], T]:
        """Register a command; a coroutine function runs in an event loop."""
        register = super().command(name, **options)

        def decorate(function: T) -> T:
            register(_with_common_options(function))
            return function

        return decorate

    def root(self, function: Callable[..., None], **options: Any) -> None:
        """Add options of the program itself, or of a noun that is also a command."""
        self.callback(**options)(_with_common_options(function))

    def noun(self, name: str, help: str) -> Cli:
        """A group of verbs: `holdfast <name> <verb>`."""
        group = Cli(help=help)
        self.add_typer(group, name=name)
        return group


def _with_common_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the common options to a function's signature, where typer looks for them."""
    own = inspect.signature(function, eval_str=True)

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        common = {name: values.pop(name) for name in _OPTIONS}
        _given.set(replace(given(), **{k: v for k, v in common.items() if v is not None}))
        result = function(**values)
        if inspect.iscoroutine(result):
            with asyncio.Runner() as runner:
                return runner.run(result)
        return result

    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
        )
        for name, (kind, option) in _OPTIONS.items()
    ]
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.parameters.values()]
    signature = own.replace(parameters=[*keyword, *added])
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {n: p.annotation for n, p in signature.parameters.items()}
    return command


def run_cli(cli: Cli, arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; tracebacks only on request."""
    _given.set(Given(debug=bool(os.environ.get("HOLDFAST_DEBUG"))))
    try:
        cli(args=list(arguments) if arguments is not None else None, prog_name="holdfast")
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
    complain(str(error) if isinstance(error, HoldfastError) else _internal(error))
    return 1


def complain(text: str) -> None:
    """Print an error as one line on standard error."""
    print(f"error: {_cell(text)}", file=sys.stderr)


def _internal(error: Exception) -> str:
    return f"{type(error).__name__}: {error} (this is a bug: --debug shows where)"


# ---- connecting


@contextlib.asynccontextmanager
async def connected(*, create: bool = False) -> AsyncIterator[Client]:
    """A client of the namespace given by options, environment and file.

    An empty namespace is created with `create`; otherwise it is an error, because it is more often
    a wrong name than a new namespace.
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
    from holdfast.status.actions import Operator

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


def connection_given() -> dict[str, Any]:
    """The connection options given, as overrides for `load(ConnectionConfig, …)`."""
    return {
        "nats_url": given().nats_url,
        "namespace": given().namespace,
        "credentials_file": given().credentials,
    }


def log_to_stderr(level: str = "warning") -> None:
    """Logging of a short command: problems only, unless more is requested."""
    from holdfast.telemetry import configure_logging

    configure_logging("debug" if given().verbose else level)


def instant(text: str | None, client: Client, what: str) -> float:
    """`10m` ago, or a time such as `2026-11-16T01:45:00Z`; 0 when none was given."""
    from holdfast import durations
    from holdfast.errors import InvalidInput

    if not text:
        return 0.0
    try:
        return client.broker.server_now() - durations.seconds(text, what)
    except InvalidInput:
        # A filter may name any time; a distant one just finds nothing.
        return durations.instant(text, what, latest=math.inf)


# ---- printing


def clock_time(at: float) -> str:
    """An instant for people: UTC, to the second."""
    from holdfast.clock import rfc3339

    return rfc3339(at)[:19].replace("T", " ") if at else ""


def shortened(text: str, most: int = 60) -> str:
    """The first line of a text, cut to fit a table."""
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= most else line[: most - 1] + "…"


def emit(value: Any) -> None:
    """Print a value as JSON: records, dataclasses, lists, plain values."""
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    print(visible.json_text(text.decode()))


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


def note(text: str, *, lines: bool = False) -> None:
    """A remark that is not part of the result; on one line unless `lines` is set."""
    print((visible.block if lines else visible.one_line)(text), file=sys.stderr)


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
        print(f"{name.ljust(width)}  {value}")


__all__ = [
    "BeforeOption",
    "Cli",
    "DryRunOption",
    "Given",
    "GroupOption",
    "HeaderOption",
    "JobOption",
    "LimitOption",
    "SinceOption",
    "YesOption",
    "block",
    "clock_time",
    "complain",
    "confirm",
    "confirm_action",
    "connected",
    "connection_given",
    "emit",
    "given",
    "headers_of",
    "instant",
    "log_to_stderr",
    "note",
    "operating",
    "pairs",
    "run_cli",
    "say",
    "shortened",
    "table",
]
