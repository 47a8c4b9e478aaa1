"""Annotations: what a handler's type is made of, and what follows from that.

Pure questions about types; values are never looked at. Names in texts that cannot be resolved raise
what `typing` raises, and the caller says whose annotation it was.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec


def parts_of(annotation: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """An annotation and everything it is made of, down to the members of its classes."""
    if id(annotation) in seen:
        return
    seen[id(annotation)] = annotation  # kept alive, or its id could come back as another's
    yield annotation
    yield from getattr(annotation, "__metadata__", ())
    inner = [*typing.get_args(annotation), _aliased(annotation)]
    origin = typing.get_origin(annotation) or annotation
    if _has_members(origin) and not is_pydantic(origin):
        inner += typing.get_type_hints(origin, include_extras=True).values()
    for part in inner:
        yield from parts_of(part, seen)


def is_pydantic(part: Any) -> bool:
    """Whether a part of an annotation is pydantic's, so that only pydantic can read it."""
    kind = part if isinstance(part, type) else type(part)
    if hasattr(kind, "__pydantic_core_schema__") or hasattr(kind, "__get_pydantic_core_schema__"):
        return True
    return kind.__module__.partition(".")[0] in ("pydantic", "annotated_types")


def may_be_object(annotation: Any) -> bool:
    """Whether a value of this annotation is, or may be, a JSON object."""
    if annotation in (Any, object, inspect.Parameter.empty) or isinstance(annotation, TypeVar):
        return True
    if (aliased := _aliased(annotation)) is not None:
        return may_be_object(aliased)
    origin = typing.get_origin(annotation) or annotation
    if origin is typing.Annotated:
        return may_be_object(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return any(may_be_object(part) for part in typing.get_args(annotation))
    return isinstance(origin, type) and (
        issubclass(origin, (Mapping, msgspec.Struct))
        or typing.is_typeddict(origin)
        or dataclasses.is_dataclass(origin)
        or hasattr(origin, "__pydantic_validator__")
    )


def _aliased(annotation: Any) -> Any:
    """What a `NewType` or a `type X = …` stands for, or None."""
    if isinstance(annotation, type):
        return None
    return getattr(annotation, "__supertype__", None) or getattr(annotation, "__value__", None)


def _has_members(origin: Any) -> bool:
    return isinstance(origin, type) and (
        dataclasses.is_dataclass(origin)
        or typing.is_typeddict(origin)
        or issubclass(origin, msgspec.Struct)
        or (issubclass(origin, tuple) and hasattr(origin, "_fields"))
    )
