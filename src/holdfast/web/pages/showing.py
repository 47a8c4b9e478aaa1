"""Data as people read it: JSON that folds, and tracebacks with the user's own frames first."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from markupsafe import Markup

FOLDED: Final = 20
"""A list or object with more members starts folded, so that the rest of the page stays in sight."""
MOST_NODES: Final = 2_000
"""Folding parts in one document; a larger one is shown as plain text, which browsers do faster."""

_FRAME = re.compile(
    r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.*)$', re.MULTILINE
)
_NOT_USERS = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "/holdfast/worker/")


def json_tree(text: str) -> Markup | None:
    """JSON as nested folds whose text is that JSON; None if it is not a list or an object."""
    try:
        value = json.loads(text)
        if not isinstance(value, (dict, list)) or not value or _count(value) > MOST_NODES:
            return None
        return _tree(None, value, "", top=True)
    except (ValueError, RecursionError):
        return None


def _count(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(_count(one) for one in inside)


def _tree(name: str | None, value: Any, comma: str, *, top: bool = False) -> Markup:
    label = Markup("")
    if name is not None:
        label = Markup('<span class="name">{}</span>: ').format(json.dumps(name))
    if not isinstance(value, (dict, list)) or not value:
        text = json.dumps(value, ensure_ascii=False)
        return Markup("<div>{}{}{}</div>").format(label, text, comma)
    last = len(value) - 1
    pairs: Iterable[tuple[str | None, Any]] = (
        value.items() if isinstance(value, dict) else ((None, one) for one in value)
    )
    inner = Markup("").join(
        _tree(key, one, "," if n < last else "") for n, (key, one) in enumerate(pairs)
    )
    begin, end, noun = ("{", "}", "member") if isinstance(value, dict) else ("[", "]", "item")
    count = f"{len(value)} {noun}{'' if len(value) == 1 else 's'}"
    is_open = " open" if top or len(value) <= FOLDED else ""
    return Markup(
        "<details{}><summary data-count='{}'>{}{}</summary>"
        '<div class="in">{}</div></details><div>{}{}</div>'
    ).format(Markup(is_open), count, label, begin, inner, end, comma)


class Frames(NamedTuple):
    """A traceback in two parts."""

    own: str
    """The user's frames, the one that raised last, and the error."""
    whole: str
    """All of it; empty if there is nothing to hide."""


def frames(traceback: str) -> Frames:
    """The user's own frames of a traceback, without those of libraries and of Holdfast."""
    found = list(_FRAME.finditer(traceback))
    if not found:
        return Frames(traceback, "")
    own: list[str] = []
    hidden = 0
    for n, frame in enumerate(found):
        until = found[n + 1].start() if n + 1 < len(found) else _end_of(traceback, frame.end())
        if any(part in frame["file"] for part in _NOT_USERS):
            hidden += 1
        else:
            own.append(traceback[frame.start() : until].rstrip("\n"))
    if not own or not hidden:
        return Frames(traceback, "")
    error = traceback[_end_of(traceback, found[-1].end()) :].strip("\n")
    return Frames("\n".join([*own, error]), traceback)


def _end_of(traceback: str, start: int) -> int:
    """The end of the indented lines of the last frame."""
    at = traceback.find("\n", start)
    while at >= 0:
        if not traceback.startswith("  ", at + 1):
            return at + 1
        at = traceback.find("\n", at + 1)
    return len(traceback)
