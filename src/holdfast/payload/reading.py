"""Readers: from the JSON of one value to the type that its annotation promises.

Types are checked strictly by msgspec ("5" is no int), and `object` is read like `Any`. pydantic is
imported, and its own rules apply, only for an annotation that has something of pydantic in it.

Guaranteed: NaN and Infinity are refused by both. A reader raises whatever msgspec, pydantic or a
user's validator raise: `refusal` makes one line of it. `decode_result` raises `InvalidPayload`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Protocol

import msgspec

from holdfast.payload.annotation import is_pydantic, parts_of
from holdfast.payload.refusal import refused

_ANY = msgspec.json.Decoder(Any)


class Reader(Protocol):
    """Reads and writes values of one annotation."""

    prepares: bool
    """Whether `plain` does anything to a value before it is written."""

    def read(self, body: bytes | msgspec.Raw) -> Any: ...

    def plain(self, value: Any) -> Any: ...


def reader_of(annotation: Any) -> Reader:
    """The reader of an annotation; raises whatever msgspec or pydantic say against it."""
    if annotation is object or annotation is inspect.Parameter.empty:
        annotation = Any
    if any(is_pydantic(part) for part in parts_of(annotation, {})):
        return _PydanticReader(annotation)
    return _MsgspecReader(annotation)


def decode_result(body: bytes, type: Any = Any) -> Any:
    """A stored result as the type that the handler's annotation promises."""
    try:
        return _cached_reader(type).read(body or b"null")
    except Exception as error:
        raise refused(error, "", "result") from error


class _MsgspecReader:
    prepares = False

    def __init__(self, annotation: Any) -> None:
        try:
            # the decoder itself would take any class
            msgspec.json.schema(annotation, schema_hook=_schema_of_object)
        except TypeError as error:
            raise TypeError(str(error).splitlines()[-1]) from error
        self.read = msgspec.json.Decoder(annotation).decode

    def plain(self, value: Any) -> Any:
        return value


def _schema_of_object(kind: type) -> dict[str, Any]:
    """`object`, wherever it stands in an annotation, takes every value; no other class does."""
    if kind is object:
        return {"title": "any value"}
    raise NotImplementedError


class _PydanticReader:
    prepares = True

    def __init__(self, annotation: Any) -> None:
        from pydantic import TypeAdapter

        self._adapter = TypeAdapter(annotation)
        self._adapter.rebuild(raise_errors=True)

    def read(self, body: bytes | msgspec.Raw) -> Any:
        _ANY.decode(body)  # pydantic's own parser lets NaN and 1e999 through
        return self._adapter.validate_json(bytes(body))

    def plain(self, value: Any) -> Any:
        return self._adapter.dump_python(value, mode="json", by_alias=True, warnings=False)


@functools.lru_cache(maxsize=1024)
def _hashed_reader(annotation: Any) -> Reader:
    return reader_of(annotation)


def _cached_reader(annotation: Any) -> Reader:
    try:
        hash(annotation)
    except TypeError:
        return reader_of(annotation)
    return _hashed_reader(annotation)
