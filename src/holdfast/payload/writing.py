"""Writing: from a value to its JSON.

Guaranteed: what is written can be read again by any JSON reader. NaN and Infinity, half surrogate
pairs, values that contain themselves and pydantic's masked secrets raise an `InvalidPayload` that
says what to send instead. What pydantic made is written by pydantic, everything else by msgspec.

Not checked: that a value is *equal* after its travel. A tuple inside `Any` arrives as a list.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from holdfast.errors import InvalidPayload
from holdfast.payload.refusal import one_line

ENCODABLE = "JSON values, dataclasses, TypedDicts, msgspec Structs or pydantic models"
_MASK = b'"**********"'


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
_SYNTAX = msgspec.json.Decoder(msgspec.Raw)
