"""A check: what is probed, how often, and what counts as good.

One flat record for all kinds, as it is stored, sent by API and shown in a form. Stored records may
have members of a newer version, which are ignored; input may not (`CheckInput`).
"""

from __future__ import annotations

import re
import zlib
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from uptime.guard import Guard, Refused, judge_number, parse_place, parse_url

PREFIX = "uptime-check-"
"""Prefix of the names of all checks' schedules."""
MASK = "********"
"""Replaces the value of a stored header, which is never shown again."""
RESERVED = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade", "te"})
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_CODES = re.compile(r"([1-5]\d\d)(?:-([1-5]\d\d))?")


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line of text")
    return text


Line = Annotated[str, AfterValidator(_one_line)]
Id = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,47}$")]
Kind = Literal["http", "tls", "tcp"]


class Check(BaseModel):
    """One check as it is stored."""

    model_config = ConfigDict(extra="ignore", str_strip_whitespace=True)

    id: Id
    name: Annotated[Line, Field(min_length=1, max_length=80)]
    kind: Kind = "http"
    target: Annotated[Line, Field(min_length=1, max_length=2_000)]
    """A URL, or host:port for tls and tcp."""
    interval: Annotated[int, Field(ge=1, le=86_400)] = 60
    timeout: Annotated[float, Field(ge=0.2, le=30, allow_inf_nan=False)] = 10
    failures: Annotated[int, Field(ge=1, le=10)] = 2
    """Down after this many failures in a row."""
    recoveries: Annotated[int, Field(ge=1, le=10)] = 1
    """Up again after this many good results in a row."""
    slow_ms: Annotated[int, Field(ge=0, le=30_000)] = 0
    """Degraded when an answer takes longer; 0: never."""
    method: Literal["GET", "HEAD"] = "GET"
    headers: dict[str, str] = {}
    redirects: Annotated[int, Field(ge=0, le=10)] = 5
    """How many are followed; 0: the redirect itself is the answer."""
    status: Annotated[str, Field(max_length=100)] = "200-299"
    """Status codes that are good: 200-299,401."""
    contains: Annotated[Line, Field(max_length=500)] = ""
    """What the body, or a TCP server's banner, must contain."""
    lacks: Annotated[Line, Field(max_length=500)] = ""
    expect_headers: dict[str, str] = {}
    """Headers of the answer, and what each must contain."""
    warn_days: Annotated[int, Field(ge=0, le=365)] = 14
    """Degraded when the certificate expires within this many days."""
    server_name: Annotated[Line, Field(max_length=253)] = ""
    """The name on the certificate, if it differs from the host."""
    public: bool = True
    """Whether it is on the status page."""
    paused: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        try:
            parse_url(self.target) if self.kind == "http" else parse_place(self.target)
        except Refused as error:
            raise ValueError(f"target: {error}") from None
        if self.timeout > self.interval:
            raise ValueError("timeout: must not be longer than the interval")
        _ranges(self.status)
        _headers(self.headers, "headers")
        _headers(self.expect_headers, "expect_headers")
        return self

    @property
    def schedule(self) -> str:
        """The name of its schedule."""
        return f"{PREFIX}{self.id}"

    @property
    def phase(self) -> int:
        """Offset within its interval, so that checks do not all fall on the same second."""
        return zlib.crc32(self.id.encode()) % self.interval + 1

    def expects_status(self, code: int) -> bool:
        """Whether a status code is good."""
        return any(low <= code <= high for low, high in _ranges(self.status))

    def _place(self) -> tuple[str, int]:
        if self.kind != "http":
            return parse_place(self.target)
        url = parse_url(self.target)
        return url.raw_host.decode("ascii"), url.port or (443 if url.scheme == "https" else 80)

    def _origin(self) -> tuple[str, str, int]:
        """The origin that its headers are sent to."""
        scheme = parse_url(self.target).scheme if self.kind == "http" else self.kind
        return (scheme, *self._place())

    def shown(self) -> dict[str, Any]:
        """As shown to its managers: header values are masked, because they may be secrets."""
        return {**self.model_dump(mode="json"), "headers": dict.fromkeys(self.headers, MASK)}


class CheckInput(Check):
    """A check as somebody sends it."""

    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)

    def stored(self, guard: Guard, shortest: int, old: Check | None = None) -> Check:
        """Validate for storing; ValueError says what this installation does not accept."""
        if self.id == "new":
            raise ValueError("id: 'new' is the page on which checks are added")
        if self.interval < shortest:
            raise ValueError(f"interval: must be at least {shortest} seconds")
        try:
            host, port = self._place()
            judge_number(guard, host, port)
        except Refused as error:
            raise ValueError(f"target: {error}") from None
        return Check(**(self.model_dump() | {"headers": self._filled(old)}))

    def _filled(self, old: Check | None) -> dict[str, str]:
        """The headers with stored values filled in, but only for the origin they were given for."""
        kept = [name for name, value in self.headers.items() if value == MASK]
        if kept and (old is None or any(name not in old.headers for name in kept)):
            raise ValueError(f"headers: {', '.join(kept)} has no stored value: write one")
        if kept and old is not None and self._origin() != old._origin():
            raise ValueError(
                f"headers: the target has changed, so write the value of {', '.join(kept)} again: "
                "a stored value is sent only where it was meant to go"
            )
        before = old.headers if old else {}
        return {k: before[k] if v == MASK else v for k, v in self.headers.items()}


def _ranges(text: str) -> list[tuple[int, int]]:
    found = []
    for part in text.split(","):
        match = _CODES.fullmatch(part.strip())
        if not match:
            raise ValueError("status: write codes and ranges with commas, as 200-299,401")
        found.append((int(match[1]), int(match[2] or match[1])))
    return found


def _headers(headers: dict[str, str], what: str) -> None:
    if len(headers) > 20:
        raise ValueError(f"{what}: at most 20")
    for name, value in headers.items():
        if not _TOKEN.fullmatch(name):
            raise ValueError(f"{what}: {name[:40]!r} is no name of a header")
        if what == "headers" and name.lower() in RESERVED:
            raise ValueError(f"{what}: {name} is set by the check itself")
        if len(value) > 1_000 or not value.isprintable() or not value.isascii():
            raise ValueError(f"{what}: the value of {name} must be one line of plain ASCII text")
