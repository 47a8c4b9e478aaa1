"""Secrets in what is shown: members, headers and texts that look like one are masked for viewers.

It goes by names (`password`, `api_key`, `Authorization`, …), by what follows them in a text
(`password=…`, `--password …`, an object, a quoted text), and by form: logins in URLs, PEM blocks,
well-known tokens. It is best effort: what must stay secret does not belong in a payload.

Guaranteed: every function here runs in linear time, because the text is untrusted and the web
process has one event loop; none recurses, however deep a value is; truncated text is masked up to
its end; masking twice changes nothing. `answer` and `page` mask everything they send to a viewer
once more, so a route that forgets to mask does not leak.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from holdfast.redaction import is_secret

MASK: Final = "•••"
LONGEST_BODY: Final = 1024 * 1024
"""Bytes of a body that are masked and shown: the largest message of a server with default
settings."""
# ---- values

_NAMING: Final = frozenset(
    {"name", "key", "k", "field", "header", "parameter", "param", "variable", "env"}
)
_VALUES: Final = frozenset({"value", "values", "val", "v", "content", "data", "default"})
_FLAG: Final = re.compile(r"-{1,2}[\w-]{1,120}")
_LOGIN_FLAGS: Final = frozenset({"-u", "--user", "--proxy-user", "--userpwd"})


def masked(value: Any) -> Any:
    """A JSON value with its secrets masked; any depth."""
    whole: list[Any] = [value]
    open_ = [whole]  # lists and objects whose members are not masked yet
    while open_:
        place: Any = open_.pop()
        pairs = place.items() if isinstance(place, dict) else enumerate(place)
        for key, inner in list(pairs):
            if isinstance(inner, str):
                place[key] = masked_text(inner)
            elif isinstance(inner, dict):
                place[key] = _masked_members(inner)
                open_.append(place[key])
            elif isinstance(inner, list | tuple):
                place[key] = _masked_words(inner, pair=isinstance(place, list))
                open_.append(place[key])
    return whole[0]


def _masked_members(members: dict[Any, Any]) -> dict[Any, Any]:
    """Mask the members of an object whose names are secret: one level."""
    named = any(
        isinstance(value, str) and str(key).lower() in _NAMING and is_secret(value)
        for key, value in members.items()
    )
    found: dict[Any, Any] = {}
    for key, value in members.items():
        hidden = value and (is_secret(str(key)) or (named and str(key).lower() in _VALUES))
        found[masked_text(key) if isinstance(key, str) else key] = MASK if hidden else value
    return found


def _masked_words(words: Sequence[Any], *, pair: bool) -> list[Any]:
    """Mask the words of a list that the words before them mark as secret: one level.

    `pair`: the list is inside a list, so two members may be a header's name and value.
    """
    found = list(words)
    if pair and len(found) == 2 and isinstance(found[0], str) and is_secret(found[0]):
        found[1] = MASK
    for n in range(1, len(found)):
        before, word = words[n - 1], found[n]
        if not isinstance(before, str) or not _FLAG.fullmatch(before):
            continue
        if not word or not isinstance(word, str | int | float):
            continue
        login = before in _LOGIN_FLAGS and isinstance(word, str) and ":" in word
        if login or is_secret(before):
            found[n] = MASK
    return found


# ---- texts

# Possessive quantifiers and the look-behind keep each of these linear: nothing is read twice.
_PLAIN: Final = re.compile(r"[\w./-]{0,19}", re.ASCII)
_ESCAPED: Final = re.compile(r"(?<!\\)\\++u00([2-7][0-9a-fA-F])")
_KEY: Final = re.compile(
    r"(?<![\w-])([\w-]++)"
    r"(?:([\\\"'`\]]{0,8}+\s*+(?:=>|:=|=|:)\s*+|>|%3[aAdD])"
    r"|((?<=\w)[ \t]++|[\\\"'`]{1,8}+\s*+,\s*+))?"
)
_SCHEME: Final = re.compile(r"(?:bearer|basic|digest|negotiate|token|apikey)[ \t]++", re.IGNORECASE)
_OPENING: Final = re.compile(r"[bBrRuUfF]{0,2}(\\{0,16}[\"'`])")
_TO_QUOTE: Final = {
    '"': re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL),
    "'": re.compile(r"(?:[^'\\]++|\\.)*+", re.DOTALL),
    "`": re.compile(r"[^`]*+"),
}
_BLOCK: Final = re.compile(r"[|>][+-]?[ \t]*+(?:\r?\n[ \t]++[^\n]*+)++")
_LINE: Final = re.compile(r"[^\r\n\"']*+")
_NAMED: Final = re.compile(r"[\\\"'`]{0,8}+([\w-]++)")
_WORD: Final = re.compile(r"[\\\"'`]{0,8}+[^\s\\\"'`]*+")
_CALL: Final = re.compile(r"[A-Za-z_][\w.]*+(?=\()")
_BARE: Final = re.compile(r"[^\s,;&})\]\"'`<>]++")
_BRACKETS: Final = re.compile(r"[\[\](){}\"]")
_ELEMENT: Final = re.compile(r"[^<]*+")
_LINE_NAMES: Final = re.compile(r"authori[sz]ation|cookie", re.IGNORECASE)
_ADDRESS: Final = re.compile(r"://([^\s/?#\"'<>`]*+)")
_LATER_LOGIN: Final = re.compile(r"[^\s@\"'<>]{1,256}+@")
_PORT: Final = re.compile(r"[^:]*+(?::\d*+)?")
_BEARER: Final = re.compile(r"(bearer\s{1,64}+)[\w.~+/=-]{8,}+", re.IGNORECASE)
_HOOK: Final = re.compile(
    r"(hooks\.slack\.com/[a-z]{1,20}+/|discord(?:app)?\.com/api/webhooks/|api\.telegram\.org/bot)"
    r"[^\s\"'<>`]++"
)
"""URLs that are credentials themselves: anyone who knows one may post to it."""
_RUN: Final = re.compile(r"[\w.-]{20,}+", re.ASCII)
_TOKEN: Final = re.compile(
    r"(?<![A-Za-z0-9])(?:hft_|eyJ|gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|[sr]k[-_]|AKIA|ASIA"
    r"|AIza|npm_|pypi-|hvs\.|S[AUONCX](?=[A-Z2-7]{50}))"
)
_TOKEN_LENGTH: Final = 16
"""Shorter texts are words, not tokens."""


def masked_text(text: str) -> str:
    """A text with what looks like a secret masked: `password=…`, logins in addresses, tokens."""
    if _PLAIN.fullmatch(text):
        return text  # short, plain text, as most texts in a list
    if "\\u00" in text:
        text = _ESCAPED.sub(_unescaped, text)
    if "BEGIN" in text:
        text = _without_pem(text)
    text = _without_values(text)
    if "://" in text:
        text = _HOOK.sub(rf"\g<1>{MASK}", _without_logins(text))
    text = _BEARER.sub(rf"\g<1>{MASK}", text)
    return _RUN.sub(_without_token, text)


def _unescaped(match: re.Match[str]) -> str:
    """A character that JSON may write as `\\u0070`: a name must not hide that way."""
    letter = chr(int(match[1], 16))
    return letter if letter.isalnum() or letter in "_-" else match[0]


_PEM_BEGIN: Final = re.compile(r"-{4,6} ?BEGIN [^-\r\n]{1,80}-")
_PEM_END: Final = re.compile(r"-{4,6} ?END [^-\r\n]{1,80}+-{4,6}")


def _without_pem(text: str) -> str:
    """Each PEM block masked; one without an end is masked to the end of the text."""
    parts, at = [], 0
    while begin := _PEM_BEGIN.search(text, at):
        parts += [text[at : begin.start()], MASK]
        end = _PEM_END.search(text, begin.end())
        at = end.end() if end else len(text)
    return "".join([*parts, text[at:]])


def _without_values(text: str) -> str:
    """Mask the values after secret names."""
    parts, at, place, named = [], 0, 0, False
    while found := _KEY.search(text, place):
        place = found.end()
        name, sign, gap = found[1], found[2], found[3]
        if sign is None and not _takes_next(text, name, gap, place):
            continue
        if sign == ">" and text[found.start() - 1 : found.start()] not in ("<", ":"):
            continue  # no element begins here
        is_value = named and name.lower() in _VALUES
        if sign is not None and not (is_secret(name) or is_value or _logs_in(text, name, place)):
            if name.lower() in _NAMING:  # {"name": "PASSWORD", "value": "…"}
                word = _NAMED.match(text, place)
                named = word is not None and is_secret(word[1])
            continue
        if sign == ">":
            element = _ELEMENT.match(text, place)
            start, end, quote = place, element.end() if element else place, ""
        else:
            start, end, quote = _value(text, place, bool(sign and _LINE_NAMES.search(name)))
        if end > start:
            quote = quote or ('"' if sign and sign.startswith('"') else "")
            parts += [text[at:start], f"{quote}{MASK}{quote}"]
            at = place = end
    return "".join([*parts, text[at:]])


def _takes_next(text: str, name: str, gap: str | None, place: int) -> bool:
    """Whether the next word is this one's secret: `--password x`, `-u a:b`, `password 'x'`."""
    if gap is None:
        return False
    if name in _LOGIN_FLAGS:
        return _logs_in(text, name, place)
    quoted = not gap.strip() and text[place : place + 1] in ("'", '"')
    return (name.startswith("-") or quoted) and is_secret(name)


def _logs_in(text: str, name: str, place: int) -> bool:
    """Whether a flag is followed by a user and a password: `-u a:b`, `--user=a:b`."""
    word = _WORD.match(text, place) if name in _LOGIN_FLAGS else None
    return word is not None and ":" in word[0]


def _value(text: str, start: int, whole_line: bool) -> tuple[int, int, str]:
    """Where the value that starts at `start` ends, and the quotes around it."""
    if scheme := _SCHEME.match(text, start):
        start = scheme.end()
    if opening := _OPENING.match(text, start):
        return _quoted(text, start, opening)
    if block := _BLOCK.match(text, start):
        return start, block.end(), ""
    if text[start : start + 1] in ("{", "["):
        return start, _closed(text, start), '"'
    if call := _CALL.match(text, start):  # SecretStr('…')
        return start, _closed(text, call.end()), ""
    bare = (_LINE if whole_line else _BARE).match(text, start)
    return start, bare.end() if bare else start, ""


def _quoted(text: str, start: int, opening: re.Match[str]) -> tuple[int, int, str]:
    """A quoted value; without a closing quote it extends to the end of the text."""
    quote = opening[1]
    if len(quote) > 1:  # inside a quoted text
        end = text.find(quote, opening.end())
    else:
        inner = _TO_QUOTE[quote].match(text, opening.end())
        end = inner.end() if inner else len(text)
    if end < 0 or end >= len(text):
        return start, len(text), quote
    return start, end + len(quote), quote


def _closed(text: str, start: int) -> int:
    """Where the brackets opened at `start` close; the end of the text if they do not."""
    depth, place = 0, start
    while found := _BRACKETS.search(text, place):
        place = found.end()
        if found[0] == '"':
            inner = _TO_QUOTE['"'].match(text, place)
            place = (inner.end() if inner else len(text)) + 1
        else:
            depth += 1 if found[0] in "[({" else -1
            if depth == 0:
                return place
    return len(text)


def _without_logins(text: str) -> str:
    """Remove users and passwords from URLs."""
    parts, at, place = [], 0, 0
    while found := _ADDRESS.search(text, place):
        place = found.end()
        login = found.start(1) + found[1].rfind("@")
        if "@" not in found[1]:
            if _PORT.fullmatch(found[1]):
                continue
            # No host and port: the password may contain a slash or a question mark.
            later = _LATER_LOGIN.match(text, place)
            if later is None:
                continue
            login = place = later.end() - 1
        parts += [text[at : found.start(1)], MASK]
        at = login
    return "".join([*parts, text[at:]])


def _without_token(match: re.Match[str]) -> str:
    run = match[0]
    token = _TOKEN.search(run)
    if token is None or len(run) - token.start() < _TOKEN_LENGTH:
        return run
    return f"{run[: token.start()]}{MASK}"


# ---- bodies


def masked_body(text: str) -> str:
    """A result, an event or the like as text, masked; reformatted only if necessary."""
    try:
        value = json.loads(text)
        clean = masked(value)
        return text if clean == value else json.dumps(clean, ensure_ascii=False)
    except (ValueError, RecursionError):
        return masked_text(text)


def masked_bytes(data: bytes, parameters: Sequence[str] | None = ()) -> str:
    """A body as a viewer may read it; binary data has no names to go by and is masked entirely."""
    try:
        text = data[:LONGEST_BODY].decode(
            "utf-8", "strict" if len(data) <= LONGEST_BODY else "ignore"
        )
    except UnicodeDecodeError:
        return MASK
    return masked_payload(text, parameters)


def masked_payload(text: str, parameters: Sequence[str] | None) -> str:
    """A run's payload, masked. `parameters` are its job's parameter names; None if unknown.

    The payload of a job with one parameter is that value alone, without its name. If the name is
    unknown, such a payload is masked entirely.
    """
    if parameters is None:
        bare = bool(text.strip()) and text.lstrip()[:1] != "{"
        return f'"{MASK}"' if bare else masked_body(text)
    if len(parameters) == 1 and text.strip() and is_secret(parameters[0]):
        return f'"{MASK}"'
    return masked_body(text)


def masked_arguments(function: str, arguments: Sequence[Any]) -> list[Any]:
    """The arguments of a command, masked by the name of its function, since they have no names."""
    if is_secret(function):
        return [MASK for _ in arguments]
    found: list[Any] = masked(list(arguments))
    return found


def masked_headers(headers: dict[str, str]) -> dict[str, str]:
    """Headers with their secrets masked."""
    return {n: MASK if is_secret(n) else masked_text(v) for n, v in headers.items()}
