"""`/fleet/runs/<run>`: one command to many agents, with what each returned; send and cancel."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import Annotated, Final
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import Response

from holdfast.client.fleet import new_run
from holdfast.errors import InvalidInput, Unavailable
from holdfast.model.fleet import FleetRequest, FleetRun, Return
from holdfast.names import check_name
from holdfast.status.fleet import FleetInfo
from holdfast.web.masking import hides, masked_arguments
from holdfast.web.pages.rendering import Question, many
from holdfast.web.pages.visit import AdminVisit, OperatorVisit, ViewerVisit, Visit
from holdfast.web.security import checked_form

router = APIRouter(include_in_schema=False)
Fields = Annotated[dict[str, str], Depends(checked_form)]

SHOWN: Final = 100
NAMED: Final = 8
VALUE_BYTES: Final = 2_000


class Line(msgspec.Struct, frozen=True):
    """One agent's answer, or that there is none yet."""

    agent: str
    outcome: str
    seconds: float = 0.0
    at: float = 0.0
    error: str = ""


@router.get("/fleet/runs/{run}")
async def show(visit: ViewerVisit, run: str, start: int = 0) -> Response:
    """One fan-out run; those that failed or are missing come first."""
    record, returns = await visit.desk.fleet.show(run)
    lines = [_line(record, agent, returns.get(agent)) for agent in record.targets]
    lines.sort(key=lambda line: (line.outcome == "ok", line.outcome, line.agent))
    start = max(0, start)
    chosen = lines[start : start + SHOWN]
    return await visit.show(
        "fleet_run.html",
        "fleet",
        info=FleetInfo.of(record, max(record.returned, len(returns))),
        record=record,
        arguments=await _arguments(visit, record),
        outcomes=sorted(Counter(line.outcome for line in lines).items()),
        lines=chosen,
        values={n.agent: await _value(visit, returns.get(n.agent)) for n in chosen},
        start=start,
        older=start + SHOWN if start + SHOWN < len(lines) else 0,
    )


def _line(record: FleetRun, agent: str, given: Return | None) -> Line:
    if given is not None:
        return Line(agent, given.outcome, given.seconds, given.at, error=given.error or given.note)
    if agent in record.unsent:
        return Line(agent, "not sent")
    if not record.over:
        return Line(agent, "waiting")
    return Line(agent, "unreachable" if agent in record.unreachable else "no answer")


async def _arguments(visit: Visit, record: FleetRun) -> str:
    request = record.request
    args = list(request.args)
    if hides(visit.desk.user):
        args = masked_arguments(request.function, args)
    return await visit.value([*args, request.kwargs])


async def _value(visit: Visit, given: Return | None) -> str:
    if given is None or given.value is None:
        return "kept apart: it is large" if given is not None and given.object else ""
    text = await visit.value(given.value)
    return text if len(text) <= VALUE_BYTES else text[:VALUE_BYTES] + " …"


# ---- send, cancel, forget


@router.post("/do/fleet/ask")
async def ask_command(visit: AdminVisit, fields: Fields) -> Response:
    """Say what a command does, and to whom: asked of a dispatcher, which decides."""
    target, function = fields.get("target", "").strip(), fields.get("function", "").strip()
    words = fields.get("words", "")
    if not target or not function:
        raise InvalidInput("a command needs a target and a function: 'web*' and 'ping'")
    words_of(words)
    meant = await visit.desk.fleet.fleet.resolve(target)
    effects = [
        f"{function} {words}".strip() + f" runs on {many(len(meant), 'agent')}, as you.",
        "Each agent runs it once. What it has done cannot be taken back from here.",
    ]
    listed = [*meant[:NAMED], *([f"… and {len(meant) - NAMED} more"] if len(meant) > NAMED else [])]
    given = [("target", target), ("function", function), ("words", words), ("run", new_run())]
    question = Question(
        f"Run {function} on {target}?",
        effects,
        "Send the command",
        "/do/fleet/command",
        given,
        "/fleet",
        danger=True,
        listed=listed or ["no agent: nobody would hear it"],
    )
    return visit.ask(question, "fleet")


def words_of(text: str) -> tuple[str, ...]:
    """Arguments as a shell would take them: quotes keep words together."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise InvalidInput(f"the arguments cannot be read: {error}") from None


@router.post("/do/fleet/command")
async def command(visit: AdminVisit, fields: Fields) -> Response:
    """Send a command; the same form sent twice is the same run."""
    request = FleetRequest(
        fields.get("run", ""),
        fields.get("target", ""),
        fields.get("function", ""),
        words_of(fields.get("words", "")),
        raw=True,
        user=visit.desk.user.name,
    )
    record = await visit.desk.fleet.fleet.start(request)
    detail = f"{request.function} on {request.target}"
    await visit.desk.audit.write(
        "command", runs=[record.run], count=len(record.targets), detail=detail
    )
    sent = f"The command was sent to {many(len(record.targets), 'agent')}"
    return visit.done(f"/fleet/runs/{quote(record.run, safe='')}", sent)


@router.get("/do/fleet/cancel")
async def ask_cancel(visit: OperatorVisit, run: str) -> Response:
    """Say what a cancel does."""
    record, returns = await visit.desk.fleet.show(run)
    left = len(record.targets) - len(returns)
    effects = [
        "No further agent is sent to, and those that run it stop.",
        f"{many(left, 'agent')} of {len(record.targets)} without an answer yet; what the others "
        "did stays done.",
    ]
    question = Question(
        f"Cancel {record.request.function}?",
        effects,
        "Cancel it",
        "/do/fleet/cancel",
        [("run", run)],
        f"/fleet/runs/{run}",
        danger=True,
    )
    return visit.ask(question, "fleet")


@router.post("/do/fleet/cancel")
async def cancel(visit: OperatorVisit, fields: Fields) -> Response:
    """Stop a run, wherever it is."""
    run = fields.get("run", "")
    await visit.desk.fleet.show(run)
    try:
        record = await visit.desk.fleet.cancel(run)
    except Unavailable as error:
        return visit.done(f"/fleet/runs/{run}", str(error), "bad")
    if record.over and not record.cancelled_by:
        text = f"The run had ended already ({record.status}): nothing was changed"
        return visit.done(f"/fleet/runs/{run}", text, "bad")
    return visit.done(f"/fleet/runs/{run}", "The run is cancelled: agents that run it stop")


@router.get("/do/fleet/forget")
async def ask_forget(visit: AdminVisit, agent: str) -> Response:
    """Say what forgetting does."""
    await visit.desk.agents.show(check_name(agent, "agent"))
    effects = ["No target means it any more. If it comes back, it is known again."]
    question = Question(
        f"Forget {agent}?",
        effects,
        "Forget it",
        "/do/fleet/forget",
        [("agent", agent)],
        f"/fleet/agents/{agent}",
        danger=True,
    )
    return visit.ask(question, "fleet")


@router.post("/do/fleet/forget")
async def forget(visit: AdminVisit, fields: Fields) -> Response:
    """Take an agent out of the index."""
    agent = fields.get("agent", "")
    try:
        await visit.desk.agents.forget(agent)
    except InvalidInput as error:
        return visit.done(f"/fleet/agents/{agent}", str(error), "bad")
    return visit.done("/fleet", f"{agent} is forgotten")
