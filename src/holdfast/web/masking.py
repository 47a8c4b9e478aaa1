"""Secrets in what is shown: members, headers and texts that look like one are masked for viewers.

It goes by names (`password`, `api_key`, `Authorization`, …) and by what stands behind them in a
text, so it is a fence and not a vault: what must stay secret does not belong into a payload.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from holdfast.web.auth import User

MASK: Final = "•••"
_WORD: Final = (
    r"pass(?:word|wd|phrase|code)?s?|pwd|secrets?|tokens?|api[-_ ]?keys?|access[-_ ]?keys?"
    r"|private[-_ ]?keys?|authori[sz]ation|cookies?|credentials?|creds|bearer|signature|session"
    r"|otp|pin|ssn|cvv|card[-_ ]?number"
)
_NAME = re.compile(rf"(?:^|[^a-z])(?:{_WORD})(?:$|[^a-z])", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_IN_TEXT = re.compile(
    rf"(\b[\w-]*(?:{_WORD})[\w-]*[\"']?\s*[=:]\s*)(?:bearer\s+|basic\s+)?(\"[^\"]*\"|'[^']*'|[^\s,;&}})\]]+)",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"(\w+://)[^\s/@:]+:[^\s/@]+@")
_TOKEN = re.compile(
    r"\b(?:hft_[\w-]{20,}|eyJ[\w-]{10,}\.[\w-]+\.[\w-]+|(?i:bearer\s+)[\w.~+/-]{8,})"
)


def hides(user: User) -> bool:
    """Whether secrets are masked for a user."""
    return not user.may("operator")


def is_secret(name: str) -> bool:
    """Whether a member or header of this name is likely to hold a secret."""
    return _NAME.search(_CAMEL.sub("_", name)) is not None


def masked(value: Any) -> Any:
    """A JSON value with its secrets masked."""
    if isinstance(value, dict):
        return {k: MASK if is_secret(str(k)) and v else masked(v) for k, v in value.items()}
    if isinstance(value, list):
        return [masked(item) for item in value]
    return masked_text(value) if isinstance(value, str) else value


def masked_text(text: str) -> str:
    """A text with what looks like a secret masked: `password=…`, logins in addresses, tokens."""
    text = _IN_TEXT.sub(rf"\g<1>{MASK}", text)
    return _TOKEN.sub(MASK, _LOGIN.sub(rf"\g<1>{MASK}@", text))


def masked_body(text: str) -> str:
    """A payload or result as text, masked; laid out anew only when it is JSON and has secrets."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return masked_text(text)
    clean = masked(value)
    return text if clean == value else json.dumps(clean, ensure_ascii=False)


def masked_headers(headers: dict[str, str]) -> dict[str, str]:
    """Headers with their secrets masked."""
    return {n: MASK if is_secret(n) else masked_text(v) for n, v in headers.items()}
