"""The form to run a job, made from what its workers have published about its parameters.

Each parameter is a field: a choice, a number, a text, or JSON if its type is composite. A field
that is left empty is not sent if the parameter has a default, which is shown in its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.errors import InvalidInput
from holdfast.payload.published import Published

PREFIX: Final = "p."
"""Prefix of field names: a parameter may have the name of another field of the form."""
DEEPEST: Final = 5
"""Most references that are followed to find a type."""
_KINDS: Final = {"integer": "integer", "number": "number", "boolean": "boolean", "string": "text"}


class Field(NamedTuple):
    """One parameter."""

    name: str
    kind: str
    """`integer`, `number`, `boolean`, `text`, `choice` or `json`."""
    required: bool
    nullable: bool
    choices: tuple[str, ...] = ()
    default: str = ""
    """The default that is used if it is left empty, as text."""
    value: str = ""
    """The text that was entered."""


def fields_of(job: Published | None, given: Mapping[str, str] | None = None) -> list[Field]:
    """The fields for a job; none if its parameters are unknown or of any name."""
    if job is None or job.rest or not job.parameters:
        return []
    given = given or {}
    return [_field(job, name, given.get(PREFIX + name, "")) for name in job.parameters]


def _field(job: Published, name: str, value: str) -> Field:
    schema, nullable = _plain(job.schemas.get(name), job.types)
    choices = tuple(str(one) for one in schema.get("enum", ()) if isinstance(one, str))
    kind = "choice" if choices and len(choices) == len(schema["enum"]) else ""
    kind = kind or _KINDS.get(str(schema.get("type")), "json")
    default = json.dumps(job.defaults[name]) if name in job.defaults else ""
    return Field(name, kind, name in job.required, nullable, choices, default, value)


def _plain(schema: Any, types: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """A schema without references and without null, and whether it allows null."""
    nullable = False
    for _ in range(DEEPEST):
        if not isinstance(schema, dict):
            return {}, nullable
        options = schema.get("anyOf") or schema.get("oneOf")
        if ref := schema.get("$ref"):
            schema = types.get(str(ref).rpartition("/")[2])
        elif isinstance(options, list):
            others = [o for o in options if not (isinstance(o, dict) and o.get("type") == "null")]
            nullable = nullable or len(others) < len(options)
            if len(others) != 1:
                return {}, nullable
            schema = others[0]
        else:
            return schema, nullable
    return {}, nullable


def payload(job: Published, given: Mapping[str, str]) -> bytes:
    """The payload of a filled-in form; `InvalidInput` names the field that is wrong."""
    members = {}
    for field in fields_of(job, given):
        value = _value(field)
        if value is not msgspec.UNSET:
            members[field.name] = value
    if len(job.parameters) == 1:
        return json.dumps(members[job.parameters[0]]).encode() if members else b""
    return json.dumps(members).encode()


def _value(field: Field) -> Any:
    text = field.value.strip()
    if not text and not (field.required and field.kind == "text" and not field.nullable):
        if not field.required:
            return msgspec.UNSET
        if field.nullable:
            return None
        raise InvalidInput(f"{field.name} is needed")
    if field.kind in ("text", "choice"):
        return field.value
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        wanted = "JSON" if field.kind == "json" else f"a value of type {field.kind}"
        raise InvalidInput(f"{field.name}: expected {wanted}, not {text[:100]!r}") from None
    if field.kind == "integer" and (isinstance(value, bool) or not isinstance(value, int)):
        raise InvalidInput(f"{field.name}: expected a whole number, not {text[:100]!r}")
    return value
