"""Authentication, and protection against requests that a browser is tricked into.

* Reading the status is public. Everything else needs the token when there is one: as a bearer
  token, or through the login page as a signed cookie. Off loopback a token is required.
* Host: on loopback only loopback's own names (another name that points here is DNS rebinding);
  `UPTIME_HOSTS` adds others.
* A change must come from our own pages or from no page at all: the Origin is ours, or there is none
  and the browser does not say that it comes from elsewhere. Cookies are also SameSite=Strict.
* An address with ten wrong tokens within a minute, by login or bearer, must wait; others need not.
* Bodies are small. Answers carry a policy that allows nothing from other origins.
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
BODY_LIMIT = 64 * 1024  # forms and checks are small
FAILURES, FAILURES_SECONDS = 10, 60.0
MOST_ADDRESSES = 10_000  # bounds memory, however many addresses guess
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
    """The request is refused before anything is read."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Gate:
    """Admits or refuses each request."""

    def __init__(self, config: Config, host: str) -> None:
        if not config.token and not is_loopback(host):
            raise ValueError(
                f"on {host} anybody could change the checks: set UPTIME_TOKEN, "
                "or listen on 127.0.0.1"
            )
        self._token = config.token.encode()
        self._hosts = (set(config.hosts) | LOOPBACK) if is_loopback(host) else set(config.hosts)
        self._guesses = Guesses()

    # ---- every request

    def check(self, request: Request) -> None:
        """Refuse what no honest browser or program sends."""
        host = request.headers.get("host", "").lower()
        if self._hosts and _name(host) not in self._hosts:
            raise Denied("this is not a name of this server: add it to UPTIME_HOSTS", 421)
        if request.method in SAFE:
            return
        length = request.headers.get("content-length", "0")
        if "transfer-encoding" in request.headers or not (length.isascii() and length.isdigit()):
            raise Denied("send a body with its length", 411)
        if int(length) > BODY_LIMIT:
            raise Denied(f"the body is larger than {BODY_LIMIT:,} bytes", 413)
        origin = request.headers.get("origin")
        site = request.headers.get("sec-fetch-site", "none")
        if (origin is not None and _host_of(origin) != host) or site not in ("same-origin", "none"):
            raise Denied("a change must come from this server's own pages", 403)

    # ---- authentication

    @property
    def open(self) -> bool:
        """Whether there is no token: anyone on this machine may change things."""
        return not self._token

    def knows(self, request: Request) -> bool:
        """Whether the request comes from a user who may manage checks."""
        if self.open or self._is_session(request.cookies.get(COOKIE, "")):
            return True
        known: bool | None = getattr(request.state, "knows_token", None)
        if known is None:  # count one guess per request, however often this is called
            request.state.knows_token = False
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            known = kind.lower() == "bearer" and self._is_token(request, given.strip())
            request.state.knows_token = known
        return known

    def _is_token(self, request: Request, given: str) -> bool:
        """Whether this is the token; raises `Denied` after too many wrong guesses."""
        address = address_of(request)
        if self._guesses.too_many(address):
            raise Denied("too many wrong tokens: wait a minute", 429)
        if hmac.compare_digest(given.encode("utf-8", "surrogatepass"), self._token):
            return True
        self._guesses.wrong(address)
        return False

    def login(self, request: Request, given: str) -> str | None:
        """A session for the right token; None for a wrong one."""
        if not self._is_token(request, given):
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


class Guesses:
    """Wrong tokens of the last minute, by address, so that guessing locks out nobody else."""

    def __init__(self) -> None:
        self._wrong: dict[str, list[float]] = {}

    def too_many(self, address: str) -> bool:
        """Whether an address must wait."""
        now = time.monotonic()
        recent = [at for at in self._wrong.get(address, ()) if now - at < FAILURES_SECONDS]
        return len(recent) >= FAILURES

    def wrong(self, address: str) -> None:
        """Count a wrong token; may forget the address that has been quiet longest."""
        recent = self._wrong.pop(address, [])[1 - FAILURES :]
        self._wrong[address] = [*recent, time.monotonic()]
        if len(self._wrong) > MOST_ADDRESSES:
            del self._wrong[next(iter(self._wrong))]


def address_of(request: Request) -> str:
    """The client's address; for IPv6 its /64, which belongs to one owner."""
    text = request.client.host if request.client else ""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    if address.version == 4:
        return text
    return str(ipaddress.ip_network((address, 64), strict=False))


def _host_of(origin: str) -> str:
    """The host in an Origin; empty if it is not a URL."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _name(host: str) -> str:
    """The host without its port."""
    return host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


def protect(headers: MutableHeaders) -> None:
    """Add the headers that every answer carries."""
    for name, value in _HEADERS.items():
        headers[name] = value
    headers.setdefault("Cache-Control", "no-store")
