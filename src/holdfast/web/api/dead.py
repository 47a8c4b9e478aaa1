"""Dead letters: list, group, show, replay (also edited), drop."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from holdfast.errors import InvalidInput, InvalidPayload
from holdfast.names import check_name
from holdfast.status import actions as table
from holdfast.status.dead import (
    GROUP_LOOK,
    Body,
    DeadFilter,
    DeadLetter,
    Replayed,
    Selection,
    dead_groups,
    dead_page,
)
from holdfast.web.masking import masked_text
from holdfast.web.services import Access, ViewerAccess, acting
from holdfast.web.wire import Cursor, Limit, Page, answer, does, raw, reads, returns, takes, when

router = APIRouter(tags=["dead letters"])

MANY = 1_000
"""The most letters one request may act on: it answers within a proxy's timeout."""

Id = Annotated[int, Path(ge=1, lt=2**63, description="The letter's id.")]


class LetterShown(msgspec.Struct, frozen=True):
    """A dead letter with its body."""

    letter: DeadLetter
    body: Body


class GroupShown(msgspec.Struct, frozen=True):
    """Letters of one job with the same kind of error."""

    group: str
    job: str
    kind: str
    """The error without its numbers and quoted parts."""
    count: int
    newest: float
    ids: tuple[int, ...]


class Many(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which letters: either ids or a filter."""

    ids: tuple[int, ...] = ()
    job: str = ""
    group: str = ""
    reason: str = ""
    error: str = ""
    """Only letters whose error contains this; case does not matter."""
    since: str = ""
    before: str = ""
    limit: int = MANY
    dry_run: bool = False
    """Only report what would happen."""


class Edited(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to replay one letter."""

    payload: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """A new payload, any JSON; leave out to keep the old one."""
    base64: str | None = None
    """A new payload that is not JSON."""


@router.get("/dead", summary="List dead letters", **returns(Page[DeadLetter]))
async def list_letters(
    request: Request,
    access: ViewerAccess,
    job: str = "",
    group: str = "",
    reason: Annotated[str, Query(description="failed, timeout, invalid, crashed or lost.")] = "",
    error: Annotated[
        str, Query(max_length=1000, description="Only letters whose error contains this.")
    ] = "",
    since: Annotated[
        str, Query(description="Only letters of the last e.g. `10m`, or since a time.")
    ] = "",
    before: Annotated[
        str, Query(description="Only letters older than e.g. `10m`, or than a time.")
    ] = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """Newest first, without bodies."""
    wanted = _filter(access, job, group, reason, error, since, before)
    page = await dead_page(access.client, wanted, limit, _below(cursor))
    items = [_letter(access, letter) for letter in page.letters]
    return answer(request, Page(items, str(page.older) if page.older else ""))


def _below(cursor: str) -> int:
    if cursor and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise InvalidInput(f"{cursor[:80]!r} is not a cursor: use `next` of the previous page")
    return int(cursor or 0)


def _filter(
    access: Access, job: str, group: str, reason: str, error: str, since: str, before: str
) -> DeadFilter:
    now = access.client.broker.server_now()
    return DeadFilter(
        check_name(job, "job") if job else "",
        check_name(group, "group") if group else "",
        reason,
        error,
        since=when(since, now, "since"),
        before=when(before, now, "before"),
        seen=str if access.user.sees_secrets else masked_text,
    )


def _letter(access: Access, letter: DeadLetter) -> DeadLetter:
    if access.user.sees_secrets:
        return letter
    return msgspec.structs.replace(
        access.masked(letter, "error", "traceback"),
        headers=access.headers(letter.headers),
        attempts=tuple(access.masked(attempt, "error") for attempt in letter.attempts),
    )


@router.get("/dead/groups", summary="Group dead letters", **returns(Page[GroupShown]))
async def groups(
    request: Request,
    access: ViewerAccess,
    job: str = "",
    group: str = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """By job and kind of error among the newest thousand letters, largest group first."""
    wanted = _filter(access, job, group, "", "", "", "")
    found = await dead_groups(access.client, wanted, GROUP_LOOK)
    shown = [
        GroupShown(
            g.group,
            g.job,
            access.text(g.kind),
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


@router.post(
    "/dead/replay",
    summary="Replay dead letters",
    **takes(Many),
    **does(table.replay_dead, list[Replayed]),
)
async def replay_many(
    request: Request,
    access: Annotated[Access, acting(table.replay_dead)],
    wanted: Annotated[Many, Depends(reads(Many))],
) -> Response:
    chosen = _selection(access, wanted)
    done = await table.replay_dead(access, chosen, dry_run=wanted.dry_run, limit=wanted.limit)
    return answer(request, done)


@router.post(
    "/dead/drop",
    summary="Drop dead letters",
    **takes(Many),
    **does(table.drop_dead, list[Replayed]),
)
async def drop_many(
    request: Request,
    access: Annotated[Access, acting(table.drop_dead)],
    wanted: Annotated[Many, Depends(reads(Many))],
) -> Response:
    chosen = _selection(access, wanted)
    done = await table.drop_dead(access, chosen, dry_run=wanted.dry_run, limit=wanted.limit)
    return answer(request, done)


def _selection(access: Access, wanted: Many) -> Selection:
    if not 1 <= wanted.limit <= MANY:
        raise InvalidInput(f"limit must be from 1 to {MANY:,}: send another request for the rest")
    chosen = _filter(
        access,
        wanted.job,
        wanted.group,
        wanted.reason,
        wanted.error,
        wanted.since,
        wanted.before,
    )
    if bool(wanted.ids) == (chosen != DeadFilter()):
        raise InvalidInput("give either ids or a filter")
    if len(wanted.ids) > MANY:
        raise InvalidInput(f"at most {MANY:,} ids in one request")
    return wanted.ids or chosen


@router.get("/dead/{id}", summary="Show a dead letter", **returns(LetterShown))
async def show(request: Request, access: ViewerAccess, id: Id) -> Response:
    """Its attempts, headers and body."""
    letter = await access.dead.show(id)
    body = await access.read(await access.dead.body(id), letter.job)
    return answer(request, LetterShown(_letter(access, letter), body))


@router.post(
    "/dead/{id}/replay",
    summary="Replay a dead letter",
    **takes(Edited),
    **does(table.replay_dead, Replayed),
)
async def replay(
    request: Request,
    access: Annotated[Access, acting(table.replay_dead)],
    id: Id,
    wanted: Annotated[Edited, Depends(reads(Edited))],
) -> Response:
    done = await table.replay_dead(access, [id], edited=_payload(wanted))
    return answer(request, done[0])


def _payload(wanted: Edited) -> bytes | None:
    given = wanted.payload is not msgspec.UNSET
    if given and wanted.base64 is not None:
        raise InvalidInput("give either payload or base64")
    if wanted.base64 is None:
        return raw(wanted.payload) if given else None
    try:
        return base64.b64decode(wanted.base64, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidPayload("base64 is not valid base64") from None


@router.delete("/dead/{id}", summary="Drop a dead letter", **does(table.drop_dead, Replayed))
async def drop(
    request: Request, access: Annotated[Access, acting(table.drop_dead)], id: Id
) -> Response:
    return answer(request, (await table.drop_dead(access, [id]))[0])
