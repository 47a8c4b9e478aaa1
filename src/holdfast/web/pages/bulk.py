"""`/bulk`: one action on many runs: selected on the list, or all that match its filters.

The confirmation counts first and changes nothing. What is confirmed is what matched then: runs that
changed later are left alone. Each run is acted on and audited by itself, with the same actions as a
single one; what has ended, or was sent again by somebody else meanwhile, is refused and told.

The work goes on while its page is closed, in the web process that was asked; another process does
not know it, but the audit names every run. If the process stops, the rest is left undone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from holdfast.clock import rfc3339
from holdfast.errors import HoldfastError, InvalidInput, NotFound, RunError
from holdfast.status import actions as table
from holdfast.status.listing import CANCELLABLE, SENT_AGAIN, RunInfo
from holdfast.status.operators import shortlist
from holdfast.web.pages.rendering import Question, many
from holdfast.web.pages.request import OperatorPage, PageRequest, ViewerPage
from holdfast.web.pages.run_list import Wanted
from holdfast.web.problems import Problem
from holdfast.web.security import Fields

router = APIRouter(include_in_schema=False)

MOST: Final = 10_000
"""Runs of one bulk action: what an operator can still answer for, and a few MB of memory."""
AT_ONCE: Final = 20
"""Runs acted on at a time: hides the round trips without flooding the server."""
PAGE: Final = 1_000
"""Runs read at a time while counting."""
COUNT_SECONDS: Final = 5.0
"""How long counting may take before it is told that there are more."""
KEPT: Final = 50
"""Bulk actions that a process remembers after their end."""
REFUSALS: Final = 100
"""Refused runs that are listed by name."""


class Verb(msgspec.Struct, frozen=True):
    """What can be done with many runs."""

    name: str
    states: tuple[str, ...]
    """In which a run can be meant."""
    button: str
    effect: str
    admin: bool = False


VERBS: Final = {
    verb.name: verb
    for verb in (
        Verb(
            "cancel",
            CANCELLABLE,
            "Cancel them",
            "Those that wait will not start; handlers that run are interrupted. None is retried.",
        ),
        Verb(
            "retry",
            SENT_AGAIN,
            "Run them again",
            "Dead letters are sent again under the same run id, failed runs start their next "
            "attempt now.",
        ),
        Verb(
            "delete",
            ("dead", "lost"),
            "Remove for good",
            "Their dead letters are removed with their payloads; the history of the runs stays.",
            admin=True,
        ),
    )
}


class Bulk:
    """One action on many runs, under way or over."""

    def __init__(self, verb: Verb, by: PageRequest, runs: list[str]) -> None:
        self.id = secrets.token_hex(6)
        self.verb = verb
        self.who = by.user.name
        self.started = by.now
        self.ended = 0.0
        self.runs = runs
        self.done = 0
        self.refused: list[tuple[str, str]] = []
        self._by = by

    @property
    def handled(self) -> int:
        return self.done + len(self.refused)

    async def work(self) -> None:
        """Act on all of them."""
        try:
            for n in range(0, len(self.runs), AT_ONCE):
                part = self.runs[n : n + AT_ONCE]
                for run, why in zip(part, await asyncio.gather(*map(self._one, part)), strict=True):
                    if why:
                        self.refused.append((run, why))
                    else:
                        self.done += 1
        finally:
            self.ended = self._by.now

    async def _one(self, run: str) -> str:
        """Act on one; returns why it was refused."""
        try:
            if self.verb.name == "cancel":
                return "" if await table.cancel_run(self._by, run) else "it had already ended"
            if self.verb.name == "retry":
                await table.retry_run(self._by, run)
                return ""
            letter = (await self._by.runs.find(run)).letter
            if letter is None:
                raise RunError("it has no dead letter", run=run)
            (done,) = await table.drop_dead(self._by, [letter.sequence])
            return "" if done.result == "dropped" else done.why or "already gone"
        except HoldfastError as error:
            return str(error)


class Bulks:
    """The bulk actions of one web process."""

    def __init__(self) -> None:
        self._known: dict[str, Bulk] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, bulk: Bulk) -> None:
        self._known[bulk.id] = bulk
        over = [id for id, one in self._known.items() if one.ended]
        for id in over[: max(0, len(self._known) - KEPT)]:
            del self._known[id]
        task = asyncio.create_task(bulk.work(), name="holdfast-bulk")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def find(self, id: str) -> Bulk:
        found = self._known.get(id)
        if found is None:
            raise NotFound("this web process does not know that action: see the audit")
        return found

    async def aclose(self) -> None:
        """Stop what is under way: the connection is about to be closed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


# ---- asking


@router.get("/do/runs/bulk")
async def ask(request: Request, page: OperatorPage) -> Response:
    """Count what is meant, and ask."""
    query = request.query_params
    given = {name: "\n".join(query.getlist(name)) for name in query}
    verb = _verb(page, given)
    runs, complete = await _meant(page, verb, given)
    if not runs:
        states = ", ".join(verb.states)
        return page.done("/runs", f"Nothing to {verb.name}: no run is {states}", "bad")
    counts = Counter(info.state for info in runs)
    by_state = ", ".join(f"{count:,} {state}" for state, count in counts.most_common())
    effects = [f"{many(len(runs), 'run')}: {by_state}.", verb.effect]
    if not complete:
        effects.append(f"More match: this takes the newest {len(runs):,}, repeat it for the rest.")
    hidden = [(name, one) for name, value in given.items() for one in value.split("\n")]
    if not given.get("run"):
        hidden = [pair for pair in hidden if pair[0] != "until"]
        hidden.append(("until", rfc3339(page.now)))
    question = Question(
        f"{verb.name.capitalize()} {many(len(runs), 'run')}?",
        effects,
        verb.button,
        "/do/runs/bulk",
        hidden,
        "/runs",
        danger=verb.name != "retry",
        listed=shortlist([f"{info.run}  {info.state}" for info in runs]),
    )
    return page.ask(question, "runs")


@router.post("/do/runs/bulk")
async def act(page: OperatorPage, fields: Fields) -> Response:
    """Start it, and show how far it is."""
    verb = _verb(page, fields)
    runs, _ = await _meant(page, verb, fields)
    bulk = Bulk(verb, page, [info.run for info in runs])
    bulks: Bulks = page.request.app.state.bulks
    bulks.start(bulk)
    return page.done(f"/bulk/{bulk.id}", f"{many(len(runs), 'run')} to {verb.name}")


def _verb(page: PageRequest, given: dict[str, Any]) -> Verb:
    verb = VERBS.get(given.get("verb", ""))
    if verb is None:
        raise InvalidInput(f"choose what to do: {', '.join(VERBS)}")
    if verb.admin and not page.user.may("admin"):
        raise Problem(403, "Only an admin may remove dead letters for good")
    return verb


async def _meant(
    page: PageRequest, verb: Verb, given: dict[str, str]
) -> tuple[list[RunInfo], bool]:
    """The runs that are selected, or all that match the filters; and whether these are all."""
    if given.get("run"):
        names = list(dict.fromkeys(given["run"].split("\n")))[:MOST]
        shown = await asyncio.gather(*(page.runs.show(run) for run in names))
        return [detail.info for detail in shown], True
    wanted = Wanted.of(given)
    if wanted.empty:
        raise InvalidInput("select runs, or filter the list first")
    if wanted.state and wanted.state not in verb.states:
        raise InvalidInput(f"none that is {wanted.state} can be meant: {', '.join(verb.states)}")
    found: dict[str, RunInfo] = {}
    clock = page.client.broker.clock
    deadline, complete = clock.monotonic() + COUNT_SECONDS, True
    for state in (wanted.state,) if wanted.state else verb.states:
        filter_, cursor = wanted.filter(page, state), ""
        while True:
            part = await page.run_pages.page(filter_, PAGE, cursor)
            found |= {info.run: info for info in part.runs}
            cursor = part.older
            if not cursor:
                break
            if len(found) >= MOST or clock.monotonic() > deadline:
                complete = False
                break
    return list(found.values())[:MOST], complete and len(found) <= MOST


# ---- watching


@router.get("/bulk/{id}")
async def show(page: ViewerPage, id: str) -> Response:
    """How far it is, and what was refused."""
    bulks: Bulks = page.request.app.state.bulks
    bulk = bulks.find(id)
    return await page.show(
        "bulk.html",
        "runs",
        bulk=bulk,
        refused=[(run, page.text(why)) for run, why in bulk.refused[:REFUSALS]],
    )
