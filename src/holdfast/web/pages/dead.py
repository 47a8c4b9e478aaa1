"""`/dead`: dead letters by job and kind of error; show, edit, replay and drop them."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

from holdfast.model.run import fingerprint
from holdfast.names import check_name
from holdfast.status.dead import GROUP_LOOK, DeadFilter, dead_groups
from holdfast.web.pages.rendering import SHOWN_BYTES
from holdfast.web.pages.request import ViewerPage

router = APIRouter(include_in_schema=False)

SHOWN: Final = 20
"""Letters listed in a group, and groups on the page."""


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
