"""Who may do what, and what a browser may be talked into.

* Reading the status is for everybody. Everything else needs the token when there is one: as a
  bearer token, or through the login page as a signed cookie. Off loopback there must be one.
* Host: on loopback only loopback's own names (a foreign name that points here is somebody's
  attempt to talk to us through a browser); `UPTIME_HOSTS` says which others.
* A change must come from our own pages or from no page at all: the Origin is ours, or there is none
  and the browser does not say that it comes from elsewhere. Cookies are SameSite=Strict besides.
* Bodies are small. Answers carry a policy that allows nothing from anywhere else.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import MutableHeaders

from uptime.config import Config

COOKIE = "uptime_session"
SESSION_SECONDS = 12 * 3600
BODY_LIMIT = 64 * 1024
FAILURES, FAILURES_SECONDS = 10, 60.0
SAFE = frozenset({"GET", "HEAD"})
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Denied(Exception):
    """The request is refused before anything was looked at."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Gate:
    """Decides on each request."""

    def __init__(self, config: Config, host: str) -> None:
        if not config.token and not is_loopback(host):
            raise ValueError(
                f"on {host} anybody could change the checks: set UPTIME_TOKEN, "
                "or listen on 127.0.0.1"
            )
        self._token = config.token.encode()
        self._hosts = (set(config.hosts) | LOOPBACK) if is_loopback(host) else set(config.hosts)
        self._failures: list[float] = []

    # ---- every request

    def check(self, request: Request) -> None:
        """Refuse what no honest browser or program sends."""
        host = request.headers.get("host", "").lower()
        if self._hosts and _name(host) not in self._hosts:
            raise Denied("this is not a name of this server: add it to UPTIME_HOSTS", 421)
        if request.method in SAFE:
            return
        length = request.headers.get("content-length", "0")
        if "transfer-encoding" in request.headers or not length.isdigit():
            raise Denied("send a body with its length", 411)
        if int(length) > BODY_LIMIT:
            raise Denied(f"the body is larger than {BODY_LIMIT:,} bytes", 413)
        origin = request.headers.get("origin")
        site = request.headers.get("sec-fetch-site", "none")
        foreign = urlsplit(origin).netloc.lower() != host if origin is not None else False
        if foreign or site not in ("same-origin", "none"):
            raise Denied("a change must come from this server's own pages", 403)

    # ---- who

    @property
    def open(self) -> bool:
        """Whether there is no token: everybody on this machine may change things."""
        return not self._token

    def knows(self, request: Request) -> bool:
        """Whether the request comes from somebody who may manage checks."""
        if self.open:
            return True
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token):
            return True
        return self._is_session(request.cookies.get(COOKIE, ""))

    def login(self, given: str) -> str | None:
        """A session for the right token; None for a wrong one. Guessing is slowed down."""
        now = time.monotonic()
        self._failures = [at for at in self._failures if now - at < FAILURES_SECONDS]
        if len(self._failures) >= FAILURES:
            raise Denied("too many wrong tokens: wait a minute", 429)
        if not hmac.compare_digest(given.encode(), self._token):
            self._failures.append(now)
            return None
        ends = str(int(time.time()) + SESSION_SECONDS)
        return f"{ends}.{self._sign(ends)}"

    def _is_session(self, text: str) -> bool:
        ends, _, signature = text.partition(".")
        if not (ends.isascii() and ends.isdigit() and len(ends) < 12):
            return False
        right = hmac.compare_digest(signature.encode(), self._sign(ends).encode())
        return right and int(ends) > time.time()

    def _sign(self, text: str) -> str:
        return hmac.new(self._token, b"session:" + text.encode(), hashlib.sha256).hexdigest()


def _name(host: str) -> str:
    """The host without its port."""
    return host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


def protect(headers: MutableHeaders) -> None:
    """Add what every answer carries."""
    for name, value in _HEADERS.items():
        headers[name] = value
    headers.setdefault("Cache-Control", "no-store")
