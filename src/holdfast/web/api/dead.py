"""Dead letters: list, group, show, replay one or many or edited, drop."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from holdfast.errors import InvalidInput, InvalidPayload
from holdfast.names import check_name
from holdfast.status.dead import Body, DeadFilter, DeadLetter, Replayed, Selection
from holdfast.status.dead_groups import LOOK, dead_groups
from holdfast.status.dead_pages import dead_page
from holdfast.web.masking import hides, masked_headers, masked_text
from holdfast.web.services import AdminDesk, Desk, OperatorDesk, ViewerDesk
from holdfast.web.wire import Cursor, Limit, Page, answer, raw, reads, returns, takes, when

router = APIRouter(tags=["dead letters"])

MANY = 1_000
"""The most letters that one request may act on."""

Id = Annotated[int, Path(ge=1, lt=2**63, description="The letter's id.")]


class LetterShown(msgspec.Struct, frozen=True):
    """A dead letter with its body."""

    letter: DeadLetter
    body: Body


class GroupShown(msgspec.Struct, frozen=True):
    """Letters of one job that died of the same thing."""

    group: str
    job: str
    kind: str
    """The error with its numbers and quoted parts blanked."""
    count: int
    newest: float
    ids: tuple[int, ...]


class Many(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which letters: ids, or a filter; not both, and not neither."""

    ids: tuple[int, ...] = ()
    job: str = ""
    group: str = ""
    reason: str = ""
    error: str = ""
    """A part of the error's text, in any case."""
    since: str = ""
    before: str = ""
    limit: int = MANY
    dry_run: bool = False
    """Only say what would happen."""


class Edited(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to send one letter again."""

    payload: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Another payload, any JSON; left out: as it was."""
    base64: str | None = None
    """Another payload that is not JSON."""


@router.get("/dead", summary="List dead letters", **returns(Page[DeadLetter]))
async def list_letters(
    request: Request,
    desk: ViewerDesk,
    job: str = "",
    group: str = "",
    reason: Annotated[str, Query(description="failed, timeout, invalid, crashed or lost.")] = "",
    error: Annotated[str, Query(max_length=1000, description="With this in its error.")] = "",
    since: Annotated[str, Query(description="From the last 10m, or since a time.")] = "",
    before: Annotated[str, Query(description="Older than 10m, or than a time.")] = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """Newest first, without their bodies."""
    wanted = _filter(desk, job, group, reason, error, since, before)
    page = await dead_page(desk.client, wanted, limit, _below(cursor))
    items = [_letter(desk, letter) for letter in page.letters]
    return answer(request, Page(items, str(page.older) if page.older else ""))


def _below(cursor: str) -> int:
    if cursor and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise InvalidInput(f"{cursor[:80]!r} is not a cursor: take it from `next` of a page")
    return int(cursor or 0)


def _filter(
    desk: Desk, job: str, group: str, reason: str, error: str, since: str, before: str
) -> DeadFilter:
    now = desk.client.broker.server_now()
    return DeadFilter(
        check_name(job, "job") if job else "",
        check_name(group, "group") if group else "",
        reason,
        error,
        since=when(since, now, "since"),
        before=when(before, now, "before"),
        seen=masked_text if hides(desk.user) else str,
    )


def _letter(desk: Desk, letter: DeadLetter) -> DeadLetter:
    if not hides(desk.user):
        return letter
    return msgspec.structs.replace(
        letter,
        error=masked_text(letter.error),
        traceback=masked_text(letter.traceback),
        headers=masked_headers(letter.headers),
        attempts=tuple(
            msgspec.structs.replace(a, error=masked_text(a.error)) for a in letter.attempts
        ),
    )


@router.get("/dead/groups", summary="Group dead letters", **returns(Page[GroupShown]))
async def groups(
    request: Request,
    desk: ViewerDesk,
    job: str = "",
    group: str = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """By job and kind of error, the largest group first, among the newest thousand letters."""
    wanted = _filter(desk, job, group, "", "", "", "")
    found = await dead_groups(desk.client, wanted, LOOK)
    shown = [
        GroupShown(
            g.group,
            g.job,
            masked_text(g.kind) if hides(desk.user) else g.kind,
            len(g.letters),
            max(letter.at for letter in g.letters),
            tuple(letter.id for letter in g.letters),
        )
        for g in found.groups
    ]
    start = _below(cursor)
    page = shown[start : start + limit]
    more = start + limit < len(shown)
    return answer(request, Page(page, str(start + limit) if more else ""))


@router.post("/dead/replay", summary="Replay letters", **takes(Many), **returns(list[Replayed]))
async def replay_many(
    request: Request, desk: OperatorDesk, wanted: Annotated[Many, Depends(reads(Many))]
) -> Response:
    """Send letters again; each becomes one run, however often and by whomever this is asked."""
    chosen = _selection(desk, wanted)
    done = await desk.dead.replay(chosen, dry_run=wanted.dry_run, limit=wanted.limit)
    return answer(request, done)


@router.post("/dead/drop", summary="Drop letters", **takes(Many), **returns(list[Replayed]))
async def drop_many(
    request: Request, desk: AdminDesk, wanted: Annotated[Many, Depends(reads(Many))]
) -> Response:
    """Remove letters for good."""
    chosen = _selection(desk, wanted)
    done = await desk.dead.drop(chosen, dry_run=wanted.dry_run, limit=wanted.limit)
    return answer(request, done)


def _selection(desk: Desk, wanted: Many) -> Selection:
    if not 1 <= wanted.limit <= MANY:
        raise InvalidInput(f"limit must be from 1 to {MANY:,}: act on the rest with a next request")
    chosen = _filter(
        desk,
        wanted.job,
        wanted.group,
        wanted.reason,
        wanted.error,
        wanted.since,
        wanted.before,
    )
    if bool(wanted.ids) == (chosen != DeadFilter()):
        raise InvalidInput("name ids, or a filter: one of the two")
    if len(wanted.ids) > MANY:
        raise InvalidInput(f"at most {MANY:,} ids in one request")
    return wanted.ids or chosen


@router.get("/dead/{id}", summary="Show a letter", **returns(LetterShown))
async def show(request: Request, desk: ViewerDesk, id: Id) -> Response:
    """Its story, headers and body."""
    letter = await desk.dead.show(id)
    body = await desk.read(await desk.dead.body(id), letter.job)
    return answer(request, LetterShown(_letter(desk, letter), body))


@router.post("/dead/{id}/replay", summary="Replay a letter", **takes(Edited), **returns(Replayed))
async def replay(
    request: Request, desk: OperatorDesk, id: Id, wanted: Annotated[Edited, Depends(reads(Edited))]
) -> Response:
    """Send it again, as it was or with another payload."""
    done = await desk.dead.replay([id], edited=_payload(wanted))
    return answer(request, done[0])


def _payload(wanted: Edited) -> bytes | None:
    given = wanted.payload is not msgspec.UNSET
    if given and wanted.base64 is not None:
        raise InvalidInput("give payload or base64, not both")
    if wanted.base64 is None:
        return raw(wanted.payload) if given else None
    try:
        return base64.b64decode(wanted.base64, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidPayload("base64 is not what it says: it cannot be decoded") from None


@router.delete("/dead/{id}", summary="Drop a letter", **returns(Replayed))
async def drop(request: Request, desk: AdminDesk, id: Id) -> Response:
    """Remove it for good."""
    return answer(request, (await desk.dead.drop([id]))[0])
