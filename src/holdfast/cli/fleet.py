"""`holdfast fleet`: send a command to many hosts, and show what they return.

Exit codes of `fleet run`: 0 all fine, 1 it could not be sent or was refused, 2 an agent failed, 3
an agent did not answer, 4 both.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperCommand

from holdfast.cli.common import (
    Cli,
    LimitOption,
    block,
    clock_time,
    connected,
    emit,
    given,
    note,
    operating,
    pairs,
    say,
    shortened,
    table,
)
from holdfast.status import actions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.model.fleet import FleetRequest, FleetRun, Return
    from holdfast.status.fleet import FleetInfo

UsageError = cast("type[Exception]", typer.BadParameter.__base__)


class RunCommand(TyperCommand):
    """Exits with 1 on wrong usage ("could not be sent"), because 2 means that an agent failed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments."""
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            vars(error)["exit_code"] = 1
            if hasattr(error, "option_name"):
                vars(error)["message"] += ": put -- before arguments that begin with a dash"
            raise


RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")]
FormatOption = Annotated[str, typer.Option("--format", help="text, json or yaml.")]
FORMATS = ("text", "json", "yaml")


def register(app: Cli) -> None:
    """Add `holdfast fleet`."""
    fleet = app.noun("fleet", "Send commands to agents and see what they return.")
    fleet.command("run", cls=RunCommand)(run)
    fleet.command("active")(active)
    fleet.command("list")(list_runs)
    fleet.command("show")(show)
    fleet.command("cancel", help=actions.cancel_fleet.doc)(cancel)


async def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="Which agents: 'web*', 'E@db[0-9]+', 'L@a,b', 'G@os:linux and not web1'.",
        ),
    ],
    function: Annotated[str, typer.Argument(metavar="FUNCTION", help="The function to run.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]", help="Its arguments: values, or name=value."),
    ] = None,
    timeout: Annotated[
        str, typer.Option("--timeout", help="Stop waiting for agents after TIME.", metavar="TIME")
    ] = "60s",
    batch: Annotated[
        int, typer.Option("--batch", help="Agents in one wave; 0: all at once.", min=0)
    ] = 0,
    max_failures: Annotated[
        int,
        typer.Option("--max-failures", help="With waves: failures before they stop.", min=0),
    ] = 0,
    format: FormatOption = "text",
    detach: Annotated[
        bool, typer.Option("--detach", help="Print the run's id and do not wait.")
    ] = False,
    id: Annotated[
        str, typer.Option("--id", help="The run's id: the same once more is the same run.")
    ] = "",
) -> None:
    """Run a function on every agent that TARGET matches, and show their answers as they arrive.

    Put -- before arguments that begin with a dash. Exit codes: 0 all fine, 1 it could not be sent,
    2 an agent failed, 3 an agent did not answer, 4 both. Ctrl-C stops watching, not the run.
    """
    from holdfast.client.fleet import new_run
    from holdfast.durations import seconds
    from holdfast.model.fleet import FleetRequest, exit_code
    from holdfast.status.audit import operator

    form = _form(format)
    request = FleetRequest(
        id or new_run(),
        target,
        function,
        args=tuple(arguments or ()),
        raw=True,
        timeout=seconds(timeout, "timeout"),
        batch=batch,
        max_failures=max_failures,
        user=operator(),
    )
    async with operating() as by:
        if detach:
            record = await actions.command_fleet(by, request)
            if form == "text":
                say(record.run)
            else:
                _write({"run": record.run, "targets": len(record.targets)}, form)
            return
        record, returns = await _followed(by, request, quiet=form != "text")
    if form != "text":
        _write(_as_json(record, returns), form)
    raise typer.Exit(exit_code(record))


def _form(format: str) -> str:
    """The output format, from --format or --json."""
    from holdfast.errors import InvalidInput

    if format not in FORMATS:
        raise InvalidInput(f"--format takes text, json or yaml, not {format!r}")
    return "json" if given().json else format


def _write(found: Any, form: str) -> None:
    if form == "json":
        emit(found)
        return
    import msgspec
    import yaml

    plain = msgspec.json.decode(msgspec.json.encode(found))  # the same form as --json
    block(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).rstrip("\n"))


async def _followed(
    by: actions.Operator, request: FleetRequest, *, quiet: bool
) -> tuple[FleetRun, dict[str, Return]]:
    """Start a run and show its returns until it has ended."""
    from holdfast.cli.fleet_view import View
    from holdfast.model.fleet import FleetRun

    returns: dict[str, Return] = {}
    record: FleetRun | None = None
    with View(quiet=quiet) as view:
        start = functools.partial(actions.command_fleet, by)
        async for found in by.fleet.fleet.follow(request, start=start):
            if isinstance(found, FleetRun):
                record = found
                view.record(found)
            else:
                returns[found.agent] = found
                view.returned(found)
        assert record is not None
        view.end(record)
    return record, returns


def _as_json(record: FleetRun, returns: dict[str, Return]) -> dict[str, Any]:
    return {
        "run": record.run,
        "status": record.status,
        "reason": record.reason,
        "targets": record.targets,
        "unreachable": record.unreachable,
        "refused": record.refused,
        "unsent": record.unsent,
        "missing": sorted(
            set(record.targets) - set(returns) - set(record.unreachable) - set(record.unsent)
        ),
        "returns": {agent: returns[agent] for agent in sorted(returns)},
    }


async def active() -> None:
    """List the runs that have not ended."""
    from holdfast.status.fleet import FleetStatus

    async with connected() as client:
        _print(await FleetStatus(client).active(), "no fan-out run is active")


async def list_runs(
    limit: LimitOption = 50,
    status: Annotated[
        str, typer.Option("--status", metavar="STATUS", help="Only this status.")
    ] = "",
) -> None:
    """List runs, the newest first. They are kept for 7 days."""
    from holdfast.status.fleet import FleetStatus

    async with connected() as client:
        found = await FleetStatus(client).list(most=limit, status=status)
    _print(found, "no fan-out run is known: see 'holdfast fleet run --help'")


def _print(found: Sequence[FleetInfo], empty: str) -> None:
    if given().json:
        emit(found)
        return
    table(
        ("run", "status", "function", "target", "returned", "ok", "user", "created", "owner"),
        [
            (
                r.run,
                r.status,
                r.function,
                shortened(r.target, 40),
                f"{r.returned}/{r.targets}",
                r.succeeded,
                r.user,
                clock_time(r.created),
                r.owner,
            )
            for r in found
        ],
        empty=empty,
    )


async def show(run: RunArgument, format: FormatOption = "text") -> None:
    """Show a run and what each agent returned."""
    from holdfast.cli.fleet_view import rows
    from holdfast.status.fleet import FleetInfo, FleetStatus

    form = _form(format)
    async with connected() as client:
        status = FleetStatus(client)
        record, returns = await status.show(run)
        history = await status.history(run)
    if form != "text":
        _write(_as_json(record, returns) | {"history": history}, form)
        return
    info = FleetInfo.of(record, len(returns))
    pairs(
        [
            ("run", info.run),
            ("status", f"{info.status} {info.reason}".strip()),
            ("function", f"{info.function} {' '.join(map(str, record.request.args))}".strip()),
            ("target", info.target),
            ("returned", f"{info.returned} of {info.targets}"),
            ("user", info.user),
            ("owner", f"{info.owner}, epoch {info.epoch}, adopted {info.adoptions} times"),
            ("created", clock_time(info.created)),
            ("deadline", clock_time(info.deadline)),
            ("ended", clock_time(info.ended)),
            ("cancelled by", info.cancelled_by),
        ]
    )
    steps = [(clock_time(step.at), step.what, step.by, step.detail) for step in history]
    table(("at", "what", "by", "detail"), steps, empty="no history is kept")
    table(("agent", "outcome", "seconds", "value"), rows(record, returns), empty="nothing returned")


async def cancel(run: RunArgument) -> None:
    async with operating() as by:
        record = await actions.cancel_fleet(by, run)
    if given().json:
        emit({"run": run, "status": record.status, "cancelled_by": record.cancelled_by})
    elif record.over:
        note(f"{run} had ended already: {record.status}")
    else:
        say(f"{run} is being cancelled")
