"""Foreign text on a terminal: characters that act instead of being seen are shown as escapes.

Returns, facts, errors, payloads, keys and log messages are written by others. Printed as they are,
they could move the cursor, repaint a line, write to the clipboard (OSC 52), reverse the reading
order (bidi) or hide in no width at all: a host that failed could paint itself "ok". So the command
line (`cli.common`) and the text log (`telemetry`) print nothing but what `one_line` or `block`
returns, and JSON passes `json_text`.

Shown as an escape (`\\x1b`, `\\u202e`): the control characters of C0 and C1, delete, Unicode's
format characters (bidi, zero width, tags), line and paragraph separators, selectors and fillers
without width, halves of surrogate pairs. Left alone: everything that is seen, in any script.

Not covered: letters that look like others, and more marks on a letter than fit its line.
"""

from __future__ import annotations

import re
from typing import Final

_ACTING: Final = (
    "\x00-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890-\u0891\u08e2\u115f-\u1160"
    "\u17b4-\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ud800-\udfff"
    "\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001345f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_LINE: Final = re.compile(f"[{_ACTING}]")
_BLOCK: Final = re.compile(rf"(?![\n\t])[{_ACTING}]")
_SHORT: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def one_line(text: object) -> str:
    """A text as one line; a line break in it is shown as `\\n`."""
    return _LINE.sub(_escape, str(text))


def block(text: object) -> str:
    """A text of several lines; line breaks and tabs stay."""
    return _BLOCK.sub(_escape, str(text))


def json_text(text: str) -> str:
    """A JSON document that means the same, without a character that acts."""
    return _BLOCK.sub(_escape_json, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if match[0] in _SHORT:
        return _SHORT[match[0]]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _escape_json(match: re.Match[str]) -> str:
    """Such characters stand only in strings, where JSON writes them as UTF-16."""
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[n]:02x}{units[n + 1]:02x}" for n in range(0, len(units), 2))
