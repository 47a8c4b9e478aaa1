"""`/audit`: who did what, when, and to what; by user, action, object or run."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

from holdfast.status.audit import AuditLine
from holdfast.web.pages.request import ViewerPage

router = APIRouter(include_in_schema=False)

SHOWN: Final = 50
"""Rows of one page."""
LOOK: Final = 5_000
"""Lines of the ledger that one page reads; "Older" continues from there."""


@router.get("/audit")
async def list_actions(
    page: ViewerPage, q: str = "", who: str = "", run: str = "", before: int = 0
) -> Response:
    """The actions that match, newest first."""
    text, user = q.strip().casefold(), who.strip().casefold()

    def matches(line: AuditLine) -> bool:
        what = (
            f"{line.noun} {line.verb} {line.group} {line.job} {page.text(line.detail)} {line.host}"
        )
        known = text in what.casefold() or any(text in one.casefold() for one in line.runs)
        return known and user in line.who.casefold()

    lines, older = await page.audit.page(run.strip(), SHOWN, before, LOOK, matches=matches)
    return await page.show(
        "audit.html",
        "audit",
        lines=lines,
        older=older,
        before=before,
        chosen={"q": q, "who": who, "run": run},
    )
