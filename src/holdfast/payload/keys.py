"""A job's own key: computed from the payload, the same at the sender and at the worker.

    @app.job(key="order_id")                       a parameter, or a member of the only parameter
    @app.job(key="order.id")                       a member of a parameter
    @app.job(key=lambda order: f"{order.id}:ocr")  called with the payload's arguments

Both sides compute it from the decoded body, so that defaults, and numbers written as text, give the
same key on both. An empty text, None, or a value that is neither text, number, date, enum nor UUID
raises `InvalidPayload`.
"""

from __future__ import annotations

import datetime
import difflib
import enum
import typing
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.errors import DefinitionError, InvalidPayload
from holdfast.payload.signature import Bound, Signature
from holdfast.payload.values import pydantic_extras, read_by_pydantic

_PLAIN = (str, int, float, uuid.UUID, datetime.date)


class KeyRule:
    """How one job computes its key."""

    def __init__(self, job: str, rule: str | Callable[..., object], signature: Signature) -> None:
        self._job = job
        self._call = rule if callable(rule) else None
        self._defaults = signature.defaults
        self._path: tuple[str, ...] = ()
        self.published = "*"
        """For senders without the code: the path to a text or whole number, or `*`."""
        if isinstance(rule, str):
            self._path = _path(job, rule, signature)
            self.published = ".".join(self._path) if _is_plain(self._path, signature) else "*"
        elif not callable(rule):
            raise DefinitionError(
                f"job {job!r}: key= takes the name of a parameter, or a function of the payload"
            )

    def of(self, bound: Bound) -> str:
        """The key of a payload."""
        given = {**self._defaults, **bound.kwargs}
        try:
            value = self._call(**given) if self._call else _walk(given, self._path)
        except Exception as error:
            raise InvalidPayload(
                f"the key of job {self._job!r} cannot be computed: {type(error).__name__}: {error}"
            ) from error
        if isinstance(value, enum.Enum):
            value = value.value
        if value == "" or isinstance(value, bool) or not isinstance(value, _PLAIN):
            what = "empty" if value == "" or value is None else f"of type {type(value).__name__}"
            raise InvalidPayload(f"the key of job {self._job!r} is {what}: it must be a text")
        return str(value)


def _walk(given: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = given
    for name in path:
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value


def _path(job: str, rule: str, signature: Signature) -> tuple[str, ...]:
    """The names that lead to the key; the first one is a parameter."""
    path = tuple(rule.split("."))
    known = list(signature.parameters)
    if path[0] in known:
        _check_member(job, path[1:], signature.types[path[0]])
        return path
    if len(known) == 1:
        _check_member(job, path, signature.types[known[0]])
        return (known[0], *path)
    raise _unknown(job, path[0], known)


def _is_plain(path: tuple[str, ...], signature: Signature) -> bool:
    """Whether the key is a text or whole number, which is the same in JSON."""
    found = signature.types[path[0]]
    if read_by_pydantic(found) and pydantic_extras(found)[1]:
        return False
    for name in path[1:]:
        found = typing.get_type_hints(found).get(name) if isinstance(found, type) else None
    return found in (str, int)


def _check_member(job: str, path: tuple[str, ...], annotation: Any) -> None:
    """Refuse a member that the type does not have, if its members are known."""
    if not path or not isinstance(annotation, type):
        return
    fields = getattr(annotation, "model_fields", None) or getattr(
        annotation, "__dataclass_fields__", None
    )
    members = list(fields or typing.get_type_hints(annotation))
    if members and path[0] not in members and not hasattr(annotation, path[0]):
        raise _unknown(job, path[0], members)


def _unknown(job: str, name: str, known: list[str]) -> DefinitionError:
    near = difflib.get_close_matches(name, known, 1)
    advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known) or 'none'}"
    return DefinitionError(f"job {job!r}: key={name!r} names no parameter: {advice}")
