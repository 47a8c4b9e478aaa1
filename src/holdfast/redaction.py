"""Keeps this process's secrets out of its logs, errors, records and returns.

Code that loads secrets (`holdfast.settings`) registers them here; code that emits text (log lines,
errors and tracebacks in records, dead letters, returns) passes it through `scrub` first. Secrets
match as Python prints them: verbatim, escaped as in `repr`, JSON and URLs, and line by line.

Best effort only: transformed secrets (base64, substrings) are not recognised, and values shorter
than `SHORTEST` are ignored because they would match unrelated text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import quote

SHORTEST: Final = 4  # shorter values occur in any text by chance
BLANK: Final = "***"
_SHORTEST_LINE: Final = 8  # a single line of a secret is more likely to be ordinary text
_ROOM: Final = 10_000
"""Slack when cutting long texts: longer than any real secret."""


class Redactor:
    """The secrets of one process, by source."""

    def __init__(self) -> None:
        self._forms: dict[str, set[str]] = {}
        self._known = False
        self._pattern: re.Pattern[str] | None = None

    def __repr__(self) -> str:
        return f"Redactor({len(self._forms)} sources)"

    def register(self, source: str, secrets: Iterable[str]) -> None:
        """Replace the secrets registered for `source`."""
        forms = {form for secret in secrets for form in _forms(secret)}
        if forms == self._forms.get(source, set()):
            return
        self._forms[source] = forms
        self._known = any(self._forms.values())
        self._pattern = None

    def scrub(self, text: str) -> str:
        """Replace every secret in the text with `BLANK`."""
        return self._compiled().sub(BLANK, text) if self._known else text

    def _compiled(self) -> re.Pattern[str]:
        """All secrets as one pattern, longest first so that a prefix never wins; built lazily."""
        if self._pattern is None:
            every = sorted(set().union(*self._forms.values()), key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, every)))
        return self._pattern

    def scrub_values(self, value: Any) -> Any:
        """`scrub` every string inside plain values."""
        if not self._known:
            return value
        if isinstance(value, str):
            return self.scrub(value)
        if isinstance(value, dict):
            return {self.scrub_values(k): self.scrub_values(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.scrub_values(inner) for inner in value]
        return value


def _forms(secret: str) -> Iterable[str]:
    if len(secret) < SHORTEST:
        return
    yield from {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret, safe="")}
    lines = secret.splitlines()
    if len(lines) > 1:
        yield from (line for line in lines if len(line) >= _SHORTEST_LINE)


REDACTOR: Final = Redactor()
"""This process's secrets."""

scrub = REDACTOR.scrub


def told(text: object, longest: int, *, end: bool = False) -> str:
    """Make text from user code safe for records, headers and terminals.

    Redacts secrets, escapes lone surrogates, and keeps the first `longest` characters, or the last
    ones with `end`.
    """
    whole = text if isinstance(text, str) else str(text)
    # A secret cut in two is not recognised: cut with slack, redact, then cut to size.
    roughly = whole[-longest - _ROOM :] if end else whole[: longest + _ROOM]
    clean = scrub(roughly.encode("utf-8", "backslashreplace").decode())
    return clean[-longest:] if end else clean[:longest]
