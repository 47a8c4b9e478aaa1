"""The signature of a handler: which of its parameters are payload, and which receive the context.

Built once per handler; after that it only encodes and decodes.

Guaranteed: what `encode` returns, `decode` of the same signature accepts, so a wrong call fails at
its caller. Parameters that cannot be a payload raise `DefinitionError` when the signature is built;
values that do not fit raise `InvalidPayload`.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from holdfast.errors import DefinitionError, InvalidPayload
from holdfast.payload.plan import plan_of
from holdfast.payload.refusal import one_line


class Bound(NamedTuple):
    """A decoded payload, ready for the call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Signature:
    """How the parameters of one handler and the body of a message correspond."""

    __slots__ = (
        "_bind",
        "_known",
        "_named",
        "_needed",
        "_plan",
        "contexts",
        "name",
        "parameters",
        "returns",
    )

    def __init__(self, name: str, parts: _Parts) -> None:
        self.name = name
        self.parameters = tuple(p.name for p in parts.payload)
        """The names of the payload parameters."""
        self.contexts = parts.contexts
        """The names of the parameters that receive the context."""
        self.returns = parts.returns
        """The resolved return annotation, for `decode_result`; `Any` when there is none."""
        self._bind = inspect.Signature(parts.payload)
        self._named = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parts.payload)
        self._known = set(self.parameters)
        self._needed = {p.name for p in parts.payload if p.default is p.empty}
        self._plan = plan_of(name, parts.payload, parts.types)

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
