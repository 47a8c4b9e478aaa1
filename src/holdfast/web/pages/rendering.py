"""How a page is rendered: templates, times, numbers, states, and messages after an action.

Templates escape everything and fail on undefined names. None contains a script or a style: the
content policy would block it. Times are the server's, shown relative with the exact time on hover.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final
from urllib.parse import quote, urlencode
from zoneinfo import ZoneInfo

import jinja2
import msgspec
from fastapi import Request
from markupsafe import Markup
from starlette.responses import HTMLResponse, RedirectResponse, Response

from holdfast import durations
from holdfast.clock import moment_of
from holdfast.version import __version__
from holdfast.web.auth import csrf_token
from holdfast.web.masking import masked_text
from holdfast.web.pages.showing import frames, json_tree

THEME_COOKIE: Final = "hf_theme"
FLASH_COOKIE: Final = "hf_said"
SHOWN_BYTES: Final = 64 * 1024
"""How much of a payload or result a page shows; more would slow the browser down."""

NAV: Final = (
    ("overview", "/", "Overview", "o"),
    ("jobs", "/jobs", "Jobs", "j"),
    ("runs", "/runs", "Runs", "r"),
    ("flows", "/flows", "Flows", "w"),
    ("limits", "/limits", "Limits", "l"),
    ("schedules", "/schedules", "Schedules", "s"),
    ("dead", "/dead", "Dead letters", "d"),
    ("cluster", "/cluster", "Cluster", "c"),
    ("fleet", "/fleet", "Fleet", "f"),
    ("alerts", "/alerts", "Alerts", "t"),
    ("audit", "/audit", "Audit", "a"),
)

_LOOKS: Final = {
    "done": "done",
    "dispatched": "done",
    "RUNNING": "done",
    "ok": "done",
    "replayed": "done",
    "running": "running",
    "stopped": "failed",
    "CREATED": "running",
    "started": "running",
    "failed": "failed",
    "timeout": "failed",
    "TERMINATING": "failed",
    "paused": "failed",
    "dead": "dead",
    "crashed": "dead",
    "DISCONNECTED": "dead",
    "ERROR": "dead",
    "dead letter": "dead",
    "overdue": "dead",
    "invalid": "dead",
    "refused": "dead",
    "lost": "lost",
    "partial": "failed",
    "firing": "dead",
    "complete": "done",
    "interrupted": "lost",
    "unreachable": "dead",
    "no answer": "dead",
    "online": "done",
    "offline": "dead",
}


def look(state: object) -> str:
    """The colour of a state, as named in the style sheet."""
    return _LOOKS.get(str(state), "waiting")


# ---- times and numbers


def exact(at: float) -> str:
    """A full time: `2026-11-16 05:04:03 UTC`."""
    return moment_of(at).strftime("%Y-%m-%d %H:%M:%S UTC")


def zoned(at: float, tz: str) -> str:
    """A full time as a schedule's own time zone has it: `2026-11-16 06:04:03 CET`."""
    if tz in ("", "UTC"):
        return exact(at)
    try:
        return moment_of(at).astimezone(ZoneInfo(tz)).strftime("%Y-%m-%d %H:%M:%S %Z")
    except (KeyError, ValueError):  # the zone of a record that another host wrote
        return exact(at)


def clock(at: float) -> str:
    """The time of day."""
    return moment_of(at).strftime("%H:%M:%S")


def span(seconds: float) -> str:
    """A duration in one unit; `static/times.js` does the same."""
    if seconds < 60:
        return f"{max(0, int(seconds))} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min"
    return f"{int(seconds // 3600)} h" if seconds < 172_800 else f"{int(seconds // 86_400)} d"


def long(seconds: float) -> str:
    """An exact duration: `1m30s`; to the millisecond below a minute."""
    return durations.text(seconds) if seconds > 0 else "0s"


def relative(now: float, at: float) -> str:
    """A time relative to now."""
    if abs(at - now) < 1:
        return "now"
    return f"in {span(at - now)}" if at > now else f"{span(now - at)} ago"


def when(now: float, at: float, kind: str = "time", tz: str = "") -> Markup:
    """A relative time with the exact one on hover, in `tz` too; `age` leaves out "ago"."""
    if not at:
        return Markup('<span class="zero">–</span>')
    text = span(now - at) if kind == "age" else relative(now, at)
    iso = moment_of(at).isoformat()
    title = exact(at) if tz in ("", "UTC") else f"{zoned(at, tz)}, {exact(at)}"
    return Markup('<time datetime="{}" title="{}" data-relative="{}">{}</time>').format(
        iso, title, kind, text
    )


def grouped(number: float) -> str:
    """A number with thin spaces between thousands."""
    return f"{number:,.0f}".replace(",", "\u202f")


def many(count: int, one: str, more: str = "") -> str:
    """`1 run`, `2 runs`."""
    return f"{grouped(count)} {one if count == 1 else more or one + 's'}"


# ---- data


def shown(body: bytes | str) -> str:
    """Bytes as text: JSON indented, other text as it is, the rest as base64."""
    data = body.encode("utf-8", "replace") if isinstance(body, str) else body
    cut = f"\n… {len(data) - SHOWN_BYTES:,} bytes more" if len(data) > SHOWN_BYTES else ""
    if not cut:
        try:
            return json.dumps(json.loads(data), indent=2, ensure_ascii=False)
        except (ValueError, RecursionError):
            pass  # not JSON, or too deep to indent: shown as it is
    try:
        return data[:SHOWN_BYTES].decode("utf-8", "strict" if not cut else "replace") + cut
    except UnicodeDecodeError:
        return base64.b64encode(data[:SHOWN_BYTES]).decode() + cut


def first_line(text: str) -> str:
    """The part of an error that fits into a row."""
    return text.strip().split("\n", 1)[0][:300]


# ---- pages


_hiding: Final[ContextVar[bool]] = ContextVar("holdfast_hiding", default=False)
"""Whether the page being rendered is for a viewer."""


def _written(value: Any) -> Any:
    """Mask every text a template writes for a viewer, even where the page forgot to."""
    if _hiding.get() and isinstance(value, str) and not isinstance(value, Markup):
        return masked_text(value)
    return value


_templates = jinja2.Environment(
    loader=jinja2.PackageLoader("holdfast.web"),
    autoescape=True,
    finalize=_written,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters |= {
    "look": look,
    "exact": exact,
    "clock": clock,
    "span": span,
    "long": long,
    "grouped": grouped,
    "shown": shown,
    "first_line": first_line,
    "zoned": zoned,
    "json_tree": json_tree,
    "frames": frames,
    "part": lambda text: quote(str(text), safe=""),
    "path": lambda text: quote(str(text), safe="/="),
}
_templates.globals |= {"many": many, "nav": NAV, "version": __version__}


def render(request: Request, template: str, *, status: int = 200, **data: Any) -> Response:
    """A page; adds `now`, `link`, `when` and whatever else the frame needs."""
    root = str(request.scope.get("root_path", ""))
    services = request.app.state.services
    now = services.broker.server_now()

    def link(path: str, **query: object) -> str:
        given = [(k, str(v)) for k, v in query.items() if v not in ("", None, 0, False)]
        return root + path + (f"?{urlencode(given)}" if given else "")

    frame = {
        "request_path": request.scope["path"].removeprefix(root) or "/",
        "root": root,
        "link": link,
        "now": now,
        "when": lambda at, kind="time", tz="": when(now, at, kind, tz),
        "clean": _cleaner(request),
        "theme": _theme(request),
        "user": getattr(request.state, "user", None),
        "namespace": services.namespace,
        "csrf": csrf_token(request),
        "flash": _flash(request),
        "section": "",
        "dead_count": 0,
    }
    _hiding.set(frame["clean"] is masked_text)
    html = _templates.get_template(template).render(frame | data)
    response = HTMLResponse(html, status)
    if FLASH_COOKIE in request.cookies:
        response.delete_cookie(FLASH_COOKIE, path=root or "/")
    return response


def _cleaner(request: Request) -> Callable[[str], str]:
    """The filter for texts from users: it masks secrets for viewers."""
    user = getattr(request.state, "user", None)
    return masked_text if user is not None and not user.sees_secrets else str


def _theme(request: Request) -> str:
    given = request.cookies.get(THEME_COOKIE, "")
    return given if given in ("light", "dark") else ""


# ---- messages after an action


class Flash(msgspec.Struct, frozen=True, array_like=True):
    """A message for the next page."""

    level: str
    text: str


def redirect(request: Request, to: str, text: str, level: str = "good") -> Response:
    """Go to another page and show a message there."""
    root = str(request.scope.get("root_path", ""))
    response = RedirectResponse(root + to, 303)
    told = base64.urlsafe_b64encode(msgspec.json.encode(Flash(level, text[:1_000]))).decode()
    response.set_cookie(
        FLASH_COOKIE, told, max_age=60, path=root or "/", httponly=True, samesite="strict"
    )
    return response


def _flash(request: Request) -> Flash | None:
    try:
        told = base64.urlsafe_b64decode(request.cookies.get(FLASH_COOKIE, ""))
        return msgspec.json.decode(told, type=Flash) if told else None
    except (ValueError, msgspec.MsgspecError):
        return None


# ---- confirmations


class Question(msgspec.Struct, frozen=True):
    """A confirmation before something is changed: says what will happen."""

    title: str
    effects: Sequence[str]
    button: str
    action: str
    fields: Sequence[tuple[str, str]]
    back: str
    danger: bool = False
    listed: Sequence[str] = ()
    """What it affects."""
