"""Untrusted text on a terminal: control and invisible characters are shown as escapes.

Returns, facts, errors, payloads, keys and log messages come from others. Printed raw, they could
move the cursor, repaint a line, write to the clipboard (OSC 52), reverse the reading order (bidi)
or be invisible: a failed host could paint itself "ok". So the command line (`cli.out`) and the
text log (`telemetry`) print only what `one_line` or `block` returns; JSON passes `json_text`.

Escaped (`\\x1b`, `\\u202e`): C0 and C1 controls, delete, Unicode format characters (bidi, zero
width, tags), line and paragraph separators, zero-width selectors and fillers, lone surrogates.
Visible characters of every script are left alone.

Not covered: look-alike letters, and stacked combining marks that overflow their line.
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
    """Text on one line; line breaks are shown as `\\n`."""
    return _LINE.sub(_escape, str(text))


def block(text: object) -> str:
    """Multi-line text; keeps line breaks and tabs."""
    return _BLOCK.sub(_escape, str(text))


def json_text(text: str) -> str:
    """An equivalent JSON document with control and invisible characters escaped."""
    return _BLOCK.sub(_escape_json, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if match[0] in _SHORT:
        return _SHORT[match[0]]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _escape_json(match: re.Match[str]) -> str:
    """JSON writes escapes as UTF-16 units; these characters occur only inside strings."""
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[n]:02x}{units[n + 1]:02x}" for n in range(0, len(units), 2))
