"""`/dead`: dead letters by job and kind of error; look into one, edit it, replay or drop many."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from holdfast.errors import InvalidInput
from holdfast.model.run import fingerprint
from holdfast.names import check_name
from holdfast.status.dead import DeadFilter, DeadLetter, Replayed, check_id
from holdfast.status.dead_groups import LOOK, dead_groups
from holdfast.web.pages.rendering import SHOWN_BYTES, Question, many
from holdfast.web.pages.visit import AdminVisit, OperatorVisit, ViewerVisit, Visit
from holdfast.web.security import checked_form

router = APIRouter(include_in_schema=False)
Fields = Annotated[dict[str, str], Depends(checked_form)]
Ids = Annotated[list[int], Query()]

SHOWN: Final = 20
"""Letters listed in a group, and groups on the page."""
LISTED: Final = 8


@router.get("/dead")
async def list_dead(visit: ViewerVisit, job: str = "", error: str = "", kind: str = "") -> Response:
    """Dead letters by job and kind."""
    named = check_name(job, "job") if job else ""
    found = await dead_groups(visit.client, DeadFilter(named, error=error, seen=visit.text))
    groups = [g for g in found.groups if not kind or visit.text(g.kind) == kind]
    return await visit.show(
        "dead.html",
        "dead",
        groups=groups[:SHOWN],
        hidden=max(0, len(groups) - SHOWN),
        looked=found.looked,
        limit=LOOK,
        total=found.total,
        shown=LOOK if kind else SHOWN,
        chosen={"job": job, "error": error, "kind": kind},
        known=sorted({where[1] for where in found.totals}),
    )


@router.get("/dead/{id}")
async def show(visit: ViewerVisit, id: int) -> Response:
    """One letter: its story, headers and body."""
    letter = await visit.desk.dead.show(id)
    body = await visit.desk.dead.body(id)
    return await visit.show(
        "letter.html",
        "dead",
        letter=letter,
        kind=visit.text(fingerprint(letter.error) or letter.reason),
        headers=visit.headers(letter.headers),
        body=await visit.body(body, letter.job),
        text=_is_text(body) and len(body) <= SHOWN_BYTES,
    )


def _is_text(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


# ---- one or many, again or never


@router.get("/do/dead/replay")
async def ask_replay(visit: OperatorVisit, id: Ids = []) -> Response:  # noqa: B006  # never changed
    """Say what a replay does."""
    letters = await _letters(visit, id)
    effects = [
        f"{many(len(letters), 'run')} sent again to {_jobs(letters)}, each under its own id with "
        "fresh counts.",
        "A letter whose run is sent leaves this list; one that was replayed already is refused.",
    ]
    return _ask(visit, "Replay", effects, "Send again", letters)


@router.get("/do/dead/drop")
async def ask_drop(visit: AdminVisit, id: Ids = []) -> Response:  # noqa: B006  # never changed
    """Say what a drop does."""
    letters = await _letters(visit, id)
    effects = [
        f"{many(len(letters), 'dead letter')} removed for good, with payload and story.",
        "The runs will not happen, and nothing can bring the letters back.",
    ]
    return _ask(visit, "Drop", effects, "Remove for good", letters, danger=True)


async def _letters(visit: Visit, ids: list[int]) -> list[DeadLetter]:
    if not ids:
        raise InvalidInput("choose at least one dead letter")
    if len(ids) > LOOK:
        raise InvalidInput(f"at most {LOOK:,} dead letters at once")
    return [await visit.desk.dead.show(check_id(id)) for id in sorted(set(ids))]


def _jobs(letters: list[DeadLetter]) -> str:
    names = sorted({letter.job for letter in letters})
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more jobs" if len(names) > 3 else "")


def _ask(
    visit: Visit,
    verb: str,
    effects: list[str],
    button: str,
    letters: list[DeadLetter],
    danger: bool = False,
) -> Response:
    listed = [f"{one.id}  {one.run}" for one in letters[:LISTED]]
    if len(letters) > LISTED:
        listed.append(f"… and {len(letters) - LISTED} more")
    question = Question(
        f"{verb} {many(len(letters), 'dead letter')}?",
        effects,
        button,
        f"/do/dead/{verb.lower()}",
        [("id", str(one.id)) for one in letters],
        "/dead" if len(letters) > 1 else f"/dead/{letters[0].id}",
        danger,
        listed,
    )
    return visit.ask(question, "dead")


def _ids(fields: dict[str, str]) -> list[int]:
    given = fields.get("id", "").split()
    if not given or not all(one.isascii() and one.isdigit() and len(one) < 19 for one in given):
        raise InvalidInput("choose at least one dead letter")
    return [check_id(int(one)) for one in given]


@router.post("/do/dead/replay")
async def replay(visit: OperatorVisit, fields: Fields) -> Response:
    """Send letters again; with a body, one letter with that payload."""
    edited = fields["body"].replace("\r\n", "\n").encode() if "body" in fields else None
    done = await visit.desk.dead.replay(_ids(fields), edited=edited)
    return _told(visit, done, "sent again")


@router.post("/do/dead/drop")
async def drop(visit: AdminVisit, fields: Fields) -> Response:
    """Remove letters for good."""
    return _told(visit, await visit.desk.dead.drop(_ids(fields)), "dropped")


def _told(visit: Visit, done: Sequence[Replayed], verb: str) -> Response:
    good = sum(one.result in ("replayed", "dropped") for one in done)
    text = f"{many(good, 'dead letter')} {verb}"
    refused = [one for one in done if one.result not in ("replayed", "dropped")]
    if refused:
        why = refused[0].why or "gone already"
        text += f"; {many(len(refused), 'was', 'were')} not: {why}"
    return visit.done("/dead", text, "bad" if refused else "good")


@router.post("/do/dead/edit")
async def edit(visit: OperatorVisit, fields: Fields) -> Response:
    """Ask about a letter with another payload: a page of its own, because the payload is long."""
    ids = _ids(fields)
    letter = await visit.desk.dead.show(ids[0])
    body = fields.get("body", "").replace("\r\n", "\n")
    effects = [
        f"One run of {letter.job} is sent again under its own id, with the payload below "
        "instead of the one it had.",
        "The letter, with the old payload, is removed from this list.",
    ]
    if not _is_json(body):
        effects.append("The payload is not JSON: jobs that expect JSON refuse it.")
    question = Question(
        f"Replay dead letter {letter.id} with another payload?",
        effects,
        "Send it",
        "/do/dead/replay",
        [("id", str(letter.id)), ("body", body)],
        f"/dead/{letter.id}",
        listed=[body],
    )
    return visit.ask(question, "dead")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
