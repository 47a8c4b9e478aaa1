"""The pages: rendered here, complete without a script; the script only refreshes them."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader

from uptime import summary
from uptime.check import Check
from uptime.record import State
from uptime.service import Refusal
from uptime.web import charts
from uptime.web.api import Managed, ServiceOf, cache_of, forget
from uptime.web.forms import check_from, fields_of
from uptime.web.security import COOKIE, SESSION_SECONDS

router = APIRouter(include_in_schema=False)
_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
)


def _moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _lasting(seconds: float) -> str:
    """A duration in its two largest units."""
    parts = []
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        count, seconds = divmod(max(0, int(seconds)), size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"


_templates.filters |= {"moment": _moment, "lasting": _lasting}
_templates.globals |= {"bars": charts.bars}


def render(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """One page."""
    gate = request.app.state.gate
    values |= {
        "managing": gate.knows(request),
        "can_log_out": not gate.open,
        "site": request.app.state.service.config.title,
        "path": request.url.path,
    }
    return HTMLResponse(_templates.get_template(template).render(values), status)


def error_page(request: Request, text: str, status: int) -> Response:
    """An error, for a person."""
    if status == 401:
        then = request.url.path if request.method == "GET" else "/checks"
        return RedirectResponse(f"/login?then={then}", 303)
    return render(request, "error.html", status, text=text, code=status)


async def read_form(request: Request) -> dict[str, str]:
    """A form's fields; if one occurs twice, the last value counts."""
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        raise Refusal("send a form", 415)
    text = (await request.body()).decode("utf-8", "replace")
    return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=100))


Form = Annotated[dict[str, str], Depends(read_form)]


# ---- public


def _cached(request: Request, page: HTMLResponse, seconds: float) -> Response:
    """Add an ETag: 304 for a client that already has this page."""
    tag = f'"{hashlib.sha256(bytes(page.body)).hexdigest()[:24]}"'
    headers = {
        "ETag": tag,
        "Cache-Control": f"private, max-age=0, stale-while-revalidate={seconds:g}",
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    page.headers.update(headers)
    return page


@router.get("/")
async def status_page(request: Request, service: ServiceOf) -> Response:
    """The public status page."""
    found = await cache_of(request).get("status", lambda: summary.status(service))
    page = render(request, "status.html", **found)
    return _cached(request, page, service.config.cache_seconds)


@router.get("/s/{id}")
async def detail_page(request: Request, id: str, service: ServiceOf) -> Response:
    """One check, for everybody."""
    await service.check(id)
    found = await cache_of(request).get(f"detail.{id}", lambda: summary.detail(service, id))
    if not found:
        raise Refusal(f"there is no check {id!r}", 404)
    page = render(request, "detail.html", check=found, chart=charts.response_times(found))
    return _cached(request, page, service.config.cache_seconds)


# ---- logging in


@router.get("/login")
async def login_page(request: Request, then: str = "/checks") -> Response:
    """Ask for the token."""
    return render(request, "login.html", then=_inside(then), wrong=False)


@router.post("/login")
async def login(request: Request, form: Form) -> Response:
    """Take the token, and remember it in a cookie."""
    then = _inside(form.get("then", "/checks"))
    session = request.app.state.gate.login(request, form.get("token", ""))
    if session is None:
        return render(request, "login.html", 401, then=then, wrong=True)
    response = RedirectResponse(then, 303)
    response.set_cookie(
        COOKIE,
        session,
        max_age=SESSION_SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.post("/logout")
async def logout() -> Response:
    """Forget the cookie."""
    response = RedirectResponse("/", 303)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


def _inside(path: str) -> str:
    """A path of ours to continue to; never one that a browser could take for another site."""
    safe = path.startswith("/") and not path.startswith("//") and "\\" not in path
    return path if safe and path.isprintable() else "/checks"


# ---- managing checks


@router.get("/checks", dependencies=[Managed])
async def checks_page(request: Request, service: ServiceOf) -> Response:
    """Every check, with what can be done to it."""
    now, known = int(time.time()), await service.all_states()
    found = [(check, known.get(check.id, State())) for check in await service.all_checks()]
    rows = [(check, summary.current(check, state, now), state) for check, state in found]
    return render(request, "checks.html", rows=rows, now=now)


def _form(
    request: Request, check: Check | None, fields: dict[str, str], trouble: str, status: int = 200
) -> Response:
    shortest = request.app.state.service.config.shortest_interval
    return render(
        request, "check.html", status, check=check, f=fields, trouble=trouble, shortest=shortest
    )


@router.get("/checks/new", dependencies=[Managed])
async def new_check(request: Request) -> Response:
    """An empty form."""
    return _form(request, None, fields_of(None), "")


@router.post("/checks/new", dependencies=[Managed])
async def add_check(request: Request, form: Form, service: ServiceOf) -> Response:
    """Add a check, or say what is wrong with it."""
    try:
        await service.add(check_from(form))
    except Refusal as error:
        return _form(request, None, fields_of(None) | form, str(error), error.status)
    await forget(request)
    return RedirectResponse("/checks", 303)


@router.get("/checks/{id}", dependencies=[Managed])
async def edit_check(request: Request, id: str, service: ServiceOf) -> Response:
    """A form with what is."""
    check = await service.check(id)
    return _form(request, check, fields_of(check), "")


@router.post("/checks/{id}", dependencies=[Managed])
async def change_check(request: Request, id: str, form: Form, service: ServiceOf) -> Response:
    """Change a check, or say what is wrong."""
    check = await service.check(id)
    try:
        await service.change(id, check_from(form) | {"paused": check.paused})
    except Refusal as error:
        return _form(request, check, fields_of(check) | form, str(error), error.status)
    await forget(request, id)
    return RedirectResponse("/checks", 303)


@router.post("/checks/{id}/pause", dependencies=[Managed])
async def pause_check(request: Request, id: str, service: ServiceOf) -> Response:
    """Let it rest."""
    await service.pause(id, True)
    await forget(request, id)
    return RedirectResponse("/checks", 303)


@router.post("/checks/{id}/resume", dependencies=[Managed])
async def resume_check(request: Request, id: str, service: ServiceOf) -> Response:
    """Let it go on."""
    await service.pause(id, False)
    await forget(request, id)
    return RedirectResponse("/checks", 303)


@router.post("/checks/{id}/run", dependencies=[Managed])
async def run_check(id: str, service: ServiceOf) -> Response:
    """Look once more, now."""
    await service.look_now(id)
    return RedirectResponse("/checks", 303)


@router.get("/checks/{id}/remove", dependencies=[Managed])
async def ask_remove(request: Request, id: str, service: ServiceOf) -> Response:
    """Say what will happen, and ask."""
    return render(request, "remove.html", check=await service.check(id))


@router.post("/checks/{id}/remove", dependencies=[Managed])
async def remove_check(request: Request, id: str, service: ServiceOf) -> Response:
    """Remove it."""
    await service.remove(id)
    await forget(request, id)
    return RedirectResponse("/checks", 303)


# ---- channels and incidents


@router.get("/channels", dependencies=[Managed])
async def channels_page(request: Request, service: ServiceOf) -> Response:
    """Who is told."""
    found = await service.all_channels()
    return render(request, "channels.html", channels=found, f={}, trouble="")


@router.post("/channels", dependencies=[Managed])
async def set_channel(request: Request, form: Form, service: ServiceOf) -> Response:
    """Add or replace a channel, or say what is wrong."""
    try:
        await service.set_channel(form)
    except Refusal as error:
        found = await service.all_channels()
        return render(request, "channels.html", 422, channels=found, f=form, trouble=str(error))
    return RedirectResponse("/channels", 303)


@router.post("/channels/{id}/remove", dependencies=[Managed])
async def remove_channel(id: str, service: ServiceOf) -> Response:
    """Tell it nothing more."""
    await service.remove_channel(id)
    return RedirectResponse("/channels", 303)


@router.get("/incidents", dependencies=[Managed])
async def incidents_page(request: Request, service: ServiceOf) -> Response:
    """Every incident with its reason."""
    return render(request, "incidents.html", incidents=await service.incidents(limit=200))
