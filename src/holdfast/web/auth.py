"""Who is asking, and what they may do.

Three roles, each with the rights of those before it: a `viewer` looks (secrets masked), an
`operator` sends, cancels, repeats, pauses and resumes, an `admin` also changes definitions, removes
things for good, and commands the fleet.

A token is 32 random bytes; only its SHA-256 is configured, which is enough because nothing can be
guessed about a random text. Tokens come in an `Authorization: Bearer` header, or once through the
login page, which makes a session of them (`sessions`). Whoever presents a wrong one learns nothing,
not even by the time it takes.
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

from fastapi import Request

from holdfast.config import WebConfig
from holdfast.errors import ConfigError
from holdfast.web.problems import Problem

Role = Literal["viewer", "operator", "admin"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
PREFIX: Final = "hft_"

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.@-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class User:
    """Somebody who was recognised."""

    name: str
    role: Role
    how: Literal["local", "token", "session", "app"] = "local"
    """By being on this machine, a bearer token, a login, or the app that this is mounted in."""

    def may(self, role: Role) -> bool:
        """Whether the user has a role, or more."""
        return ROLES.index(self.role) >= ROLES.index(role)


LOCAL: Final = User("local", "admin")
"""Who asks when nobody needs to log in: only this machine can."""

Authenticate = Callable[[Request], Awaitable[User | None]]
"""How an app that this is mounted in says who is asking; None: nobody that it knows."""


# ---- tokens


@dataclass(frozen=True, slots=True)
class Token:
    """A configured token: whose it is, and what its text must hash to."""

    name: str
    role: Role
    hash: str


def make_token(name: str, role: str) -> tuple[str, str]:
    """A new token, and the text to configure for it."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r:.80} is no name for a token: letters, digits and '_.@-', at most 64 of them"
        )
    text = PREFIX + secrets.token_urlsafe(32)
    token = parse_token(f"{name}:{role}:{hash_of(text)}", "the new token")
    return text, f"{token.name}:{token.role}:{token.hash}"


def hash_of(text: str) -> str:
    """What is configured for a token."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def parse_token(text: str, where: str) -> Token:
    """A configured token; its text is never repeated in an error."""
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
    """The configured tokens; a file of them is read again when it changes."""

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
        """Every token that counts now."""
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
        """The token with this text; all are compared, so that time tells nothing."""
        digest, found = hash_of(text), None
        for token in self.all():
            if hmac.compare_digest(digest, token.hash):
                found = token
        return found

    def still(self, name: str, digest: str) -> Token | None:
        """The token that a session was made of, unless it has been taken back."""
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
            raise ConfigError(f"web: two tokens have the name {name!r}: the audit could not tell")


# ---- for routes


def current_user(request: Request) -> User:
    """Who is asking; set by the guard in front of every route."""
    user: User | None = getattr(request.state, "user", None)
    if user is None:
        raise Problem(401, "Nobody is logged in: send a token as 'Authorization: Bearer …'")
    return user


def require(role: Role) -> Callable[[Request], User]:
    """A dependency: the user, if they have this role or more."""

    def check(request: Request) -> User:
        user = current_user(request)
        if not user.may(role):
            raise Problem(
                403,
                f"{user.name} has the role {user.role}, and this needs {role}: ask whoever runs "
                "this for a token with that role",
            )
        return user

    check.role = role  # type: ignore[attr-defined]  # so that tests can tell what a route needs
    return check
