"""Finds out what is wrong with a payload before it is sent to workers that would refuse it.

It catches typing mistakes by what workers publish about their jobs (`holdfast.payload.published`).
Guaranteed: nothing is refused that a worker of the job would accept. Types that a schema does not
describe pass, and so does everything if nothing is published or the label makes no sense.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any, Final

from holdfast.payload.published import Published, resolved

_SCALARS: Final = frozenset({"string", "number", "integer", "boolean"})
_BOOLEANS: Final = frozenset(
    {"0", "1", "f", "false", "n", "no", "off", "on", "t", "true", "y", "yes"}
)
"""The texts that pydantic accepts as a bool."""


def misfit(job: Published, body: bytes) -> str:
    """What is wrong with a payload, as a sentence; empty if nothing is."""
    return _judged(job, body)[0]


def ignored(job: Published, body: bytes) -> list[str]:
    """Members that the job ignores but that look like misspelt ones, as sentences."""
    return _judged(job, body)[1]


def _judged(job: Published, body: bytes) -> tuple[str, list[str]]:
    check = _Check(job)
    try:
        return check.payload(json.loads(body) if body.strip() else None, not body.strip()), (
            check.ignored
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError):
        return "", []  # a label that makes no sense checks nothing


class _Check:
    """One check of one payload."""

    def __init__(self, job: Published) -> None:
        self._job = job
        self.ignored: list[str] = []

    def payload(self, value: Any, empty: bool) -> str:
        job = self._job
        if not job.parameters and not job.rest:
            return ""
        if len(job.parameters) == 1 and not job.rest:
            return self._one(job.parameters[0], value, empty)
        wrong = self._several(value)
        first = job.parameters[:1]
        if wrong and first and not empty and set(job.required) <= set(first):
            # A bare value, sent when the first parameter was the only one.
            return self._value(first[0], value) and wrong
        return wrong

    def _several(self, value: Any) -> str:
        job = self._job
        if not isinstance(value, dict) and value is not None:
            what = _kind_text(value)
            return f"the payload is an object with {_listed(job.parameters)}, not {what}"
        given: dict[str, Any] = value or {}
        wrong = _members(given, job.parameters, job.required, job.rest, "payload")
        return wrong or _first(self._value(n, given[n]) for n in job.parameters if n in given)

    def _one(self, name: str, value: Any, empty: bool) -> str:
        job = self._job
        if empty:
            return f"the payload is empty, but {name!r} is needed" if name in job.required else ""
        if isinstance(value, dict) and not self._takes_objects(job.schemas.get(name)):
            wrong = _members(value, job.parameters, job.required, False, "payload")
            return wrong or (self._value(name, value[name]) if name in value else "")
        return self._value(name, value)

    def _takes_objects(self, schema: Any) -> bool:
        """Whether a value may be an object, in which case the payload is the bare value."""
        found = resolved(schema, self._job.types)
        options = found.get("anyOf") or found.get("oneOf")
        if options:
            return any(self._takes_objects(option) for option in options)
        kinds = found.get("type", () if "enum" in found else "object")
        return "object" in kinds

    def _value(self, name: str, value: Any) -> str:
        job = self._job
        schema, lax = job.schemas.get(name), name in job.lax
        if not schema or (lax and name not in job.plain):
            return ""
        return self._check(schema, value, name, lax)

    def _check(self, schema: Any, value: Any, where: str, lax: bool) -> str:
        schema = resolved(schema, self._job.types)
        if options := schema.get("anyOf") or schema.get("oneOf"):
            before = list(self.ignored)
            found = [self._check(option, value, where, lax) for option in options]
            self.ignored = before
            return "" if "" in found else min(found, key=lambda text: text.count(": expected"))
        choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
        if choices and value not in choices and not (lax and not _all_texts(value, *choices)):
            return f"{where}: expected one of {_listed(map(str, choices))}"
        wanted = schema.get("type")
        kinds = [wanted] if isinstance(wanted, str) else wanted or []
        fits = _becomes(value, kinds, schema) if lax else _is_kind(value, kinds)
        if kinds and not fits:
            return f"{where}: expected {' or '.join(kinds)}, not {_kind_text(value)}"
        return self._inside(schema, value, where, lax)

    def _inside(self, schema: Any, value: Any, where: str, lax: bool) -> str:
        if isinstance(value, dict) and "properties" in schema:
            return self._object(schema, value, where, lax)
        items, others = schema.get("items"), schema.get("additionalProperties")
        if isinstance(value, list) and isinstance(items, dict):
            return _first(
                self._check(items, one, f"{where}[{n}]", lax) for n, one in enumerate(value)
            )
        if isinstance(value, dict) and isinstance(others, dict):
            return _first(
                self._check(others, one, f"{where}.{name}", lax) for name, one in value.items()
            )
        return ""

    def _object(self, schema: Any, value: dict[str, Any], where: str, lax: bool) -> str:
        known, required = schema["properties"], schema.get("required", ())
        strict = schema.get("additionalProperties") is False
        missing = any(name not in value for name in required)
        wrong = _members(value, known, required, not (strict or missing), where)
        if not wrong and "additionalProperties" not in schema:
            self._note_ignored(value, known, where)
        return wrong or _first(
            self._check(known[n], value[n], f"{where}.{n}", lax) for n in known if n in value
        )

    def _note_ignored(self, value: dict[str, Any], known: dict[str, Any], where: str) -> None:
        for name in value.keys() - known.keys():
            if near := _nearest(name, known.keys() - value.keys()):
                self.ignored.append(f"{where}: the job ignores {name!r}; did you mean {near!r}?")


def _members(
    given: dict[str, Any], known: Iterable[str], required: Iterable[str], rest: bool, where: str
) -> str:
    """Members that are unknown or missing."""
    known = list(known)
    unknown = [] if rest else [name for name in given if name not in known]
    if unknown:
        near = _nearest(unknown[0], known)
        meant = f"did you mean {near!r}?" if near else f"known are {_listed(known)}"
        return f"{where}: {unknown[0]!r} is unknown; {meant}"
    missing = [name for name in required if name not in given]
    verb = "is" if len(missing) == 1 else "are"
    return f"{where}: {_listed(missing)} {verb} missing" if missing else ""


def _nearest(name: str, known: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name, list(known), 1)), "")


def _first(found: Iterable[str]) -> str:
    return next(filter(None, found), "")


def _all_texts(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _is_kind(value: Any, kinds: list[str]) -> bool:
    kind = _kind(value)
    if kind in kinds or (kind == "integer" and "number" in kinds):
        return True
    return kind == "number" and "integer" in kinds and float(value).is_integer()


def _becomes(value: Any, kinds: list[str], schema: dict[str, Any]) -> bool:
    """Whether pydantic accepts a value as one of these kinds, or converts it to one."""
    kind, wanted = _kind(value), _SCALARS & set(kinds)
    if _is_kind(value, kinds):
        return True
    if kind not in _SCALARS or not wanted:
        return False
    if "string" in wanted:
        return "format" in schema  # a time may be a number
    if kind == "string":
        text = str(value).strip().lower()
        return _is_number(text) if wanted - {"boolean"} else text in _BOOLEANS
    return kind == "boolean" or ("boolean" in wanted and value in (0, 1))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}
    return names.get(type(value), "array")


def _kind_text(value: Any) -> str:
    kind = _kind(value)
    return kind if kind == "null" else f"{'an' if kind[0] in 'aio' else 'a'} {kind}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "no members"
