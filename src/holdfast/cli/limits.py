"""`holdfast limits`: who holds a place in a limit, who waits; change, pause and resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from holdfast.cli import out
from holdfast.cli.command import command, operating
from holdfast.cli.options import argument, option
from holdfast.status import actions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.status.limits import LimitInfo

NameArgument = Annotated[str, argument("The limit's name.", "LIMIT", "limits")]


@command("limits list")
async def list_limits() -> None:
    """List limits: what each allows, how many places are taken, and how many runs wait."""
    async with operating() as by:
        _print(await by.limits.list())


def _print(found: Sequence[LimitInfo]) -> None:
    out.listing(
        found,
        ("limit", lambda info: info.name),
        ("allows", _allows),
        "per",
        ("state", _state),
        "held",
        "waiting",
        ("oldest", lambda info: out.age(info.oldest_seconds)),
        ("jobs", lambda info: ", ".join(info.jobs)),
        empty="no limit is known yet: start a worker of an app that has one",
    )


def _allows(info: LimitInfo) -> str:
    return f"{info.running} running" if info.running else f"{info.starts}, burst {info.burst}"


def _state(info: LimitInfo) -> str:
    return "paused" if info.paused else ("set by an operator" if info.set_by_operator else "")


@command("limits show")
async def show(name: NameArgument) -> None:
    """Show a limit and its busiest keys: who holds a place, how many wait."""
    async with operating() as by:
        found = await by.limits.show(name)
    if out.as_json(found):
        return
    _print([found.info])
    out.say("")
    out.listing(
        found.keys,
        (found.info.per or "key", lambda key: key.key or "-"),
        "held",
        "waiting",
        ("oldest", lambda key: out.age(key.oldest_seconds)),
        ("holders", lambda key: ", ".join(key.runs)),
        empty="nobody holds a place or waits for one",
    )


@command("limits set", help=actions.set_limit.doc)
async def set_limit(
    name: NameArgument,
    running: Annotated[int | None, option("Runs at the same time.", "N")] = None,
    starts: Annotated[str | None, option("Starts: 100/s, 30/m.", "RATE")] = None,
    burst: Annotated[int | None, option("How many starts may happen at once.", "N")] = None,
) -> None:
    async with operating() as by:
        rule = await actions.set_limit(by, name, running=running, starts=starts, burst=burst)
    out.result(rule, f"{name}: {rule.numbers}{'' if rule.chosen else ', as in the code'}")


@command("limits pause", help=actions.pause_limit.doc)
async def pause(name: NameArgument) -> None:
    async with operating() as by:
        out.result(await actions.pause_limit(by, name), f"{name} is paused")


@command("limits resume", help=actions.resume_limit.doc)
async def resume(name: NameArgument) -> None:
    async with operating() as by:
        out.result(await actions.resume_limit(by, name), f"{name} is resumed")
