"""Refusals: the one line that an error of msgspec, of pydantic or of a user's validator becomes.

Guaranteed: a message is one line of limited length, names the member and never repeats its value.
A `MemoryError` speaks of the machine, not of the payload: it is raised again, not translated.
"""

from __future__ import annotations

import re

import msgspec

from holdfast.errors import InvalidPayload

_LONGEST_MESSAGE = 300


def refused(error: Exception, prefix: str, what: str = "payload") -> InvalidPayload:
    """The one-line refusal that an error of msgspec, pydantic or a user's validator becomes."""
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, RecursionError):
        return InvalidPayload(f"{what}: nested too deeply")
    if isinstance(error, UnicodeError):
        return InvalidPayload(f"{what}: not UTF-8 text")
    if isinstance(error, msgspec.DecodeError) and not isinstance(error, msgspec.ValidationError):
        return InvalidPayload(f"{what}: not JSON ({one_line(str(error))})")
    path, text = _facts(error)
    member = ".".join(part for part in (prefix, path) if part).replace(".[", "[")
    where = f"{what} member {one_line(repr(member))}" if member else what
    return InvalidPayload(f"{where}: {one_line(text)}")


def _facts(error: Exception) -> tuple[str, str]:
    """Where in the value, and what was expected there."""
    if isinstance(error, msgspec.ValidationError):
        text, found, at = str(error).rpartition(" - at `")
        path = at.partition("$")[2].strip(".`") if found else ""
        return path, _lower((text if found else at).replace("`", "'"))
    if type(error).__module__.startswith("pydantic") and hasattr(error, "errors"):
        facts = error.errors(include_url=False, include_context=False, include_input=False)
        more = f" (and {len(facts) - 1} more)" if len(facts) > 1 else ""
        return ".".join(str(part) for part in facts[0]["loc"]), _lower(facts[0]["msg"]) + more
    return "", f"{type(error).__name__}: {error}"


def one_line(text: str) -> str:
    """A text as one line of UTF-8 that is not too long."""
    line = re.sub(r"\s+", " ", text).strip().encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= _LONGEST_MESSAGE else line[: _LONGEST_MESSAGE - 3] + "..."


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
