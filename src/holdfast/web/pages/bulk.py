"""`/bulk`: one action on many runs: selected on the list, or all that match its filters.

The confirmation page only counts; `holdfast.web.bulks` says what the action does, and to which
runs. Counting stops after a few seconds, and the page then says that more may match; the action
takes all of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from typing import Final

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from holdfast.clock import rfc3339
from holdfast.durations import instant
from holdfast.errors import InvalidInput
from holdfast.status.listing import RunFilter, RunInfo
from holdfast.status.operators import shortlist
from holdfast.web.bulks import MOST, VERBS, BulkRecord, Bulks, Verb
from holdfast.web.pages.rendering import Question, exact, many
from holdfast.web.pages.request import OperatorPage, PageRequest, ViewerPage
from holdfast.web.pages.run_list import Wanted
from holdfast.web.problems import Problem
from holdfast.web.security import Fields
from holdfast.web.services import Access
from holdfast.web.wire import when

router = APIRouter(include_in_schema=False)

PAGE: Final = 1_000
"""Runs read at a time while counting: the time is checked in between."""
COUNT_SECONDS: Final = 5.0
"""How long counting may take before the page says that there are more."""
SELECTED: Final = 500
"""Most selected runs: ten times what a page lists."""


def bulks() -> Bulks:
    """The bulk actions that this process works on."""
    return Bulks(_filter)


def _filter(by: Access, record: BulkRecord, state: str) -> RunFilter:
    """Which runs of a bulk action to list next."""
    wanted = Wanted.of(record.filters)
    found = wanted.filter(by, record.asked, state)
    if record.verb == "cancel":  # cancel them, whatever state they are in by now
        return found
    return dataclasses.replace(found, until=min(found.until or record.asked, record.asked))


# ---- asking


@router.get("/do/runs/bulk")
async def ask(request: Request, page: OperatorPage) -> Response:
    """Count the runs and ask for confirmation."""
    query = request.query_params
    given = {name: "\n".join(query.getlist(name)) for name in query}
    verb, record = _verb(page, given), _record(page, given)
    counted = await _selected(page, record) if record.runs else await _count(page, record)
    if not counted.runs and not counted.more:
        states = ", ".join(verb.states)
        return page.done("/runs", f"Nothing to {verb.name}: no run is {states}", "bad")
    question = Question(
        f"{verb.name.capitalize()} {counted.text}?",
        [*counted.effects, verb.effect],
        verb.button,
        "/do/runs/bulk",
        _hidden(record, len(counted.runs)),
        "/runs",
        danger=verb.name != "retry",
        listed=shortlist([f"{info.run}  {info.state}" for info in counted.runs]),
    )
    return page.ask(question, "runs")


@router.post("/do/runs/bulk")
async def act(page: OperatorPage, fields: Fields) -> Response:
    """Start it, and show how far it is."""
    verb, record = _verb(page, fields), _record(page, fields)
    id = await _bulks(page).start(page, record)
    what = many(record.expected, "run") if record.expected else "all that match"
    return page.done(f"/bulk/{id}", f"{what} to {verb.name}")


def _bulks(page: PageRequest) -> Bulks:
    found: Bulks = page.request.app.state.bulks
    return found


def _verb(page: PageRequest, given: dict[str, str]) -> Verb:
    verb = VERBS.get(given.get("verb", ""))
    if verb is None:
        raise InvalidInput(f"choose what to do: {', '.join(VERBS)}")
    if verb.admin and not page.user.may("admin"):
        raise Problem(403, "Only an admin may remove dead letters for good")
    return verb


def _record(page: PageRequest, given: dict[str, str]) -> BulkRecord:
    """The bulk action that a form describes, with the times of its filters fixed."""
    verb = VERBS[given["verb"]]
    asked = instant(given["asked"], "asked") if given.get("asked") else page.now
    record = BulkRecord(verb.name, asked=min(asked, page.now))
    expected = given.get("expected", "")
    record.expected = int(expected) if expected.isdecimal() and len(expected) < 10 else 0
    if given.get("run"):
        record.runs = list(dict.fromkeys(given["run"].split("\n")))
        if len(record.runs) > SELECTED:
            raise InvalidInput(f"select at most {SELECTED} runs, or filter the list")
        return record
    wanted = Wanted.of(given)
    if wanted.empty:
        raise InvalidInput("select runs, or filter the list first")
    if wanted.state and wanted.state not in verb.states:
        raise InvalidInput(
            f"not possible for runs that are {wanted.state}, only for: {', '.join(verb.states)}"
        )
    record.states = [wanted.state] if wanted.state else list(verb.states)
    record.filters = {k: v for k, v in msgspec.structs.asdict(wanted).items() if v}
    for name in ("since", "until"):
        if name in record.filters:
            record.filters[name] = rfc3339(when(record.filters[name], record.asked, name))
    wanted.filter(page, record.asked)  # refuse an impossible selection before it is confirmed
    return record


def _hidden(record: BulkRecord, expected: int) -> list[tuple[str, str]]:
    """The hidden fields of the confirmation form."""
    chosen = [("run", run) for run in record.runs] or list(record.filters.items())
    asked = rfc3339(record.asked)
    return [("verb", record.verb), ("asked", asked), ("expected", str(expected)), *chosen]


class _Counted(msgspec.Struct, frozen=True):
    """What the confirmation page says about the runs."""

    runs: list[RunInfo]
    more: bool = False
    back_to: float = 0.0
    """Counting stopped here; 0 if it stopped at `MOST`."""
    gone: int = 0

    @property
    def text(self) -> str:
        if not self.runs:
            return "all runs that match"
        return f"{'at least ' if self.more else ''}{many(len(self.runs), 'run')}"

    @property
    def effects(self) -> list[str]:
        counts = Counter(info.state for info in self.runs)
        by_state = ", ".join(f"{count:,} {state}" for state, count in counts.most_common())
        found = [f"{many(len(self.runs), 'run')}: {by_state}."] if self.runs else []
        if self.gone:
            found.append(f"{many(self.gone, 'selected run')} no longer known.")
        if self.more and len(self.runs) >= MOST:
            found.append(f"More match: it pauses after {MOST:,}, and can be continued from there.")
        elif self.more:
            found.append(
                f"Counted back to {exact(self.back_to)} in {COUNT_SECONDS:g} seconds. Older ones "
                "that match are included, too."
            )
        return found


async def _selected(page: PageRequest, record: BulkRecord) -> _Counted:
    answers = await asyncio.gather(*map(page.runs.show, record.runs), return_exceptions=True)
    infos = [one.info for one in answers if not isinstance(one, BaseException)]
    record.runs = [info.run for info in infos]
    return _Counted(infos, gone=len(answers) - len(infos))


async def _count(page: PageRequest, record: BulkRecord) -> _Counted:
    """Runs that match the filters, until there are `MOST` or the time is over."""
    found: dict[str, RunInfo] = {}
    clock = page.client.broker.clock
    deadline = clock.monotonic() + COUNT_SECONDS
    for state in record.states:
        filter_, cursor = _filter(page, record, state), ""
        while True:
            part = await page.run_pages.page(filter_, PAGE, cursor)
            found |= {one.run: one for one in part.runs if one.created <= record.asked}
            cursor = part.older
            if not cursor:
                break
            if len(found) >= MOST or clock.monotonic() > deadline:
                return _Counted(list(found.values())[:MOST], True, part.back_to)
    return _Counted(list(found.values()))


# ---- watching


@router.get("/bulk/{id}")
async def show(page: ViewerPage, id: str) -> Response:
    """Its progress, and the refused runs."""
    bulk = await _bulks(page).find(page, id)
    return await page.show(
        "bulk.html",
        "runs",
        id=id,
        bulk=bulk,
        state=bulk.state(page.now),
        refused=[(run, page.text(why)) for run, why in bulk.reasons],
    )


@router.post("/do/bulk/continue")
async def resume(page: OperatorPage, fields: Fields) -> Response:
    """Continue one that was interrupted, or that paused at its limit."""
    id = fields.get("id", "")
    await _bulks(page).resume(page, id)
    return page.done(f"/bulk/{id}", "It continues")
