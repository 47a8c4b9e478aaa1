"""The guard in front of every route, and logging in and out.

    Host ──► Origin ──► who is asking ──► rate ──► CSRF ──► route ──► headers on the way out

Host: unknown names are refused, so a web page cannot reach a web process on the visitor's machine
by pointing its own name there (DNS rebinding). Origin: no other site can change state. Everything
except the login page, its files and the probes needs a user, including routes added later.

A request by browser session also needs a CSRF token, because a browser sends its cookie along with
another site's form. A bearer token is never sent automatically.

The content policy allows no inline script or style, and nothing from other origins.
"""

from __future__ import annotations

import math
import secrets
from typing import Annotated, Final
from urllib.parse import parse_qsl, urlsplit

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.datastructures import MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.errors import HoldfastError
from holdfast.rates import RateLimiter
from holdfast.web.auth import (
    CSRF_FIELD,
    CSRF_HEADER,
    LOCAL,
    User,
    browser_cookie,
    csrf_fits,
    current_user,
    session_cookie,
    set_cookie,
)
from holdfast.web.network import Hosts, path_of, same_origin, source_of
from holdfast.web.problems import API, Problem, answer, of_error, problem, wants_page
from holdfast.web.services import Services, services_of

PUBLIC: Final = ("/static/", "/health/")
LOGIN: Final = "/login"
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
LOGIN_BURST: Final = 10
"""Logins in a burst: enough for a team behind one address. Tokens are random, so this only limits
load."""
LOGIN_RATE: Final = 1 / 6
"""Logins per second and address: ten a minute."""
LOGIN_BYTES: Final = 16 * 1024
"""Bytes of a login request, which needs no authentication; a token is short."""
BURST_SECONDS: Final = 4
"""How many seconds' worth of requests may come at once: a page loads several files."""
CLOSE: Final = {"Connection": "close"}
"""The rest of a refused body is not read."""
BROWSER_SECONDS: Final = 30 * 86_400
"""How long a form can be sent after it was opened: a month."""

CSP: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Final = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not `no-referrer`: with it a browser sends `Origin: null` with our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Guard:
    """Checks each request before the routes see it."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services
        self._hosts = Hosts(services.config.hosts, services.config.host)
        now = services.broker.clock.monotonic
        rate = services.config.rate_per_second
        self._requests = RateLimiter(rate, max(1.0, BURST_SECONDS * rate), now)
        self._logins = RateLimiter(LOGIN_RATE, LOGIN_BURST, now)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        scope.setdefault("state", {})
        request = Request(scope, receive)
        self._know_browser(request)
        guarded = _Sender(request, send, browser_cookie(self._services.namespace))
        try:
            refused = await self._refusal(request)
        except Problem as error:
            refused = answer(request, error.status_code, error.detail, dict(error.headers or {}))
        except HoldfastError as error:
            refused = of_error(request, error)
        await (refused or self._app)(scope, self._limited(request, receive), guarded)

    def _know_browser(self, request: Request) -> None:
        names = self._services.namespace
        cookies = request.cookies
        known = cookies.get(session_cookie(names)) or cookies.get(browser_cookie(names))
        request.state.browser_known = bool(known)
        request.state.browser_secret = known or secrets.token_urlsafe(24)
        request.state.user = None

    async def _refusal(self, request: Request) -> Response | None:
        """The answer to a refused request; None if it is allowed."""
        self._check_host(request)
        self._check_origin(request)
        self._check_length(request)
        path = path_of(request.scope)
        if path == LOGIN and request.method not in SAFE:
            self._take(self._logins, _address(request), "logins")
        if path.startswith(PUBLIC):
            return None
        await self._services.open()
        user = request.state.user = await self._user(request)
        if path == LOGIN:
            return None
        if user is None:
            return _login_needed(request)
        self._take(self._requests, f"{user.name}@{_address(request)}", "requests")
        if path.startswith(API):
            self._check_csrf(request, user)
        return None

    # ---- host and origin

    def _check_host(self, request: Request) -> None:
        host = request.headers.get("host", "")
        if not self._hosts.known(host):
            raise Problem(
                421,
                f"Unknown host {host[:100]!r}: to serve under this name, add it to web.hosts "
                "(HOLDFAST_WEB_HOSTS)",
            )

    def _check_origin(self, request: Request) -> None:
        if request.method in SAFE:
            return
        origin = request.headers.get("origin")
        if origin is not None and not same_origin(origin, request.headers.get("host", "")):
            raise Problem(403, "Other sites may not change anything here")
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Problem(403, "Other sites may not change anything here")

    # ---- user

    async def _user(self, request: Request) -> User | None:
        services = self._services
        if services.authenticate is not None:
            user = await services.authenticate(request)
            if user is not None or not services.tokens:
                return user
        if not services.tokens and not services.proxy_login:
            return LOCAL
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._of_token(request, text.strip())
        if (named := services.proxy_login.find(request)) is not None:
            return named
        secret = request.cookies.get(session_cookie(services.namespace))
        return await services.sessions.find(secret) if secret else None

    def _of_token(self, request: Request, text: str) -> User | None:
        token = self._services.tokens.find(text)
        if token is None:
            self._take(self._logins, _address(request), "wrong tokens")
            return None
        return User(token.name, token.role, "token")

    def _check_csrf(self, request: Request, user: User) -> None:
        if request.method in SAFE or user.how not in ("session", "proxy"):
            return
        if not csrf_fits(request, request.headers.get(CSRF_HEADER, "")):
            raise Problem(
                403,
                f"A logged-in browser must send the page's CSRF token in the header {CSRF_HEADER}; "
                "programs send a bearer token instead",
            )

    # ---- limits

    def _take(self, limiter: RateLimiter, key: str, what: str) -> None:
        wait = limiter.wait(key)
        if wait:
            seconds = max(1, math.ceil(wait))
            raise Problem(
                429, f"Too many {what}: try again in {seconds} s", {"Retry-After": str(seconds)}
            )

    def _check_length(self, request: Request) -> None:
        """Refuse a body that declares both a length and chunks, or is too long."""
        length = request.headers.get("content-length", "")
        if length and "transfer-encoding" in request.headers:
            raise Problem(400, "Send Content-Length or Transfer-Encoding, not both", CLOSE)
        known = length.isascii() and length.isdigit() and len(length) < 19
        if length and (not known or int(length) > self._largest(request)):
            raise Problem(
                413, f"The request is larger than {self._largest(request):,} bytes", CLOSE
            )

    def _largest(self, request: Request) -> int:
        """The largest body allowed."""
        if path_of(request.scope) == LOGIN:
            return LOGIN_BYTES
        return self._services.body_limit

    def _limited(self, request: Request, receive: Receive) -> Receive:
        """The body, counted as it arrives, whatever its headers say."""
        most, taken = self._largest(request), 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if message["type"] == "http.request" and taken > most:
                raise Problem(413, f"The request is larger than {most:,} bytes", CLOSE)
            return message

        return limited


def _address(request: Request) -> str:
    return source_of(request.client.host) if request.client else "unknown"


def _login_needed(request: Request) -> Response:
    why = "Unknown token" if "authorization" in request.headers else "Not logged in"
    detail = f"{why}: send a token as 'Authorization: Bearer …', or log in at /login"
    if wants_page(request):
        from holdfast.web.pages import render_login

        return render_login(request, status=401, next=_wanted(request))
    return problem(401, detail, headers={"WWW-Authenticate": 'Bearer realm="holdfast"'})


def _wanted(request: Request) -> str:
    """Where to go after the login: the requested page."""
    if request.method != "GET":
        return ""
    query = f"?{request.url.query}" if request.url.query else ""
    return path_of(request.scope) + query


class _Sender:
    """Adds the headers that every answer has."""

    def __init__(self, request: Request, send: Send, cookie: str) -> None:
        self._request = request
        self._send = send
        self._cookie = cookie

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            if self._request.url.scheme == "https":
                headers.setdefault("Strict-Transport-Security", "max-age=31536000")
            if not path_of(self._request.scope).startswith("/static/"):
                headers.setdefault("Cache-Control", "no-store")
            self._remember_browser(headers)
        await self._send(message)

    def _remember_browser(self, headers: MutableHeaders) -> None:
        """Set the cookie from which the CSRF tokens of a page's forms are derived."""
        state = self._request.state
        if state.browser_known or not headers.get("content-type", "").startswith("text/html"):
            return
        carrier = Response()
        set_cookie(self._request, carrier, self._cookie, state.browser_secret, BROWSER_SECONDS)
        headers.append("set-cookie", carrier.headers["set-cookie"])


# ---- forms


async def checked_form(request: Request) -> dict[str, str]:
    """A dependency: the fields of a form sent by one of our own pages.

    Every route that takes a form must use it: it is the CSRF check. If a field was sent several
    times, its values are joined by line breaks.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise Problem(415, "Send the form as application/x-www-form-urlencoded")
    try:
        pairs = parse_qsl((await request.body()).decode(), keep_blank_values=True, errors="strict")
    except (ValueError, UnicodeDecodeError):
        raise Problem(400, "The form is not valid form data") from None
    fields: dict[str, str] = {}
    for name, value in pairs:
        fields[name] = f"{fields[name]}\n{value}" if name in fields else value
    if not csrf_fits(request, fields.pop(CSRF_FIELD, "")):
        raise Problem(403, "This form has expired or came from another site: reload and send again")
    return fields


Fields = Annotated[dict[str, str], Depends(checked_form)]


# ---- logging in and out

router = APIRouter(include_in_schema=False)


def include(app: FastAPI) -> None:
    """Add `/login` and `/logout`."""
    app.include_router(router)


@router.get(LOGIN)
async def login_page(request: Request, next: str = "") -> Response:
    """The login page."""
    from holdfast.web.pages import render_login

    if request.state.user is not None:
        return RedirectResponse(_inside(request, next), 303)
    return render_login(request, next=next)


@router.post(LOGIN)
async def log_in(request: Request, fields: Fields) -> Response:
    """Start a session with a token."""
    from holdfast.web.pages import render_login

    services = services_of(request)
    token = services.tokens.find(fields.get("token", "").strip())
    if token is None:
        message = "Unknown token: ask the administrator for one"
        return render_login(request, status=401, message=message, next=fields.get("next", ""))
    secret = await services.sessions.start(token)
    await services.access(User(token.name, token.role, "session")).audit.write("login")
    response = RedirectResponse(_inside(request, fields.get("next", "")), 303)
    cookie = session_cookie(services.namespace)
    set_cookie(request, response, cookie, secret, services.config.session_seconds)
    return response


@router.post("/logout")
async def log_out(request: Request, fields: Fields) -> Response:
    """End the session."""
    services = services_of(request)
    cookie = session_cookie(services.namespace)
    secret = request.cookies.get(cookie)
    if secret:
        await services.sessions.end(secret)
        await services.access(current_user(request)).audit.write("logout")
    response = RedirectResponse(f"{request.scope.get('root_path', '')}{LOGIN}", 303)
    set_cookie(request, response, cookie, "", 0)
    return response


def _inside(request: Request, wanted: str) -> str:
    """The page to go to after a login; never another site."""
    root = str(request.scope.get("root_path", ""))
    parts = urlsplit(wanted)
    plain = wanted.startswith("/") and not wanted.startswith(("//", "/\\"))
    safe = plain and not parts.scheme and not parts.netloc and wanted.isprintable()
    return root + wanted if safe and "\\" not in wanted else f"{root}/"
