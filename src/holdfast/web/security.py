"""The guard in front of every route: nothing is reached past it.

    Host ──► Origin ──► who is asking ──► rate ──► CSRF ──► route ──► headers on the way out

Host: a name that is not ours is refused, so that a page on the web cannot reach a web process on
the visitor's own machine by letting its own name point there (DNS rebinding). Origin: nothing that
changes state is taken from another site. Everything but the login page, its files and the probes
needs a user, whatever routes are added later.

A request that a browser's session stands for needs a CSRF token besides, because the browser would
send its cookie along with somebody else's form. A bearer token is never sent by itself.

The policy for content allows no inline script or style, and nothing from anywhere else.
"""

from __future__ import annotations

import math
import secrets
from typing import Final
from urllib.parse import parse_qsl

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.errors import HoldfastError
from holdfast.web.auth import LOCAL, User
from holdfast.web.hosts import Hosts, same_origin, source_of
from holdfast.web.limits import Limiter
from holdfast.web.problems import API, Problem, answer, of_error, path_of, problem, wants_page
from holdfast.web.services import Services
from holdfast.web.sessions import (
    CSRF_FIELD,
    CSRF_HEADER,
    browser_cookie,
    csrf_fits,
    session_cookie,
    set_cookie,
)

PUBLIC: Final = ("/static/", "/health/")
LOGIN: Final = "/login"
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
LOGIN_BURST: Final = 10
LOGIN_RATE: Final = 1 / 6
LOGIN_BYTES: Final = 16 * 1024
CLOSE: Final = {"Connection": "close"}
"""What is left of such a body is not read."""
BROWSER_SECONDS: Final = 30 * 86_400

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
        self._requests = Limiter(rate, max(1.0, 4 * rate), now)
        self._logins = Limiter(LOGIN_RATE, LOGIN_BURST, now)

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
        guarded = _Sender(request, send, browser_cookie(self._services.names))
        try:
            refused = await self._refusal(request)
        except Problem as error:
            refused = answer(request, error.status_code, error.detail, dict(error.headers or {}))
        except HoldfastError as error:
            refused = of_error(request, error)
        await (refused or self._app)(scope, self._limited(request, receive), guarded)

    def _know_browser(self, request: Request) -> None:
        names = self._services.names
        cookies = request.cookies
        known = cookies.get(session_cookie(names)) or cookies.get(browser_cookie(names))
        request.state.browser_known = bool(known)
        request.state.browser_secret = known or secrets.token_urlsafe(24)
        request.state.user = None

    async def _refusal(self, request: Request) -> Response | None:
        """The answer of a request that goes no further."""
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

    # ---- where from

    def _check_host(self, request: Request) -> None:
        host = request.headers.get("host", "")
        if not self._hosts.known(host):
            raise Problem(
                421,
                f"This is not {host[:100]!r}: if it should answer to that name, add it to "
                "web.hosts (HOLDFAST_WEB_HOSTS)",
            )

    def _check_origin(self, request: Request) -> None:
        if request.method in SAFE:
            return
        origin = request.headers.get("origin")
        if origin is not None and not same_origin(origin, request.headers.get("host", "")):
            raise Problem(403, "A page of another site may not change anything here")
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Problem(403, "A page of another site may not change anything here")

    # ---- who

    async def _user(self, request: Request) -> User | None:
        services = self._services
        if services.authenticate is not None:
            user = await services.authenticate(request)
            if user is not None or not services.tokens:
                return user
        if not services.tokens:
            return LOCAL
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._of_token(request, text.strip())
        secret = request.cookies.get(session_cookie(services.names))
        return await services.sessions.find(secret) if secret else None

    def _of_token(self, request: Request, text: str) -> User | None:
        token = self._services.tokens.find(text)
        if token is None:
            self._take(self._logins, _address(request), "wrong tokens")
            return None
        return User(token.name, token.role, "token")

    def _check_csrf(self, request: Request, user: User) -> None:
        if request.method in SAFE or user.how != "session":
            return
        if not csrf_fits(request, request.headers.get(CSRF_HEADER, "")):
            raise Problem(
                403,
                f"A request of a logged-in browser needs the header {CSRF_HEADER} with the page's "
                "token; programs send a bearer token instead",
            )

    # ---- how much

    def _take(self, limiter: Limiter, key: str, what: str) -> None:
        wait = limiter.wait(key)
        if wait:
            seconds = max(1, math.ceil(wait))
            raise Problem(
                429, f"Too many {what}: try again in {seconds} s", {"Retry-After": str(seconds)}
            )

    def _check_length(self, request: Request) -> None:
        """Refuse a body by its headers: both a length and chunks, or too long."""
        length = request.headers.get("content-length", "")
        if length and "transfer-encoding" in request.headers:
            raise Problem(400, "Send Content-Length or Transfer-Encoding, not both", CLOSE)
        known = length.isascii() and length.isdigit() and len(length) < 19
        if length and (not known or int(length) > self._most(request)):
            raise Problem(413, f"The request is larger than {self._most(request):,} bytes", CLOSE)

    def _most(self, request: Request) -> int:
        """The largest body allowed; a login, which anybody may send, must be small."""
        if path_of(request.scope) == LOGIN:
            return LOGIN_BYTES
        return self._services.body_limit

    def _limited(self, request: Request, receive: Receive) -> Receive:
        """The body, counted as it comes, whatever was said about it."""
        most, taken = self._most(request), 0

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
    why = (
        "This token is not known here"
        if "authorization" in request.headers
        else "Nobody is logged in"
    )
    detail = f"{why}: send a token as 'Authorization: Bearer …', or log in at /login"
    if wants_page(request):
        from holdfast.web.pages import render_login

        return render_login(request, status=401, next=_wanted(request))
    return problem(401, detail, headers={"WWW-Authenticate": 'Bearer realm="holdfast"'})


def _wanted(request: Request) -> str:
    """Where to go on after the login: the page that was asked for."""
    if request.method != "GET":
        return ""
    query = f"?{request.url.query}" if request.url.query else ""
    return path_of(request.scope) + query


class _Sender:
    """Sends an answer with the headers that every answer has."""

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
        """A page may have a form: its CSRF token is derived from this cookie."""
        state = self._request.state
        if state.browser_known or not headers.get("content-type", "").startswith("text/html"):
            return
        carrier = Response()
        set_cookie(self._request, carrier, self._cookie, state.browser_secret, BROWSER_SECONDS)
        headers.append("set-cookie", carrier.headers["set-cookie"])


# ---- forms


async def checked_form(request: Request) -> dict[str, str]:
    """A dependency: the fields of a form that one of our own pages has sent.

    Every route that takes a form must have it: it is the CSRF check. A field that was sent several
    times has its values joined by line breaks.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise Problem(415, "A form is sent as application/x-www-form-urlencoded")
    try:
        pairs = parse_qsl((await request.body()).decode(), keep_blank_values=True, errors="strict")
    except (ValueError, UnicodeDecodeError):
        raise Problem(400, "The form cannot be read") from None
    fields: dict[str, str] = {}
    for name, value in pairs:
        fields[name] = f"{fields[name]}\n{value}" if name in fields else value
    if not csrf_fits(request, fields.pop(CSRF_FIELD, "")):
        raise Problem(
            403, "This form is too old, or came from elsewhere: load its page again and send it"
        )
    return fields
