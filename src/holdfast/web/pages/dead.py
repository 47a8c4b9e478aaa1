"""`/dead`: dead letters by job and kind of error; show, edit, replay and drop them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Final

from fastapi import APIRouter, Query
from starlette.responses import Response

from holdfast.errors import InvalidInput
from holdfast.model.run import fingerprint
from holdfast.names import check_name
from holdfast.status.dead import GROUP_LOOK, DeadFilter, DeadLetter, Replayed, check_id, dead_groups
from holdfast.web.pages.rendering import SHOWN_BYTES, Question, many
from holdfast.web.pages.request import AdminPage, OperatorPage, PageRequest, ViewerPage
from holdfast.web.security import Fields

router = APIRouter(include_in_schema=False)
Ids = Annotated[list[int], Query()]

SHOWN: Final = 20
"""Letters listed in a group, and groups on the page."""
LISTED: Final = 8


@router.get("/dead")
async def list_dead(page: ViewerPage, job: str = "", error: str = "", kind: str = "") -> Response:
    """Dead letters by job and kind."""
    named = check_name(job, "job") if job else ""
    found = await dead_groups(page.client, DeadFilter(named, error=error, seen=page.text))
    groups = [g for g in found.groups if not kind or page.text(g.kind) == kind]
    return await page.show(
        "dead.html",
        "dead",
        groups=groups[:SHOWN],
        hidden=max(0, len(groups) - SHOWN),
        looked=found.looked,
        limit=GROUP_LOOK,
        total=found.total,
        shown=GROUP_LOOK if kind else SHOWN,
        chosen={"job": job, "error": error, "kind": kind},
        known=sorted({where[1] for where in found.totals}),
    )


@router.get("/dead/{id}")
async def show(page: ViewerPage, id: int) -> Response:
    """One letter: its attempts, headers and payload."""
    letter = await page.dead.show(id)
    body = await page.dead.body(id)
    return await page.show(
        "letter.html",
        "dead",
        letter=letter,
        kind=page.text(fingerprint(letter.error) or letter.reason),
        headers=page.headers(letter.headers),
        body=await page.body(body, letter.job),
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
async def ask_replay(page: OperatorPage, id: Ids = []) -> Response:  # noqa: B006  # never changed
    """Say what a replay does."""
    letters = await _letters(page, id)
    effects = [
        f"{many(len(letters), 'run')} sent again to {_jobs(letters)}, each under its own id with "
        "fresh counts.",
        "A letter whose run is sent leaves this list; one that was replayed already is refused.",
    ]
    return _ask(page, "Replay", effects, "Send again", letters)


@router.get("/do/dead/drop")
async def ask_drop(page: AdminPage, id: Ids = []) -> Response:  # noqa: B006  # never changed
    """Say what a drop does."""
    letters = await _letters(page, id)
    effects = [
        f"{many(len(letters), 'dead letter')} removed for good, with payload and story.",
        "The runs will not happen, and nothing can bring the letters back.",
    ]
    return _ask(page, "Drop", effects, "Remove for good", letters, danger=True)


async def _letters(page: PageRequest, ids: list[int]) -> list[DeadLetter]:
    if not ids:
        raise InvalidInput("choose at least one dead letter")
    if len(ids) > GROUP_LOOK:
        raise InvalidInput(f"at most {GROUP_LOOK:,} dead letters at once")
    return [await page.dead.show(check_id(id)) for id in sorted(set(ids))]


def _jobs(letters: list[DeadLetter]) -> str:
    names = sorted({letter.job for letter in letters})
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more jobs" if len(names) > 3 else "")


def _ask(
    page: PageRequest,
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
    return page.ask(question, "dead")


def _ids(fields: dict[str, str]) -> list[int]:
    given = fields.get("id", "").split()
    if not given or not all(one.isascii() and one.isdigit() and len(one) < 19 for one in given):
        raise InvalidInput("choose at least one dead letter")
    return [check_id(int(one)) for one in given]


@router.post("/do/dead/replay")
async def replay(page: OperatorPage, fields: Fields) -> Response:
    """Send letters again; with a body, one letter with that payload."""
    edited = fields["body"].replace("\r\n", "\n").encode() if "body" in fields else None
    done = await page.dead.replay(_ids(fields), edited=edited)
    return _told(page, done, "sent again")


@router.post("/do/dead/drop")
async def drop(page: AdminPage, fields: Fields) -> Response:
    """Remove letters for good."""
    return _told(page, await page.dead.drop(_ids(fields)), "dropped")


def _told(page: PageRequest, done: Sequence[Replayed], verb: str) -> Response:
    good = sum(one.result in ("replayed", "dropped") for one in done)
    text = f"{many(good, 'dead letter')} {verb}"
    refused = [one for one in done if one.result not in ("replayed", "dropped")]
    if refused:
        why = refused[0].why or "gone already"
        text += f"; {many(len(refused), 'was', 'were')} not: {why}"
    return page.done("/dead", text, "bad" if refused else "good")


@router.post("/do/dead/edit")
async def edit(page: OperatorPage, fields: Fields) -> Response:
    """Ask about a letter with another payload: a page of its own, because the payload is long."""
    ids = _ids(fields)
    letter = await page.dead.show(ids[0])
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
    return page.ask(question, "dead")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
