"""A handler's signature: how its parameters and the body of a message correspond.

A `Signature` is built once per handler; after that it only encodes and decodes. A body carries
arguments in one of three forms, which the package's docstring describes: nothing, one value, or an
object whose members are the arguments.

Guaranteed: `decode` accepts whatever `encode` of the same signature returns, so a wrong call fails
at its caller; `decode` raises `InvalidPayload` and nothing else, for any bytes. Parameters that
cannot be a payload raise `DefinitionError` when the signature is built.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from holdfast.errors import DefinitionError, InvalidPayload, UnknownMember
from holdfast.payload.values import (
    ENCODABLE,
    Reader,
    encode,
    may_be_object,
    one_line,
    reader_of,
    refused,
)
from holdfast.resources import Injected, Resource

_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ADVICE = f"pass {ENCODABLE}"


class Bound(NamedTuple):
    """A decoded payload, ready for the call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Signature:
    """How the parameters of one handler and the body of a message correspond."""

    __slots__ = (
        "_bind",
        "_form",
        "_known",
        "_named",
        "_needed",
        "contexts",
        "defaults",
        "name",
        "parameters",
        "required",
        "resources",
        "rest",
        "returns",
        "types",
    )

    def __init__(self, name: str, parts: _Parts) -> None:
        self.name = name
        self.parameters = tuple(p.name for p in parts.payload)
        """The names of the payload parameters."""
        self.defaults = {p.name: p.default for p in parts.payload if p.default is not p.empty}
        self.contexts = parts.contexts
        """The names of the parameters that receive the context."""
        self.resources = parts.resources
        """The parameters that receive a resource."""
        self.returns = parts.returns
        """The resolved return annotation, for `decode_result`; `Any` when there is none."""
        self.types = parts.types
        """Their resolved annotations."""
        self.required = {p.name for p in parts.payload if p.default is p.empty}
        self.rest = "".join(p.name for p in parts.payload if p.kind is p.VAR_KEYWORD)
        """The name of `**kwargs`, if there is one."""
        self._bind = inspect.Signature(parts.payload)
        self._named = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parts.payload)
        self._known = set(self.parameters)
        self._needed = self.required
        self._form = form_of(name, parts.payload, parts.types)

    @classmethod
    def of(cls, func: Callable[..., Any], injected: tuple[type, ...] = ()) -> Signature:
        """Read a handler's parameters; `DefinitionError` when they cannot be a payload."""
        name = getattr(func, "__qualname__", None) or type(func).__qualname__
        return cls(name, _parts(name, func, injected))

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """The body for a call with these arguments; `InvalidPayload` when they do not fit."""
        given: Mapping[str, Any]
        if self._named and not kwargs and len(self._needed) <= len(args) <= len(self.parameters):
            given = dict(zip(self.parameters, args, strict=False))
        elif self._named and not args and self._needed <= kwargs.keys() <= self._known:
            given = kwargs
        else:  # rarer and slower
            try:
                given = self._bind.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise InvalidPayload(f"{self.name}(): {error}") from None
        body = self._form.encode(given)
        self._form.decode(body)
        return body

    def decode(self, body: bytes) -> Bound:
        """The arguments in a body; `InvalidPayload` when it does not fit."""
        return Bound((), self._form.decode(body))

    def call_kwargs(self, bound: Bound, ctx: object) -> dict[str, Any]:
        """The keyword arguments of the call, with the context filled in."""
        if not self.contexts:
            return bound.kwargs
        return bound.kwargs | dict.fromkeys(self.contexts, ctx)


class _Parts(NamedTuple):
    payload: list[inspect.Parameter]
    types: dict[str, Any]
    contexts: tuple[str, ...]
    resources: dict[str, Resource[Any]]
    returns: Any


def _parts(name: str, func: Callable[..., Any], injected: tuple[type, ...]) -> _Parts:
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError) as error:
        raise DefinitionError(f"{name} has no readable parameters: {error}") from error
    payload, annotations, contexts = [], {}, []
    resources: dict[str, Resource[Any]] = {}
    for parameter in signature.parameters.values():
        _check_kind(name, parameter)
        annotation = _resolve(func, parameter.annotation, name, parameter.name, injected)
        if _is_context(parameter.name, annotation, injected):
            contexts.append(parameter.name)
        elif resource := _resource(parameter, annotation):
            resources[parameter.name] = resource
        else:
            payload.append(parameter)
            annotations[parameter.name] = annotation
    returns = _resolve(func, signature.return_annotation, name, "return", injected)
    returns = Any if returns is signature.empty else returns
    return _Parts(payload, annotations, tuple(contexts), resources, returns)


def _resource(parameter: inspect.Parameter, annotation: Any) -> Resource[Any] | None:
    given = (parameter.default, *getattr(annotation, "__metadata__", ()))
    return next((found for part in given if (found := Injected.of(part))), None)


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
            f"({one_line(str(error))}): define or import it at the top of its module, and not "
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


# ---- the three forms of a body


class BodyForm(Protocol):
    """How a body carries arguments."""

    def encode(self, given: Mapping[str, Any]) -> bytes: ...

    def decode(self, body: bytes) -> dict[str, Any]: ...


def form_of(
    name: str, parameters: list[inspect.Parameter], annotations: dict[str, Any]
) -> BodyForm:
    """The form that a handler takes; `DefinitionError` for a type that cannot be a payload."""
    readers = {p.name: _parameter_reader(name, p.name, annotations[p.name]) for p in parameters}
    rest = "".join(p.name for p in parameters if p.kind is p.VAR_KEYWORD)
    if not parameters:
        return _Nothing()
    if len(parameters) == 1 and not rest:
        only = parameters[0]
        return _One(only, annotations[only.name], readers[only.name])
    return _Several(parameters, readers, rest)


class _Nothing:
    def encode(self, given: Mapping[str, Any]) -> bytes:
        return b""

    def decode(self, body: bytes) -> dict[str, Any]:
        return {}


class _One:
    """The body is the value of the one parameter."""

    def __init__(self, parameter: inspect.Parameter, annotation: Any, reader: Reader) -> None:
        self._name = parameter.name
        self._optional = parameter.default is not parameter.empty
        self._wrappable = not may_be_object(annotation)
        self._reader = reader
        self._read = reader.read

    def encode(self, given: Mapping[str, Any]) -> bytes:
        if self._name not in given:
            return b""
        plain = self._reader.plain if self._reader.prepares else None
        return encode(given[self._name], plain, _ADVICE)

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
            members = None if empty else _members(body)
            if self._wrappable and members is not None:
                if self._optional and members == {}:
                    return {}
                if members.keys() == {self._name}:
                    raw, prefix = members[self._name], self._name
            if members is not None and members.keys() > {self._name}:
                raise _unknown(members.keys() - {self._name}, [self._name])
            return {self._name: self._read(raw)}
        except UnknownMember:
            raise
        except Exception as second:
            if empty:
                raise InvalidPayload(f"payload: empty, but {self._name!r} is needed") from second
            raise refused(second if prefix else error, prefix) from second


class _Several:
    """The body is an object whose members are the arguments."""

    def __init__(
        self, parameters: list[inspect.Parameter], readers: dict[str, Reader], rest: str
    ) -> None:
        named = [p for p in parameters if p.name != rest]
        self._first = named[0].name if named else ""
        self._readers = {p.name: readers[p.name] for p in named}
        self._reads = {name: reader.read for name, reader in self._readers.items()}
        self._needed = {p.name for p in named if p.default is p.empty}
        self._rest = rest
        self._rest_reader = readers.get(rest)
        self._prepared = any(reader.prepares for reader in readers.values())

    def encode(self, given: Mapping[str, Any]) -> bytes:
        members = dict(given)
        if self._rest:
            members |= members.pop(self._rest, {})
        return encode(members, self._plain if self._prepared else None, _ADVICE)

    def _plain(self, members: dict[str, Any]) -> dict[str, Any]:
        return {name: self._reader_of(name).plain(value) for name, value in members.items()}

    def decode(self, body: bytes) -> dict[str, Any]:
        try:
            members = {} if body.strip() in (b"", b"null") else _MEMBERS.decode(body)
        except Exception as error:  # noqa: BLE001 - refused, unless it is of an older version
            return self._decode_alone(body, refused(error, ""))
        if not members.keys() >= self._needed:
            return self._decode_alone(body, self._refusal(members))
        try:
            return {name: self._reads[name](raw) for name, raw in members.items()}
        except Exception:  # noqa: BLE001 - rarer and slower: which one, and why
            return {name: self._read(name, raw) for name, raw in members.items()}

    def _refusal(self, members: Mapping[str, Any]) -> InvalidPayload:
        missing = [n for n in self._readers if n in self._needed - members.keys()]
        text = f"payload: missing {', '.join(map(repr, missing))}"
        if (unknown := members.keys() - self._readers.keys()) and not self._rest:
            return UnknownMember(f"{text}; {one_line(', '.join(map(repr, unknown)))} unknown")
        return InvalidPayload(text)

    def _decode_alone(self, body: bytes, refusal: InvalidPayload) -> dict[str, Any]:
        """Read a bare value, sent when the first parameter was the only one.

        An object counts as one only if the parameter's type does not accept every object.
        """
        if not self._first or not self._needed <= {self._first} or not body.strip():
            raise refusal
        read = self._reads[self._first]
        try:
            if _members(body) is not None and _reads(read, b"{}"):
                raise refusal
            return {self._first: read(body)}
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - the first refusal counts
            raise refusal from None

    def _read(self, name: str, raw: msgspec.Raw) -> Any:
        reader = self._reader_of(name)
        try:
            return reader.read(raw)
        except Exception as error:
            raise refused(error, name) from error

    def _reader_of(self, name: str) -> Reader:
        reader = self._readers.get(name) or self._rest_reader
        if reader is None:
            raise _unknown([name], self._readers)
        return reader


def _unknown(names: Iterable[str], known: Iterable[str]) -> UnknownMember:
    unknown = one_line(", ".join(sorted(map(repr, names))))
    return UnknownMember(f"payload: {unknown} is unknown; known are {', '.join(map(repr, known))}")


def _reads(read: Callable[[bytes], Any], body: bytes) -> bool:
    try:
        read(body)
    except Exception:  # noqa: BLE001 - any refusal means no
        return False
    return True


def _members(body: bytes) -> dict[str, msgspec.Raw] | None:
    try:
        return _MEMBERS.decode(body)
    except msgspec.DecodeError:  # not an object, or not JSON: whoever reads the value says so
        return None


def _parameter_reader(name: str, parameter: str, annotation: Any) -> Reader:
    try:
        return reader_of(annotation)
    except Exception as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise DefinitionError(
            f"{name}(): the type of {parameter!r} cannot be a payload ({one_line(reason)}): "
            f"use {ENCODABLE}, but not Structs and models in one type"
        ) from error
