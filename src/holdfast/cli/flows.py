"""`holdfast flows`: show what flows wait for and have done; signal, resume and cancel them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from holdfast.cli import out
from holdfast.cli.command import command, operating
from holdfast.cli.options import DataArgument, argument, option
from holdfast.cli.typed import read_payload
from holdfast.status import actions

if TYPE_CHECKING:
    from holdfast.status.flows import FlowDetail, FlowLine

FlowArgument = Annotated[str, argument("The flow's run id.", "RUN", "flows")]


@command("flows list")
async def list_flows(
    state: Annotated[str, option("Only flows in this state, or stopped.", "STATE")] = "",
    flow: Annotated[str, option("Only this flow.", "NAME")] = "",
    limit: Annotated[int, option("Show at most N.", "N", min=1, max=10_000)] = 50,
) -> None:
    """List flows with what they wait for, newest change first."""
    async with operating() as by:
        now = by.client.broker.server_now()
        found = await by.flows.list(state=state, job=flow, limit=limit)
    out.listing(
        found,
        ("flow", lambda one: one.job),
        "run",
        "state",
        ("since", lambda one: out.age(now - one.since)),
        ("waits for", lambda one: one.error or one.waits),
        empty="no flow has started yet",
    )


@command("flows show")
async def show(run: FlowArgument) -> None:
    """Show a flow's operations: steps, waits, children, events and who sent them."""
    async with operating() as by:
        now = by.client.broker.server_now()
        found = await by.flows.show(run)
    if out.as_json(found):
        return
    _print(found, now)


def _print(found: FlowDetail, now: float) -> None:
    info = found.info
    out.say(f"{info.job} {info.run} is {info.state}")
    if info.waits and info.state == "parked":
        what = info.waits if info.waits.startswith("until ") else f"for {info.waits}"
        out.say(f"waits {what}, since {out.age(now - info.since)}")
    for text in (info.error, found.broken):
        if text:
            out.note(text)
    if info.parent:
        out.say(f"child of {info.parent}")
    if found.calls:
        out.say("called once" if found.calls == 1 else f"called {found.calls} times")
    out.say("")
    out.listing(
        found.lines,
        ("#", lambda line: line.number),
        "kind",
        ("what", lambda line: f"{line.children} × {line.name}" if line.children else line.name),
        ("began", lambda line: f"{out.age(now - line.since)} ago" if line.since else ""),
        ("took", lambda line: out.age(line.until - line.since) if line.until else ""),
        ("tries", lambda line: line.attempts or ""),
        ("result", _result),
        empty="its journal is empty so far",
    )


def _result(line: FlowLine) -> str:
    if line.error:
        return line.error
    if line.children and line.ended < line.children:
        return f"{line.ended} of {line.children} have ended"
    return "waits" if line.open else (f"by {line.by}" if line.by else "ok")


@command("flows journal")
async def journal(run: FlowArgument) -> None:
    """Print a flow's journal and the ends of its children, to replay them in a test
    (holdfast.testing)."""
    async with operating() as by:
        for line in await by.flows.export(run):
            out.say(line)


@command("flows signal", help=actions.signal_flow.doc)
async def signal(
    event: Annotated[str, argument("The event's name.", "EVENT")],
    key: Annotated[str, argument("The key that the flow waits with.", "KEY")],
    data: DataArgument = None,
) -> None:
    body = read_payload(data) or b"null"
    async with operating(create=True) as by:
        sent = await actions.signal_flow(by, event, key, body)
    out.result(sent, sent.id)
    if not sent.subscribed:
        out.note(
            f"no flow waits for {event} with key {key} yet; the event is kept for one that will"
        )


@command("flows resume", help=actions.resume_flow.doc)
async def resume(run: FlowArgument) -> None:
    async with operating() as by:
        await actions.resume_flow(by, run)
    out.result({"run": run}, f"{run} is resumed")


@command("flows cancel", help=actions.cancel_flow.doc)
async def cancel(run: FlowArgument) -> None:
    async with operating() as by:
        cancelled = await actions.cancel_flow(by, run)
    if out.as_json({"run": run, "cancelled": cancelled}):
        return
    out.say(f"{run} is cancelled" if cancelled else f"{run} had ended already")
