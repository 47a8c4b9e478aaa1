"""Settings as a program sees them: plain values, found by key or by dotted path.

Values are copies: changing one changes nothing for anybody else. `repr` shows no value, so that a
traceback or a log line cannot show a secret by accident.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Position = tuple[str | int, ...]
"""Where a value is: keys, and numbers in lists."""


class Settings(Mapping[str, Any]):
    """One snapshot: `settings["db"]["host"]`, or `settings.get("db.host", "localhost")`."""

    __slots__ = ("_secrets", "_values", "revision")

    def __init__(
        self, values: Mapping[str, Any], *, revision: int = 0, secrets: Sequence[Position] = ()
    ) -> None:
        self._values = values
        self._secrets = tuple(secrets)
        self.revision = revision
        """The revision that these settings were rendered from."""

    def __getitem__(self, path: str) -> Any:
        """A value by its key, or by keys with dots between them."""
        return copy.deepcopy(find(self._values, path))

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Settings(revision={self.revision}, keys={sorted(self._values)})"

    def secrets(self) -> list[str]:
        """The value of every secret."""
        return [str(_at(self._values, position)) for position in self._secrets]

    def masked(self) -> dict[str, Any]:
        """The values with a placeholder for each secret, safe to show."""
        values: dict[str, Any] = copy.deepcopy(dict(self._values))
        for position in self._secrets:
            place = _at(values, position[:-1])
            place[position[-1]] = "(secret)"
        return values


def find(values: Any, path: str) -> Any:
    """The value at a dotted path; keys that contain dots are found too."""
    if isinstance(values, Mapping) and path in values:
        return values[path]
    head, _, rest = path.partition(".")
    inner: Any
    if isinstance(values, Mapping) and head in values and rest:
        inner = values[head]
    elif isinstance(values, list) and head.isdigit() and int(head) < len(values):
        inner = values[int(head)]
    else:
        raise KeyError(f"the settings have no {path!r}")
    return find(inner, rest) if rest else inner


def _at(values: Any, position: Sequence[str | int]) -> Any:
    for step in position:
        values = values[step]
    return values
