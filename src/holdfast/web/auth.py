"""Who is asking, and what they may do: roles, tokens, login sessions, cookies, CSRF.

Three roles, each with the rights of those before it: a `viewer` looks (secrets are masked), an
`operator` sends, cancels, retries, pauses and resumes, an `admin` also changes definitions, removes
things for good, and commands the fleet.

A token is 32 random bytes. Only its SHA-256 is configured, which is enough because random text
cannot be guessed. A token arrives in an `Authorization: Bearer` header, or once through the login
page, which turns it into a session. A wrong token reveals nothing, not even by how long the answer
takes.

Sessions are kept in a bucket, so every web process knows them. The session id is random and only in
the browser's cookie; the bucket holds its hash and the token it came from, and entries expire on
their own. So a restart logs nobody out, a logout takes effect everywhere at once, and removing a
token ends its sessions.

A form's CSRF token is derived from the browser's secret cookie: another site can neither read it
nor compute one that matches.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec
from fastapi import Request
from starlette.responses import Response

from holdfast.broker import Bucket
from holdfast.client import Client
from holdfast.config import WebConfig
from holdfast.errors import ConfigError
from holdfast.model.codec import Codec, Instant
from holdfast.web.problems import Problem

Role = Literal["viewer", "operator", "admin"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
TOKEN_PREFIX: Final = "hft_"
SESSIONS: Final = "sessions"
CSRF_FIELD: Final = "csrf"
CSRF_HEADER: Final = "X-CSRF-Token"

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.@-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class User:
    """An authenticated user."""

    name: str
    role: Role
    how: Literal["local", "token", "session", "app", "proxy"] = "local"
    """How they were authenticated: as a user of this machine, by bearer token, by login, by the
    host app, or by a proxy in front."""

    def may(self, role: Role) -> bool:
        """Whether the user has this role or a higher one."""
        return ROLES.index(self.role) >= ROLES.index(role)

    @property
    def sees_secrets(self) -> bool:
        """Whether payloads, errors and headers are shown to them unmasked."""
        return self.may("operator")


LOCAL: Final = User("local", "admin")
"""The user when no login is needed, because only this machine can connect."""

Authenticate = Callable[[Request], Awaitable[User | None]]
"""How the host app authenticates a request; None if it does not know the user."""


# ---- tokens


@dataclass(frozen=True, slots=True)
class Token:
    """A configured token: its owner, role and hash."""

    name: str
    role: Role
    hash: str


def make_token(name: str, role: str) -> tuple[str, str]:
    """A new token, and the line to configure for it."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r:.80} is not a valid token name: use up to 64 letters, digits and '_.@-'"
        )
    text = TOKEN_PREFIX + secrets.token_urlsafe(32)
    token = parse_token(f"{name}:{role}:{hash_of(text)}", "the new token")
    return text, f"{token.name}:{token.role}:{token.hash}"


def hash_of(text: str) -> str:
    """The hash that is configured for a token."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def parse_token(text: str, where: str) -> Token:
    """Parse a configured token; errors never repeat its text."""
    name, _, rest = text.strip().partition(":")
    role, _, digest = rest.partition(":")
    if not _NAME.fullmatch(name) or not rest:
        raise ConfigError(f"{where}: a token is NAME:ROLE:HASH; 'holdfast web token' makes one")
    if role not in ROLES:
        raise ConfigError(f"{where}: the role of {name!r} must be {', '.join(ROLES)}")
    if not _HASH.fullmatch(digest):
        raise ConfigError(
            f"{where}: the hash of {name!r} must be 64 hexadecimal digits: put in the line that "
            "'holdfast web token' prints, not the token itself"
        )
    return Token(name, role, digest)


class Tokens:
    """The configured tokens; the file is read again when it changes."""

    def __init__(self, config: WebConfig) -> None:
        self._given = [
            parse_token(part, "web.tokens") for part in config.tokens.split(",") if part.strip()
        ]
        self._file = Path(config.tokens_file) if config.tokens_file else None
        self._seen: tuple[int, int] | None = None
        self._read: list[Token] = []
        _check_names(self.all())

    def __bool__(self) -> bool:
        return bool(self._given or self._file)

    def all(self) -> list[Token]:
        """Every token that is valid now."""
        return [*self._given, *self._from_file()]

    def _from_file(self) -> list[Token]:
        if self._file is None:
            return []
        try:
            stat = self._file.stat()
            if (stat.st_mtime_ns, stat.st_size) != self._seen:
                self._read = _read_file(self._file)
                self._seen = (stat.st_mtime_ns, stat.st_size)
        except OSError as error:
            raise ConfigError(
                f"web.tokens_file {self._file} cannot be read: {error.strerror}"
            ) from None
        return self._read

    def find(self, text: str) -> Token | None:
        """The token with this text; compares with all, so timing reveals nothing."""
        digest, found = hash_of(text), None
        for token in self.all():
            if hmac.compare_digest(digest, token.hash):
                found = token
        return found

    def current(self, name: str, digest: str) -> Token | None:
        """The token a session came from, unless it has been removed."""
        return next((t for t in self.all() if (t.name, t.hash) == (name, digest)), None)


def _read_file(path: Path) -> list[Token]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        parse_token(line, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]


def _check_names(tokens: list[Token]) -> None:
    names = [token.name for token in tokens]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"web: two tokens are named {name!r}: the audit could not tell them apart"
            )


# ---- sessions


class Session(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stored login session."""

    name: str
    hash: str
    created: Instant


SESSION: Final = Codec[Session](Session, "a session")


class Sessions:
    """Starts, finds and ends sessions."""

    def __init__(self, client: Client, tokens: Tokens, seconds: float) -> None:
        self._client = client
        self._tokens = tokens
        self._seconds = seconds
        self._bucket = Bucket(client.broker, client.broker.names.bucket(SESSIONS))

    async def ensure(self) -> None:
        """Create the bucket if it does not exist."""
        await self._client.topology.ensure_buckets(SESSIONS)

    async def start(self, token: Token) -> str:
        """Start a session for a token's owner; returns its secret id."""
        secret = secrets.token_urlsafe(32)
        session = Session(token.name, token.hash, self._client.broker.server_now())
        body = SESSION.encode(session)
        await self._bucket.put(_key(secret), body, expected=0, ttl=self._seconds)
        return secret

    async def find(self, secret: str) -> User | None:
        """The user of a session, while it lasts and its token is valid."""
        entry = await self._bucket.get(_key(secret))
        if entry is None:
            return None
        session = self._bucket.read(SESSION.decode, entry)
        if session is None:
            return None
        token = self._tokens.current(session.name, session.hash)
        return User(token.name, token.role, "session") if token else None

    async def end(self, secret: str) -> None:
        """End a session on every web process at once."""
        await self._bucket.delete(_key(secret))


def _key(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


# ---- cookies


def session_cookie(namespace: str) -> str:
    """The cookie with a session's id; per namespace, so two on one host do not collide."""
    return f"holdfast_session_{namespace}"


def browser_cookie(namespace: str) -> str:
    """The cookie of a browser that is not logged in; its CSRF tokens are derived from it."""
    return f"holdfast_browser_{namespace}"


def set_cookie(request: Request, response: Response, name: str, value: str, age: float) -> None:
    """Set a cookie that scripts cannot read and other sites cannot send; age 0 deletes it."""
    response.set_cookie(
        name,
        value,
        max_age=int(age),
        path=request.scope.get("root_path", "") or "/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )


# ---- CSRF


def csrf_token(request: Request) -> str:
    """The value that a form must send back in the field `csrf`."""
    return _derived(str(request.state.browser_secret))


def csrf_fits(request: Request, given: str) -> bool:
    """Whether a form came from one of our pages in this browser."""
    secret = str(getattr(request.state, "browser_secret", ""))
    known = bool(getattr(request.state, "browser_known", False))
    return known and hmac.compare_digest(_derived(secret).encode(), given.encode())


def _derived(secret: str) -> str:
    return hmac.new(secret.encode(), b"csrf", hashlib.sha256).hexdigest()


# ---- for routes


def current_user(request: Request) -> User:
    """The user of a request, set by the guard in front of every route."""
    user: User | None = getattr(request.state, "user", None)
    if user is None:
        raise Problem(401, "Not logged in: send a token as 'Authorization: Bearer …'")
    return user


def require(role: Role) -> Callable[[Request], User]:
    """A dependency: the user, if they have this role or a higher one."""

    def check(request: Request) -> User:
        user = current_user(request)
        if not user.may(role):
            raise Problem(
                403,
                f"{user.name} has the role {user.role}, but this needs {role}: ask the "
                "administrator for a token with that role",
            )
        return user

    check.role = role  # type: ignore[attr-defined]  # tests read which role a route needs
    return check
