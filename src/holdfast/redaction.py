"""Keeps this process's secrets out of its logs, errors, records and returns.

Code that loads secrets (`holdfast.settings`) registers them here; code that emits text (log lines,
errors and tracebacks in records, dead letters, returns) passes it through `scrub` first. Secrets
match as Python prints them: verbatim, escaped as in `repr`, JSON and URLs, and line by line.

Secrets in a payload are known by their names (`is_secret`): `of_payload` makes a redactor of one
attempt, for what its handler logs and raises.

Best effort only: transformed secrets (base64, substrings) are not recognised, and values shorter
than `SHORTEST` are ignored because they would match unrelated text.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote

SHORTEST: Final = 4  # shorter values occur in any text by chance
BLANK: Final = "***"
_SHORTEST_LINE: Final = 8  # a single line of a secret is more likely to be ordinary text
_ROOM: Final = 10_000
"""Slack when cutting long texts: longer than any real secret."""


REMEMBERED_NAME: Final = 64
"""Longer names are not cached: untrusted names must not fill the memory."""
MOST: Final = 1000
"""Secrets taken from one payload: they become one pattern, which is compiled."""


class Redactor:
    """Secrets by source: those of a process, or of one attempt's payload."""

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


# ---- secrets by their names

_WORDS: Final = frozenset(
    """pass password passwords passwd passphrase passcode passkey pwd pw secret secrets token tokens
    apikey authorization authorisation auth cookie cookies credential credentials creds cred bearer
    signature sig session jwt otp totp pin ssn cvv cvc""".split()  # noqa: SIM905 - as a list: 40 lines
)
_PAIRS: Final = re.compile(
    r"(?:api|access|private|encryption|signing|ssh|account|shared|storage|master|license|deploy)"
    r"keys?|cardnumber"
)
_PARTS: Final = re.compile(
    r"password|passwd|passphrase|passwort|kennwort|contrase|secret(?!ar)|apikey|accesskey|privatekey|credential|authorization"
    r"|tokens?$|(?<!com)(?<!by)(?<!tres)(?<!sur)pass$|pwd$"
)
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SPLIT: Final = re.compile(r"[^a-z0-9]+")


def is_secret(name: str) -> bool:
    """Whether a member or header of this name is likely to hold a secret."""
    return _known(name) if len(name) <= REMEMBERED_NAME else _judged(name)


def _judged(name: str) -> bool:
    words = [word for word in _SPLIT.split(_CAMEL.sub("_", name).lower()) if word]
    if any(word in _WORDS or _PARTS.search(word) for word in words):
        return True
    pairs = ["".join(pair) for pair in itertools.pairwise(words)]
    return any(_PAIRS.fullmatch(pair) for pair in (*words, *pairs))


_known = lru_cache(maxsize=4096)(_judged)


def of_payload(body: bytes, parameters: Sequence[str]) -> Redactor:
    """A redactor of the values in a payload that have secret names.

    `parameters` are those of its job: the payload of a job with one parameter is its bare value.
    """
    found = Redactor()
    try:
        value = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return found
    if len(parameters) == 1 and not (isinstance(value, dict) and value.keys() == {parameters[0]}):
        value = {parameters[0]: value}
    found.register("payload", itertools.islice(_secret_texts(value), MOST))
    return found


def _secret_texts(value: Any) -> Iterator[str]:
    """The texts and numbers below secret names, at any depth, without recursion."""
    open_: list[tuple[Any, bool]] = [(value, False)]
    while open_:
        inner, secret = open_.pop()
        if isinstance(inner, dict):
            open_ += [(v, secret or is_secret(str(k))) for k, v in inner.items()]
        elif isinstance(inner, list):
            open_ += [(v, secret) for v in inner]
        elif secret and isinstance(inner, str | int | float) and not isinstance(inner, bool):
            yield str(inner)
