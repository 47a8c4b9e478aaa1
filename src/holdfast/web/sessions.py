"""Sessions of people who logged in: in a bucket, so that any web process knows them.

A session's id is random and only in the browser's cookie; the bucket has its hash, whose token made
it, and expires by itself. So a restart logs nobody out, a logout counts everywhere at once, and a
token that is taken back ends its sessions.

The CSRF token of a form is derived from the browser's secret cookie: another site can neither read
it nor make one that fits.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from holdfast.broker import Bucket
from holdfast.client import Client
from holdfast.model.codec import Codec, Instant
from holdfast.web.auth import Token, Tokens, User

BUCKET: Final = "sessions"
CSRF_FIELD: Final = "csrf"
CSRF_HEADER: Final = "X-CSRF-Token"


class Session(msgspec.Struct, frozen=True, omit_defaults=True):
    """A login, as it is stored."""

    name: str
    hash: str
    created: Instant


SESSION: Final = Codec[Session](Session, "a session")


class Sessions:
    """Makes, finds and ends sessions."""

    def __init__(self, client: Client, tokens: Tokens, lasting: float) -> None:
        self._client = client
        self._tokens = tokens
        self._lasting = lasting
        self._bucket = Bucket(client.broker, client.broker.names.bucket(BUCKET))

    async def ensure(self) -> None:
        """Make the bucket unless it is there."""
        await self._client.topology.ensure_buckets(BUCKET)

    async def start(self, token: Token) -> str:
        """A new session of a token's owner; returns its secret id."""
        secret = secrets.token_urlsafe(32)
        session = Session(token.name, token.hash, self._client.broker.server_now())
        body = SESSION.encode(session)
        await self._bucket.put(_key(secret), body, expected=0, ttl=self._lasting)
        return secret

    async def find(self, secret: str) -> User | None:
        """Whose session this is, while it lasts and its token is still good."""
        entry = await self._bucket.get(_key(secret))
        if entry is None:
            return None
        session = self._bucket.read(SESSION.decode, entry)
        if session is None:
            return None
        token = self._tokens.still(session.name, session.hash)
        return User(token.name, token.role, "session") if token else None

    async def end(self, secret: str) -> None:
        """Log out, everywhere at once."""
        await self._bucket.delete(_key(secret))


def _key(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


# ---- cookies


def session_cookie(namespace: str) -> str:
    """The cookie with a session's id; two namespaces on one host do not disturb each other."""
    return f"holdfast_session_{namespace}"


def browser_cookie(namespace: str) -> str:
    """The cookie of a browser that is not logged in: what its CSRF tokens are derived from."""
    return f"holdfast_browser_{namespace}"


def set_cookie(request: Request, response: Response, name: str, value: str, age: float) -> None:
    """A cookie that no script reads and no other site sends."""
    response.set_cookie(
        name,
        value,
        max_age=int(age),
        path=request.scope.get("root_path", "") or "/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )


def forget_cookie(request: Request, response: Response, name: str) -> None:
    """Take a cookie back."""
    response.delete_cookie(
        name,
        path=request.scope.get("root_path", "") or "/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )


# ---- CSRF


def csrf_token(request: Request) -> str:
    """What a form on a page must send back in the field `csrf`."""
    return _derived(str(request.state.browser_secret))


def csrf_fits(request: Request, given: str) -> bool:
    """Whether a form came from one of our own pages in this browser."""
    secret = str(getattr(request.state, "browser_secret", ""))
    known = bool(getattr(request.state, "browser_known", False))
    return known and hmac.compare_digest(_derived(secret).encode(), given.encode())


def _derived(secret: str) -> str:
    return hmac.new(secret.encode(), b"csrf", hashlib.sha256).hexdigest()
