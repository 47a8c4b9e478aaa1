"""`holdfast fleet`: send a command to many hosts, and show what they return.

Exit codes of `fleet run`: 0 all fine, 1 it could not be sent or was refused, 2 an agent failed, 3
an agent did not answer, 4 both.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from typer.core import TyperCommand

from holdfast.cli import out
from holdfast.cli.command import command, operating
from holdfast.cli.options import LimitOption, argument, given, option
from holdfast.status import fleet_actions as actions
from holdfast.status.operators import Operator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.identity.seed import AccountSeed
    from holdfast.model.fleet import FleetRequest, FleetRun, Return
    from holdfast.status.fleet import FleetInfo
    from holdfast.status.slots import HostSlot

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


RunArgument = Annotated[str, argument("The run's id.", "RUN", "fleet")]
Form = Literal["text", "json", "yaml"]
FormatOption = Annotated[Form, option("How to print it.")]


@command("fleet run", cls=RunCommand)
async def run(
    target: Annotated[
        str,
        argument(
            "Which agents: 'web*', 'E@db[0-9]+', 'L@a,b', 'G@os:linux and not web1'.", "TARGET"
        ),
    ],
    function: Annotated[str, argument("The function to run.", "FUNCTION")],
    arguments: Annotated[
        list[str] | None, argument("Arguments of the function: values, or name=value.", "[ARGS]")
    ] = None,
    timeout: Annotated[str, option("Stop waiting for agents after TIME.", "TIME")] = "60s",
    batch: Annotated[int, option("Agents in one wave; 0: all at once.", min=0)] = 0,
    max_failures: Annotated[
        int, option("With --batch: stop after more than N failures.", min=0)
    ] = 0,
    format: FormatOption = "text",
    detach: Annotated[bool, option("Print the run's id and do not wait.")] = False,
    id: Annotated[str, option("Id of the run; sending the same id again is the same run.")] = "",
    test: Annotated[bool, option("Only show what each agent would do and change.")] = False,
    direct: Annotated[
        bool, option("Send to one agent without a dispatcher; needs the seed.")
    ] = False,
    seed: Annotated[
        Path | None, option("With --direct: the account seed to sign with.", "FILE")
    ] = None,
) -> None:
    """Run a function on every agent that TARGET matches, and show their answers as they arrive.

    Put -- before arguments that begin with a dash. Exit codes: 0 all fine, 1 it could not be sent,
    2 an agent failed, 3 an agent did not answer, 4 both. Ctrl-C stops watching, not the run.
    """
    from holdfast.client.fleet import new_run
    from holdfast.config import DispatcherConfig, load
    from holdfast.durations import seconds
    from holdfast.model.fleet import REHEARSE, FleetRequest, exit_code
    from holdfast.status.audit import operator

    form = _form(format)
    request = FleetRequest(
        id or new_run(),
        target,
        REHEARSE if test else function,
        args=(*([function] if test else []), *(arguments or ())),
        raw=True,
        timeout=seconds(timeout, "timeout"),
        batch=batch,
        max_failures=max_failures,
        user=operator(),
    )
    async with operating() as by:
        if direct:
            generation = load(DispatcherConfig).generation
            found = await actions.command_agent(by, request, _direct_seed(seed), generation)
            if form == "text":
                from holdfast.cli.fleet_view import lines

                out.block(lines(found))
            else:
                _write(found, form)
            raise typer.Exit(0 if found.ok else 2)
        if detach:
            record = await actions.command_fleet(by, request)
            if form == "text":
                out.say(record.run)
            else:
                _write({"run": record.run, "targets": len(record.targets)}, form)
            return
        record, returns = await _followed(by, request, quiet=form != "text")
    if form != "text":
        _write(_as_json(record, returns), form)
    raise typer.Exit(exit_code(record))


def _direct_seed(seed: Path | None) -> AccountSeed | None:
    """The seed to sign with; None on a server without logins."""
    from holdfast.cli.settings import seed_file
    from holdfast.identity.seed import AccountSeed

    file = seed_file(seed)
    return AccountSeed.load(file) if seed or file.exists() else None


@command("fleet resolve")
async def resolve(target: Annotated[str, argument("Which agents: 'web*', …", "TARGET")]) -> None:
    """List the agents that a target matches now.

    A dispatcher answers; if none runs, the buckets are read instead.
    """
    from holdfast.errors import Unavailable

    async with operating() as by:
        try:
            found = list(await by.fleet.fleet.resolve(target))
        except Unavailable as error:
            out.note(f"{error}. Reading the facts of all agents instead")
            found = [agent.id for agent in await by.agents.list(target)]
    out.listing(found, ("agent", str), empty="no agent matches")


def _form(format: Form) -> Form:
    """The output format, from --format or --json."""
    return "json" if given().json else format


def _write(found: Any, form: Form) -> None:
    if form == "json":
        out.emit(found)
        return
    import msgspec
    import yaml

    plain = msgspec.json.decode(msgspec.json.encode(found))  # the same form as --json
    out.block(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).rstrip("\n"))


async def _followed(
    by: Operator, request: FleetRequest, *, quiet: bool
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


@command("fleet active")
async def active() -> None:
    """List the runs that have not ended."""
    async with operating() as by:
        _print(await by.fleet.active(), "no fan-out run is active")


@command("fleet list")
async def list_runs(
    limit: LimitOption = 50, status: Annotated[str, option("Only this status.", "STATUS")] = ""
) -> None:
    """List runs, the newest first. They are kept for 7 days."""
    async with operating() as by:
        found = await by.fleet.list(most=limit, status=status)
    _print(found, "no fan-out run is known: see 'holdfast fleet run --help'")


def _print(found: Sequence[FleetInfo], empty: str) -> None:
    out.listing(
        found,
        "run",
        "status",
        "function",
        ("target", lambda run: out.shortened(run.target, 40)),
        ("returned", lambda run: f"{run.returned}/{run.targets}"),
        ("ok", lambda run: run.succeeded),
        "user",
        ("created", lambda run: out.clock_time(run.created)),
        "owner",
        empty=empty,
    )


@command("fleet show")
async def show(run: RunArgument, format: FormatOption = "text") -> None:
    """Show a run and what each agent returned."""
    from holdfast.cli.fleet_view import rows
    from holdfast.status.fleet import FleetInfo

    form = _form(format)
    async with operating() as by:
        record, returns = await by.fleet.show(run)
        history = await by.fleet.history(run)
    if form != "text":
        _write(_as_json(record, returns) | {"history": history}, form)
        return
    info = FleetInfo.of(record, len(returns))
    out.pairs(
        [
            ("run", info.run),
            ("status", f"{info.status} {info.reason}".strip()),
            ("function", f"{info.function} {' '.join(map(str, record.request.args))}".strip()),
            ("target", info.target),
            ("returned", f"{info.returned} of {info.targets}"),
            ("user", info.user),
            ("owner", f"{info.owner}, epoch {info.epoch}, adopted {info.adoptions} times"),
            ("created", out.clock_time(info.created)),
            ("deadline", out.clock_time(info.deadline)),
            ("ended", out.clock_time(info.ended)),
            ("cancelled by", info.cancelled_by),
        ]
    )
    steps = [(out.clock_time(step.at), step.what, step.by, step.detail) for step in history]
    out.table(("at", "what", "by", "detail"), steps, empty="no history is kept")
    out.table(
        ("agent", "outcome", "seconds", "value"), rows(record, returns), empty="nothing returned"
    )


@command("fleet cancel", help=actions.cancel_fleet.doc)
async def cancel(run: RunArgument) -> None:
    async with operating() as by:
        record = await actions.cancel_fleet(by, run)
    if out.as_json({"run": run, "status": record.status, "cancelled_by": record.cancelled_by}):
        return
    if record.over:
        out.note(f"{run} had ended already: {record.status}")
    else:
        out.say(f"{run} is being cancelled")


# ---- schedules of hosts


@command("fleet slots")
async def slots(
    schedule: Annotated[
        str, argument("A schedule that hosts run by themselves.", "[SCHEDULE]")
    ] = "",
    at: Annotated[
        str, argument("One slot: 03:00 (the last at that time, UTC), or RFC 3339.", "[TIME]")
    ] = "",
    last: Annotated[int, option("Show the last N slots.", "N", min=1, max=1000)] = 5,
) -> None:
    """Show which hosts have run the slots of their schedules.

    Without SCHEDULE: the schedules that hosts have. With it: its last slots. With TIME: what each
    host returned, and which did not.
    """
    from holdfast.status.slots import HostSlots

    async with operating() as by:
        read = HostSlots(by.client)
        if at:
            _print_slot(await read.show(schedule, at))
        elif schedule:
            _print_slots(await read.last(schedule, last))
        else:
            out.listing(
                await read.list(),
                ("schedule", lambda one: one.name),
                ("rule", lambda one: " | ".join(one.rules)),
                "hosts",
                empty="no host has a schedule: define them in the settings, under 'schedules'",
            )


def _print_slots(found: Sequence[HostSlot]) -> None:
    if out.as_json([_slot_json(slot) for slot in found]):
        return
    out.table(
        ("slot", "ok", "not ok", "no answer"),
        [(out.clock_time(s.at), s.ok, len(s.returns) - s.ok, len(s.waiting)) for s in found],
        empty="no slot yet",
    )


def _slot_json(slot: HostSlot) -> dict[str, Any]:
    return {
        "schedule": slot.schedule,
        "at": slot.at,
        "run": slot.run,
        "returns": {agent: slot.returns[agent] for agent in sorted(slot.returns)},
        "waiting": dict(sorted(slot.waiting.items())),
    }


def _print_slot(slot: HostSlot) -> None:
    from holdfast.cli.fleet_view import shown

    if out.as_json(_slot_json(slot)):
        return
    rows = [
        (agent, r.outcome, out.clock_time(r.at), f"{r.seconds:.3f}", shown(r))
        for agent, r in sorted(slot.returns.items())
    ]
    rows += [
        (agent, "no answer", "", "", f"due {out.clock_time(due)}")
        for agent, due in sorted(slot.waiting.items())
    ]
    out.table(("agent", "outcome", "ended", "seconds", "value"), rows)
