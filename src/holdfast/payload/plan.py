"""Plans: the three ways in which a body carries arguments.

Nothing, when the handler takes none; one value, which is the whole body; or an object whose members
are the arguments. The plan is chosen once per handler; the package's opening says which applies.

Guaranteed: `decode` raises `InvalidPayload` and nothing else, for any bytes; `encode` does the same
for values that JSON cannot carry, but does not check types: `Signature.encode` decodes once more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from holdfast.errors import DefinitionError, InvalidPayload, UnknownMember
from holdfast.payload.annotation import may_be_object
from holdfast.payload.reading import Reader, reader_of
from holdfast.payload.refusal import one_line, refused
from holdfast.payload.writing import ENCODABLE, encode

_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ADVICE = f"pass {ENCODABLE}"


class Plan(Protocol):
    """One of the three ways in which a body carries arguments."""

    def encode(self, given: Mapping[str, Any]) -> bytes: ...

    def decode(self, body: bytes) -> dict[str, Any]: ...


def plan_of(name: str, parameters: list[inspect.Parameter], annotations: dict[str, Any]) -> Plan:
    """The plan of a handler; `DefinitionError` for a type that cannot be a payload."""
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
        """Read a bare value, from when the first parameter was the only one.

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
