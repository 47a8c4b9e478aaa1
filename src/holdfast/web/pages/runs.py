"""`/runs`: runs by filter, page by page; and what an operator may do with one."""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import quote

from fastapi import APIRouter, Depends
from starlette.responses import Response

from holdfast.errors import InvalidInput, RunError
from holdfast.status.runs import STATES, RunFilter
from holdfast.web.pages.rendering import Question
from holdfast.web.pages.visit import OperatorVisit, ViewerVisit, Visit
from holdfast.web.security import checked_form

router = APIRouter(include_in_schema=False)
Fields = Annotated[dict[str, str], Depends(checked_form)]

SHOWN: Final = 50


@router.get("/runs")
async def list_runs(
    visit: ViewerVisit,
    job: str = "",
    group: str = "",
    state: str = "",
    node: str = "",
    prefix: str = "",
    before: str = "",
) -> Response:
    """The runs that match, newest change first."""
    chosen = {"job": job, "group": group, "state": state, "node": node, "prefix": prefix}
    problem, found = "", None
    try:
        wanted = RunFilter(job, group, state, node, prefix)
        found = await visit.desk.run_pages.page(wanted, SHOWN, before)
    except InvalidInput as error:  # a filter that is being typed
        problem = str(error)
    return await visit.show(
        "runs.html",
        "runs",
        found=found,
        problem=problem,
        chosen=chosen,
        states=STATES,
        before=before,
        known=sorted({one.job for one in await visit.jobs()}),
        groups=sorted({one.group for one in await visit.jobs()}),
    )


def address(run: str) -> str:
    """The page of a run."""
    return f"/runs/{quote(run, safe='/=')}"


# ---- cancel and retry


@router.get("/do/runs/cancel")
async def ask_cancel(visit: OperatorVisit, run: str) -> Response:
    """Say what a cancel does."""
    detail = await visit.desk.runs.show(run)
    effects = [f"Now it is {detail.info.state}. {_sentence(detail.where)}"]
    if detail.info.state == "running":
        effects.append("Its handler is interrupted where it stands; what it has done stays done.")
    else:
        effects.append("It will not start any more.")
    effects.append("It is not retried, and its payload is not kept: send it anew if need be.")
    return _ask(visit, "Cancel this run?", effects, "Cancel the run", "cancel", run, danger=True)


@router.get("/do/runs/retry")
async def ask_retry(visit: OperatorVisit, run: str) -> Response:
    """Say what a retry does."""
    detail = await visit.desk.runs.show(run)
    effects = [f"Now it is {detail.info.state}. {_sentence(detail.where)}"]
    if detail.info.state == "failed":
        effects.append("Its next attempt starts at once instead of at its time.")
    else:
        effects.append("Its dead letter is sent again under the same run id, with fresh counts.")
    return _ask(visit, "Run it again?", effects, "Run it again", "retry", run)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _ask(
    visit: Visit,
    title: str,
    effects: list[str],
    button: str,
    verb: str,
    run: str,
    danger: bool = False,
) -> Response:
    fields = [("run", run)]
    question = Question(
        title, effects, button, f"/do/runs/{verb}", fields, address(run), danger, [run]
    )
    return visit.ask(question, "runs")


@router.post("/do/runs/cancel")
async def cancel(visit: OperatorVisit, fields: Fields) -> Response:
    """Cancel a run wherever it is."""
    run = fields.get("run", "")
    try:
        cancelled = await visit.desk.runs.cancel(run)
    except RunError as error:
        return visit.done(address(run), str(error), "bad")
    if cancelled:
        return visit.done(address(run), "The run is cancelled")
    return visit.done(address(run), "The run had ended already: nothing was changed", "bad")


@router.post("/do/runs/retry")
async def retry(visit: OperatorVisit, fields: Fields) -> Response:
    """Send a run again, or start its next attempt now."""
    run = fields.get("run", "")
    try:
        said = await visit.desk.runs.retry(run)
    except RunError as error:
        return visit.done(address(run), str(error), "bad")
    return visit.done(address(run), said[:1].upper() + said[1:])
