"""Redaction: secrets of this process that must not appear in what it tells.

Whoever puts secrets into a process (`holdfast.settings`) registers them here; whoever writes a text
that leaves it (log lines, errors and tracebacks in records, dead letters and returns) has them
blanked out first. A secret is known in the forms in which Python prints it: as it is, escaped as in
`repr` and in JSON, and line by line when it has several.

It is a net, not the wall: what a handler does to a secret (base64, half of it) is not recognised,
and values shorter than `SHORTEST` are not looked for, because they stand in every text by chance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import quote

SHORTEST: Final = 4
BLANK: Final = "***"
_SHORTEST_LINE: Final = 8
_ROOM: Final = 10_000
"""Longer than any real secret."""


class Redactor:
    """The secrets of one process."""

    def __init__(self) -> None:
        self._forms: dict[str, set[str]] = {}
        self._known = False
        self._pattern: re.Pattern[str] | None = None

    def __repr__(self) -> str:
        return f"Redactor({len(self._forms)} sources)"

    def register(self, source: str, secrets: Iterable[str]) -> None:
        """The secrets of one source, in place of those that it gave before."""
        forms = {form for secret in secrets for form in _forms(secret)}
        if forms == self._forms.get(source, set()):
            return
        self._forms[source] = forms
        self._known = any(self._forms.values())
        self._pattern = None

    def scrub(self, text: str) -> str:
        """The text with every secret blanked out."""
        return self._compiled().sub(BLANK, text) if self._known else text

    def _compiled(self) -> re.Pattern[str]:
        """All secrets as one pattern, the longest first; made when it is needed."""
        if self._pattern is None:
            every = sorted(set().union(*self._forms.values()), key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, every)))
        return self._pattern

    def scrub_values(self, value: Any) -> Any:
        """Plain values with every secret in their texts blanked out."""
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
"""The one of this process."""

scrub = REDACTOR.scrub


def told(text: object, longest: int, *, end: bool = False) -> str:
    """Text from user code, made safe for records, headers and terminals.

    Secrets are blanked out, half surrogate pairs are written as escapes, and the text is cut to its
    first characters, or with `end` to its last ones.
    """
    whole = text if isinstance(text, str) else str(text)
    # A secret that is cut in two is not recognised: cut with room to spare, and again afterwards.
    roughly = whole[-longest - _ROOM :] if end else whole[: longest + _ROOM]
    clean = scrub(roughly.encode("utf-8", "backslashreplace").decode())
    return clean[-longest:] if end else clean[:longest]
