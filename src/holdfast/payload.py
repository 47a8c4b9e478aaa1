"""Payloads: the bytes of a message on one side, the arguments of a handler on the other.

A `Signature` is built once per handler and then only encodes and decodes.

* No payload parameter: the body is ignored, whatever it is.
* One: the body *is* its value. A parameter that is not an object (a number, a text, a list …) also
  takes `{"<its name>": value}`, so that `{"n": 5}` works for `def f(n: int)`.
* Several, or `**kwargs`: the body is a JSON object and its members are the arguments. Defaults
  count; a member that is no parameter is refused unless there is `**kwargs`.

Parameters annotated with a context class, or called `ctx` without an annotation, are never part of
the payload. An empty body means "no arguments" and stands for null where a value is needed.

Guaranteed: what `encode` returns, `decode` of the same signature accepts, so a wrong call fails at
its caller; and `decode` raises `InvalidPayload` and nothing else, for any bytes (a `MemoryError`
speaks of the machine, not of the payload, and passes through). Messages are one line, name the
member, and never repeat its value.

JSON as it is read and written here: NaN and Infinity are refused in both directions; numbers,
dates, UUIDs and enums as keys become texts, other keys are refused; of a member that occurs twice
the last one counts; datetime, UUID, Decimal, Enum, bytes (base64) travel as msgspec writes them.
Types are checked strictly by msgspec ("5" is no int). pydantic is imported, and its own rules
apply, only for an annotation that has something of pydantic in it.

Not checked: that a value is *equal* after its travel. A tuple inside `Any` arrives as a list.
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
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from holdfast.errors import DefinitionError, InvalidPayload

_LONGEST_MESSAGE = 300
_MASK = b'"**********"'
_ENCODABLE = "JSON values, dataclasses, TypedDicts, msgspec Structs or pydantic models"


class Bound(NamedTuple):
    """A decoded payload, ready for the call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Signature:
    """How the parameters of one handler and the body of a message correspond."""

    __slots__ = ("_bind", "_plan", "contexts", "name", "parameters", "returns")

    def __init__(self, name: str, parts: _Parts) -> None:
        self.name = name
        self.parameters = tuple(p.name for p in parts.payload)
        """The names of the payload parameters."""
        self.contexts = parts.contexts
        """The names of the parameters that receive the context."""
        self.returns = parts.returns
        """The resolved return annotation, for `decode_result`; `Any` when there is none."""
        self._bind = inspect.Signature(parts.payload)
        self._plan = _plan(name, parts.payload, parts.types)

    @classmethod
    def of(cls, func: Callable[..., Any], injected: tuple[type, ...] = ()) -> Signature:
        """Read a handler's parameters; `DefinitionError` when they cannot be a payload."""
        name = getattr(func, "__qualname__", None) or type(func).__qualname__
        return cls(name, _parts(name, func, injected))

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """The body for a call with these arguments; `InvalidPayload` when they do not fit."""
        try:
            given = self._bind.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise InvalidPayload(f"{self.name}(): {error}") from None
        body = self._plan.encode(given)
        self._plan.decode(body)
        return body

    def decode(self, body: bytes) -> Bound:
        """The arguments in a body; `InvalidPayload` when it does not fit."""
        return Bound((), self._plan.decode(body))

    def call_kwargs(self, bound: Bound, ctx: object) -> dict[str, Any]:
        """The keyword arguments of the call, with the context filled in."""
        if not self.contexts:
            return bound.kwargs
        return bound.kwargs | dict.fromkeys(self.contexts, ctx)


def encode_value(value: object) -> bytes:
    """Any value as a JSON body, for the data of an event."""
    return _encode(value, _own, f"send {_ENCODABLE}")


def encode_result(value: object) -> bytes:
    """What a handler returned, as JSON."""
    return _encode(value, _own, f"return None, {_ENCODABLE}")


def decode_result(body: bytes, type: Any = Any) -> Any:
    """A stored result as the type that the handler's annotation promises."""
    try:
        return _cached_reader(type).read(body or b"null")
    except Exception as error:
        raise _refused(error, "", "result") from error


# -- one value ---------------------------------------------------------------------------------


class _Reader(Protocol):
    """Reads and writes values of one annotation."""

    def read(self, body: bytes | msgspec.Raw) -> Any: ...

    def plain(self, value: Any) -> Any: ...


class _MsgspecReader:
    def __init__(self, annotation: Any) -> None:
        try:
            msgspec.json.schema(annotation)  # the decoder itself would take any class
        except TypeError as error:
            raise TypeError(str(error).splitlines()[-1]) from error
        self.read = msgspec.json.Decoder(annotation).decode

    def plain(self, value: Any) -> Any:
        return value


class _PydanticReader:
    def __init__(self, annotation: Any) -> None:
        from pydantic import TypeAdapter

        self._adapter = TypeAdapter(annotation)
        self._adapter.rebuild(raise_errors=True)

    def read(self, body: bytes | msgspec.Raw) -> Any:
        _ANY.decode(body)  # pydantic's own parser lets NaN and 1e999 through
        return self._adapter.validate_json(bytes(body))

    def plain(self, value: Any) -> Any:
        return self._adapter.dump_python(value, mode="json", by_alias=True, warnings=False)


def _reader(annotation: Any) -> _Reader:
    """The reader of an annotation; raises whatever msgspec or pydantic say against it."""
    if annotation is object or annotation is inspect.Parameter.empty:
        annotation = Any
    if any(_is_pydantic(part) for part in _walk(annotation, {})):
        return _PydanticReader(annotation)
    return _MsgspecReader(annotation)


@functools.lru_cache(maxsize=1024)
def _hashed_reader(annotation: Any) -> _Reader:
    return _reader(annotation)


def _cached_reader(annotation: Any) -> _Reader:
    try:
        hash(annotation)
    except TypeError:
        return _reader(annotation)
    return _hashed_reader(annotation)


def _walk(annotation: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """An annotation and everything it is made of, down to the members of its classes."""
    if id(annotation) in seen:
        return
    seen[id(annotation)] = annotation  # kept alive, or its id could come back as another's
    yield annotation
    yield from getattr(annotation, "__metadata__", ())
    inner = [*typing.get_args(annotation), _aliased(annotation)]
    origin = typing.get_origin(annotation) or annotation
    if _has_members(origin) and not _is_pydantic(origin):
        inner += typing.get_type_hints(origin, include_extras=True).values()
    for part in inner:
        yield from _walk(part, seen)


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


def _is_pydantic(part: Any) -> bool:
    kind = part if isinstance(part, type) else type(part)
    if hasattr(kind, "__pydantic_core_schema__") or hasattr(kind, "__get_pydantic_core_schema__"):
        return True
    return kind.__module__.partition(".")[0] in ("pydantic", "annotated_types")


def _is_object(annotation: Any) -> bool:
    """Whether a value of this annotation is, or may be, a JSON object."""
    if annotation in (Any, object, inspect.Parameter.empty) or isinstance(annotation, TypeVar):
        return True
    if (aliased := _aliased(annotation)) is not None:
        return _is_object(aliased)
    origin = typing.get_origin(annotation) or annotation
    if origin is typing.Annotated:
        return _is_object(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return any(_is_object(part) for part in typing.get_args(annotation))
    return isinstance(origin, type) and (
        issubclass(origin, (Mapping, msgspec.Struct))
        or typing.is_typeddict(origin)
        or dataclasses.is_dataclass(origin)
        or hasattr(origin, "__pydantic_validator__")
    )


# -- writing -----------------------------------------------------------------------------------


def _encode(value: Any, plain: Callable[[Any], Any], advice: str) -> bytes:
    try:
        body = _ENCODER.encode(plain(value))
    except MemoryError:
        raise
    except RecursionError:
        raise InvalidPayload("the value is nested too deeply, or contains itself") from None
    except UnicodeEncodeError:
        raise InvalidPayload("a text has half a surrogate pair: UTF-8 cannot carry it") from None
    except Exception as error:
        raise InvalidPayload(f"not possible as JSON: {_one_line(str(error))}; {advice}") from error
    if b"null" in body and any(map(_is_endless, _inside(value))):
        raise InvalidPayload("NaN and Infinity do not exist in JSON: send None or a text instead")
    if _MASK in body and any(map(_is_secret, _inside(value))):
        raise InvalidPayload(
            "a pydantic secret would be sent as asterisks: send the name under which the receiver "
            "finds it, or give its field a serializer"
        )
    return body


def _own(value: Any) -> Any:
    """A value at the top: what pydantic made is written by pydantic, the rest by msgspec."""
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
_ANY = msgspec.json.Decoder(Any)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


# -- the three plans ---------------------------------------------------------------------------


class _Plan(Protocol):
    """One of the three ways in which a body carries arguments."""

    def encode(self, given: Mapping[str, Any]) -> bytes: ...

    def decode(self, body: bytes) -> dict[str, Any]: ...


class _Nothing:
    def encode(self, given: Mapping[str, Any]) -> bytes:
        return b""

    def decode(self, body: bytes) -> dict[str, Any]:
        return {}


class _One:
    """The body is the value of the one parameter."""

    def __init__(self, parameter: inspect.Parameter, annotation: Any, reader: _Reader) -> None:
        self._name = parameter.name
        self._optional = parameter.default is not parameter.empty
        self._wrappable = not _is_object(annotation)
        self._reader = reader
        self._read = reader.read

    def encode(self, given: Mapping[str, Any]) -> bytes:
        if self._name not in given:
            return b""
        return _encode(given[self._name], self._reader.plain, f"pass {_ENCODABLE}")

    def decode(self, body: bytes) -> dict[str, Any]:
        try:
            return {self._name: self._read(body)}
        except Exception as error:  # noqa: BLE001 - looked at again, and refused at last
            return self._decode_again(body, error)

    def _decode_again(self, body: bytes, error: Exception) -> dict[str, Any]:
        """The forms that are not simply the value; the first error counts when none fits."""
        empty = not body.strip()
        if self._optional and empty:
            return {}
        raw: bytes | msgspec.Raw = b"null" if empty else body
        prefix = ""
        try:
            if self._wrappable and not empty:
                members = _members(body)
                if self._optional and members == {}:
                    return {}
                if members is not None and members.keys() == {self._name}:
                    raw, prefix = members[self._name], self._name
            return {self._name: self._read(raw)}
        except Exception as second:
            if empty:
                raise InvalidPayload(f"payload: empty, but {self._name!r} is needed") from second
            raise _refused(second if prefix else error, prefix) from second


class _Several:
    """The body is an object whose members are the arguments."""

    def __init__(
        self, parameters: list[inspect.Parameter], readers: dict[str, _Reader], rest: str
    ) -> None:
        named = [p for p in parameters if p.name != rest]
        self._readers = {p.name: readers[p.name] for p in named}
        self._needed = [p.name for p in named if p.default is p.empty]
        self._rest = rest
        self._rest_reader = readers.get(rest)

    def encode(self, given: Mapping[str, Any]) -> bytes:
        members = {k: v for k, v in given.items() if k != self._rest} | given.get(self._rest, {})
        return _encode(members, self._plain, f"pass {_ENCODABLE}")

    def _plain(self, members: dict[str, Any]) -> dict[str, Any]:
        return {name: self._reader_of(name).plain(value) for name, value in members.items()}

    def decode(self, body: bytes) -> dict[str, Any]:
        try:
            members = {} if body.strip() in (b"", b"null") else _MEMBERS.decode(body)
        except Exception as error:
            raise _refused(error, "") from error
        missing = [repr(name) for name in self._needed if name not in members]
        if missing:
            raise InvalidPayload(f"payload: missing {', '.join(missing)}")
        return {name: self._read(name, raw) for name, raw in members.items()}

    def _read(self, name: str, raw: msgspec.Raw) -> Any:
        reader = self._reader_of(name)
        try:
            return reader.read(raw)
        except Exception as error:
            raise _refused(error, name) from error

    def _reader_of(self, name: str) -> _Reader:
        reader = self._readers.get(name) or self._rest_reader
        if reader is None:
            known = ", ".join(repr(n) for n in self._readers)
            raise InvalidPayload(f"payload: {_one_line(repr(name))} is unknown; known are {known}")
        return reader


def _plan(name: str, parameters: list[inspect.Parameter], annotations: dict[str, Any]) -> _Plan:
    readers = {p.name: _parameter_reader(name, p.name, annotations[p.name]) for p in parameters}
    rest = "".join(p.name for p in parameters if p.kind is p.VAR_KEYWORD)
    if not parameters:
        return _Nothing()
    if len(parameters) == 1 and not rest:
        only = parameters[0]
        return _One(only, annotations[only.name], readers[only.name])
    return _Several(parameters, readers, rest)


def _members(body: bytes) -> dict[str, msgspec.Raw] | None:
    try:
        return _MEMBERS.decode(body)
    except msgspec.ValidationError:
        return None


# -- messages ----------------------------------------------------------------------------------


def _refused(error: Exception, prefix: str, what: str = "payload") -> InvalidPayload:
    """The one-line refusal that an error of msgspec, pydantic or a user's validator becomes."""
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, RecursionError):
        return InvalidPayload(f"{what}: nested too deeply")
    if isinstance(error, UnicodeError):
        return InvalidPayload(f"{what}: not UTF-8 text")
    if isinstance(error, msgspec.DecodeError) and not isinstance(error, msgspec.ValidationError):
        return InvalidPayload(f"{what}: not JSON ({_one_line(str(error))})")
    path, text = _facts(error)
    member = ".".join(part for part in (prefix, path) if part).replace(".[", "[")
    where = f"{what} member {_one_line(repr(member))}" if member else what
    return InvalidPayload(f"{where}: {_one_line(text)}")


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


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _one_line(text: str) -> str:
    line = re.sub(r"\s+", " ", text).strip().encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= _LONGEST_MESSAGE else line[: _LONGEST_MESSAGE - 3] + "..."


# -- definition --------------------------------------------------------------------------------


class _Parts(NamedTuple):
    payload: list[inspect.Parameter]
    types: dict[str, Any]
    contexts: tuple[str, ...]
    returns: Any


def _parts(name: str, func: Callable[..., Any], injected: tuple[type, ...]) -> _Parts:
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError) as error:
        raise DefinitionError(f"{name} has no readable parameters: {error}") from error
    payload, annotations, contexts = [], {}, []
    for parameter in signature.parameters.values():
        _check_kind(name, parameter)
        annotation = _resolve(func, parameter.annotation, name, parameter.name, injected)
        if _is_context(parameter.name, annotation, injected):
            contexts.append(parameter.name)
        else:
            payload.append(parameter)
            annotations[parameter.name] = annotation
    returns = _resolve(func, signature.return_annotation, name, "return", injected)
    returns = Any if returns is signature.empty else returns
    return _Parts(payload, annotations, tuple(contexts), returns)


def _check_kind(name: str, parameter: inspect.Parameter) -> None:
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise DefinitionError(
            f"{name}(): {parameter.name!r} is positional-only, and payloads have names: remove '/'"
        )
    if parameter.kind is parameter.VAR_POSITIONAL:
        raise DefinitionError(
            f"{name}(): '*{parameter.name}' cannot be in a payload: take one list parameter instead"
        )


def _resolve(
    func: Callable[..., Any], annotation: Any, name: str, parameter: str, injected: tuple[type, ...]
) -> Any:
    """An annotation with every text in it replaced by what the text names."""
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, _globals(func), include_extras=True)["it"]
    except Exception as error:
        written = annotation.strip("'\"").rpartition(".")[2] if isinstance(annotation, str) else ""
        for context in injected:  # imported under TYPE_CHECKING only
            if written == context.__name__:
                return context
        raise DefinitionError(
            f"{name}(): annotation {annotation!r} of {parameter!r} cannot be resolved "
            f"({_one_line(str(error))}): define or import it at the top of its module, and not "
            "under TYPE_CHECKING"
        ) from error


def _globals(func: Callable[..., Any]) -> dict[str, Any]:
    inner: Any = inspect.unwrap(func)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    if not hasattr(inner, "__globals__"):
        inner = inspect.unwrap(getattr(inner, "__func__", None) or type(inner).__call__)
    found: dict[str, Any] = getattr(inner, "__globals__", {})
    return found


def _is_context(name: str, annotation: Any, injected: tuple[type, ...]) -> bool:
    if annotation is inspect.Parameter.empty:
        return name == "ctx"
    origin = typing.get_origin(annotation) or annotation
    if origin is typing.Annotated or origin in (typing.Union, types.UnionType):
        parts = typing.get_args(annotation)
        return any(_is_context("", part, injected) for part in parts)
    return isinstance(origin, type) and issubclass(origin, injected)


def _parameter_reader(name: str, parameter: str, annotation: Any) -> _Reader:
    try:
        return _reader(annotation)
    except Exception as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise DefinitionError(
            f"{name}(): the type of {parameter!r} cannot be a payload ({_one_line(reason)}): "
            f"use {_ENCODABLE}, but not Structs and models in one type"
        ) from error
