"""Parses nats-server configuration files without a server: the parts of the format in use.

`key: value`, `key = value` and `key value`; maps, arrays, quoted and bare strings, numbers with
units, comments, `include`, variables (`$NAME`, from the file or the environment). Keys keep their
case because account names are case-sensitive; `find` ignores case, as the server does for its keys.

A file that cannot be read raises `ConfigError` with the line. Not checked: whether the server knows
a key (`nats-server -t` does that).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.errors import ConfigError

MOST_INCLUDES: Final = 20  # stops files that include each other

_TOKEN: Final = re.compile(
    r"""
      (?P<space>[ \t\r]+ | \#[^\n]* | //[^\n]*)
    | (?P<line>\n | ; | ,)
    | (?P<mark>[{}\[\]=:])
    | "(?P<double>(?:\\.|[^"\\])*)"
    | '(?P<single>[^']*)'
    | (?P<bare>(?:(?![{}\[\],;="'\s]|:(?=[\s{\["'])).)+)
    """,
    re.VERBOSE,
)
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r"}

Token = tuple[str, str, int]
"""Kind, text and line."""


def find(values: Mapping[str, Any], *keys: str) -> Any:
    """The value of the first of these keys, ignoring case; None if absent."""
    lowered = {key.lower(): value for key, value in values.items()}
    return next((lowered[key] for key in keys if key in lowered), None)


def read(path: Path, depth: int = 0) -> dict[str, Any]:
    """Parse a file and everything it includes."""
    if depth > MOST_INCLUDES:
        raise ConfigError(f"{str(path)!r} includes itself, or too many others")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None
    return _Parser(path, text, depth).whole()


class _Parser:
    """Parses one file."""

    def __init__(self, path: Path, text: str, depth: int) -> None:
        self._path = path
        self._depth = depth
        self._tokens = self._scan(text)
        self._at = 0
        self._scopes: list[dict[str, Any]] = []

    def _scan(self, text: str) -> list[Token]:
        found: list[Token] = []
        at, line = 0, 1
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._wrong("a text is not closed", line)
            kind = str(match.lastgroup)
            if kind != "space":
                found.append((kind, match[kind], line))
            line += match[0].count("\n")
            at = match.end()
        return [*found, ("end", "", line)]

    def _wrong(self, what: str, line: int) -> ConfigError:
        return ConfigError(f"{self._path.name}, line {line}: {what}")

    # ---- reading tokens

    def _take(self) -> Token:
        token = self._tokens[self._at]
        self._at = min(self._at + 1, len(self._tokens) - 1)
        return token

    def _skip_lines(self) -> Token:
        while self._tokens[self._at][0] == "line":
            self._at += 1
        return self._tokens[self._at]

    # ---- grammar

    def whole(self) -> dict[str, Any]:
        return self._members(end="")

    def _members(self, end: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        self._scopes.append(values)
        while True:
            self._skip_lines()
            kind, text, line = self._take()
            if (kind, text) == ("mark", end) or (kind == "end" and not end):
                self._scopes.pop()
                return values
            if kind not in ("bare", "double", "single"):
                raise self._wrong(f"{_shown(text)} where a name is expected", line)
            if (kind, text) == ("bare", "include"):
                values |= read(self._path.parent / self._text(*self._take()), self._depth + 1)
            else:
                values[self._text(kind, text, line)] = self._value_of(text)

    def _value_of(self, key: str) -> Any:
        if self._tokens[self._at][0] == "mark" and self._tokens[self._at][1] in "=:":
            self._at += 1
        self._skip_lines()
        return self._value(key)

    def _value(self, key: str) -> Any:
        kind, text, line = self._take()
        if (kind, text) == ("mark", "{"):
            return self._members("}")
        if (kind, text) == ("mark", "["):
            return self._items(key)
        if kind == "bare":
            return self._bare(text)
        if kind in ("double", "single"):
            return self._text(kind, text, line)
        raise self._wrong(f"{key!r} has no value", line)

    def _items(self, key: str) -> list[Any]:
        items: list[Any] = []
        while self._skip_lines()[:2] != ("mark", "]"):
            items.append(self._value(key))
        self._at += 1
        return items

    def _text(self, kind: str, text: str, line: int) -> str:
        if kind not in ("bare", "double", "single"):
            raise self._wrong(f"{_shown(text)} where a text is expected", line)
        if kind != "double":
            return text
        return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), text)

    def _bare(self, text: str) -> Any:
        if text.startswith("$") and len(text) > 1:
            for scope in reversed(self._scopes):
                if text[1:] in scope:
                    return scope[text[1:]]
            return os.environ.get(text[1:], text)
        lowered = text.lower()
        if lowered in ("true", "yes", "on", "enabled"):
            return True
        if lowered in ("false", "no", "off", "disabled"):
            return False
        return int(text) if re.fullmatch(r"-?\d+", text) else text


def _shown(text: str) -> str:
    return repr(text) if text else "the end"
