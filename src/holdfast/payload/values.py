"""One value as JSON: reading it as the type of an annotation, writing it, and refusing it.

Reading checks types strictly with msgspec ("5" is not an int) and treats `object` like `Any`.
pydantic is imported, and its rules apply, only for annotations that contain something of pydantic.
Values that pydantic made are written by pydantic, all others by msgspec.

Guaranteed: any JSON reader can read what is written. NaN and Infinity are refused in both
directions; half surrogate pairs, values that contain themselves and pydantic's masked secrets raise
`InvalidPayload`, which says what to send instead. The message of a refusal is one line of limited
length, names the member and never repeats its value. A `MemoryError` is about the machine, not the
payload, and passes through.

Not checked: that a value is *equal* after the round trip. A tuple inside `Any` arrives as a list.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from holdfast.errors import InvalidPayload

ENCODABLE = "JSON values, dataclasses, TypedDicts, msgspec Structs or pydantic models"
_MASK = b'"**********"'
"""How pydantic writes a secret."""
_LONGEST_MESSAGE = 300
"""Characters: a validator's message may quote a whole value."""

_ANY = msgspec.json.Decoder(Any)
_SYNTAX = msgspec.json.Decoder(msgspec.Raw)


# ---- reading


class Reader(Protocol):
    """Reads and writes values of one annotation."""

    prepares: bool
    """Whether `plain` changes a value before it is written."""

    def read(self, body: bytes | msgspec.Raw) -> Any: ...

    def plain(self, value: Any) -> Any: ...


def reader_of(annotation: Any) -> Reader:
    """The reader of an annotation; raises whatever msgspec or pydantic say against it."""
    if annotation is object or annotation is inspect.Parameter.empty:
        annotation = Any
    if read_by_pydantic(annotation):
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


# ---- writing


def encode_value(value: object) -> bytes:
    """Any value as a JSON body, for the data of an event."""
    return encode(value, _own, f"send {ENCODABLE}")


def encode_result(value: object) -> bytes:
    """What a handler returned, as JSON."""
    return encode(value, _own, f"return None, {ENCODABLE}")


def encode(value: Any, plain: Callable[[Any], Any] | None, advice: str) -> bytes:
    """A value as JSON; `plain` prepares it, `advice` ends the message of a refusal."""
    try:
        body = _ENCODER.encode(plain(value) if plain else value)
    except MemoryError:
        raise
    except RecursionError:
        raise InvalidPayload("the value is nested too deeply, or contains itself") from None
    except UnicodeEncodeError:
        raise InvalidPayload("a text has half a surrogate pair: UTF-8 cannot carry it") from None
    except Exception as error:
        raise InvalidPayload(f"not possible as JSON: {one_line(str(error))}; {advice}") from error
    _check_readable(body)
    if b"null" in body and any(map(_is_endless, _inside(value))):
        raise InvalidPayload("NaN and Infinity do not exist in JSON: send None or a text instead")
    if _MASK in body and any(map(_is_secret, _inside(value))):
        raise InvalidPayload(
            "a pydantic secret would be sent as asterisks: send the name under which the receiver "
            "finds it, or give its field a serializer"
        )
    return body


def _check_readable(body: bytes) -> None:
    """A `msgspec.Raw` inside a value is written as it is, whatever it is."""
    try:
        _SYNTAX.decode(body)
        if not body.isascii():
            body.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidPayload(f"what was written is not JSON: {one_line(str(error))}") from None


def _own(value: Any) -> Any:
    """A top-level value: pydantic writes what it made, msgspec everything else."""
    return _foreign(value) if _dumps_itself(value) else value


def _foreign(value: Any) -> Any:
    """A value that msgspec does not know."""
    if _dumps_itself(value) or type(value).__module__.partition(".")[0] == "pydantic":
        from pydantic_core import to_jsonable_python

        return to_jsonable_python(value, by_alias=True)
    raise TypeError(f"objects of type {type(value).__qualname__} are not supported")


def _dumps_itself(value: object) -> bool:
    return hasattr(type(value), "__pydantic_serializer__")


def _is_endless(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _is_secret(value: object) -> bool:
    return hasattr(type(value), "get_secret_value")


def _inside(value: Any) -> Iterator[Any]:
    """A value that was encoded before (so it cannot contain itself) and every value inside it."""
    rest = [value]
    while rest:
        value = rest.pop()
        yield value
        if isinstance(value, Mapping):
            rest += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            rest += value
        elif isinstance(value, msgspec.Struct):
            rest += (getattr(value, name) for name in value.__struct_fields__)
        elif dataclasses.is_dataclass(value):
            rest += (getattr(value, field.name, None) for field in dataclasses.fields(value))
        elif _dumps_itself(value):
            rest += (getattr(value, "__dict__", None), getattr(value, "__pydantic_extra__", None))


_ENCODER = msgspec.json.Encoder(enc_hook=_foreign)


# ---- annotations


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


def read_by_pydantic(annotation: Any) -> bool:
    """Whether an annotation contains something that only pydantic can read."""
    return any(is_pydantic(part) for part in parts_of(annotation, {}))


_BEFORE = frozenset({"function-before", "function-wrap", "function-plain"})
_NAMES = frozenset({"populate_by_name", "validate_by_name", "coerce_numbers_to_str", "missing"})
_CHANGED = frozenset({"str_strip_whitespace", "str_to_lower", "str_to_upper"})
_CHANGED_TEXT = frozenset({"strip_whitespace", "to_lower", "to_upper"})


def pydantic_extras(annotation: Any) -> tuple[bool, bool]:
    """Whether pydantic accepts more for this type than its JSON Schema says (validators that run
    first, aliases), and whether it may change an accepted value."""
    from pydantic import TypeAdapter

    takes_more = changes = False
    rest: list[Any] = [TypeAdapter(annotation).core_schema]
    while rest:
        node = rest.pop()
        if isinstance(node, dict):
            kind = node.get("type")
            takes_more |= kind in _BEFORE or any(node.get(name) for name in _NAMES)
            takes_more |= isinstance(node.get("validation_alias"), list)
            changes |= kind == "function-after" or any(node.get(n) for n in _CHANGED)
            changes |= kind == "str" and any(node.get(n) for n in _CHANGED_TEXT)
            rest += (v for k, v in node.items() if k not in ("serialization", "metadata"))
        elif isinstance(node, (list, tuple)):
            rest += node
    return takes_more, takes_more or changes


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


# ---- refusing


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
