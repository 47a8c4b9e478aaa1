"""Decoding bytes that somebody else wrote: every record and message on the wire passes here.

`Codec(T).decode` gives a T or raises `Unreadable`, whatever the bytes are: not UTF-8, nested a
hundred thousand deep, of the wrong types, too large, with impossible numbers. It raises nothing
else. What it returns is safe to use: names are single tokens of a subject, instants can be shown as
dates, headers are one line each and not reserved, nested values can be walked recursively.

It does not check rules of the domain: whether a cron expression has a next instant, or liveness
values fit together, is decided by the code that uses the record. States are open: a newer version
may write one that is unknown here, so a state is any text, and the model says what an unknown one
means.

Unknown members are ignored, and members that are missing have defaults, so that two versions can
run side by side. What readers do with a record that cannot be read: `holdfast.broker.unreadable`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
from msgspec import Meta

from holdfast.errors import Unreadable

T = TypeVar("T")

LARGEST_BYTES: Final = 8 * 1024 * 1024
"""Bytes of one record: eight times what a server accepts by default. A limit, because decoding
multiplies the size."""
DEEPEST: Final = 128
"""Levels of nesting: a recursive function with three frames for each stays under Python's limit of
a thousand, on top of the frames of a web request."""
LATEST: Final = 32_503_680_000.0
"""The year 3000. Sums and differences of two instants are still dates that `datetime` can show."""
LONGEST_SECONDS: Final = 1e9
"""Thirty years, longer than anything waits."""
MOST: Final = 2**53
"""Whole numbers up to here are the same in every JSON parser."""
LONGEST_REASON: Final = 300
"""Characters of a parser's message: it may quote what it could not read."""

Instant = Annotated[float, Meta(ge=0, le=LATEST)]
"""A point in time in seconds since 1970; 0 stands for none."""
Moment = Annotated[int, Meta(ge=0, le=int(LATEST))]
"""A point in time in whole seconds."""
Seconds = Annotated[float, Meta(ge=0, le=LONGEST_SECONDS)]
"""A duration."""
Count = Annotated[int, Meta(ge=0, le=MOST)]
"""A counter, a revision or a sequence."""
Number = Annotated[int, Meta(ge=-MOST, le=MOST)]
"""A whole number whose sign is checked elsewhere."""
Name = Annotated[str, Meta(pattern=r"^[\w=-]{0,128}$(?!\n)")]
"""A job, group, node or agent, or nothing: one token of a subject."""
GivenName = Annotated[str, Meta(pattern=r"^[\w=-]{1,128}$(?!\n)")]
"""The same, but never empty: subjects are made of it."""
ObjectName = Annotated[str, Meta(max_length=1024)]
"""A large value's name, or nothing. It travels in a header, and the server limits all headers of a
message to 64 kB."""
RunId = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_=/-]{0,400}$(?!\n)")]
"""A run's id, or nothing."""
Address = Annotated[str, Meta(pattern=r"^[!-)+-=?-~]{0,1024}$(?!\n)")]
"""A subject to publish to: printable ASCII without wildcards; line breaks would end the command."""
Release = Annotated[str, Meta(pattern=r"^([0-9]{1,18}(\.[0-9]{1,18}){0,9})?$(?!\n)")]
"""A release: numbers with dots between them, which can be compared; or nothing."""
HeaderName = Annotated[str, Meta(pattern=r"^(?![Hh][Ff]-|[Nn][Aa][Tt][Ss]-)[!-9;-~]{1,128}$(?!\n)")]
"""The name of a user's own header; reserved ones would act on the server or be mistaken for
ours."""
HeaderValue = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]*$(?!\n)")]
Headers = dict[HeaderName, HeaderValue]


class Codec(Generic[T]):
    """How one kind of record is written, and the only way to read it."""

    def __init__(
        self,
        kind: Any,
        what: str,
        *,
        strict: bool = True,
        largest: int = LARGEST_BYTES,
        deepest: int = DEEPEST,
    ) -> None:
        """`what` names it in errors: "a run's record"."""
        self.what = what
        self.largest = largest
        self.deepest = deepest
        self._encode = msgspec.json.Encoder().encode
        self._decode = msgspec.json.Decoder(kind, strict=strict).decode
        self._nests = _nests(kind)

    def encode(self, record: T) -> bytes:
        """A record as it is stored and sent."""
        return self._encode(record)

    def decode(self, body: bytes | msgspec.Raw) -> T:
        """The record in these bytes, or `Unreadable`."""
        data = bytes(body)
        if len(data) > self.largest:
            raise self.unreadable(f"it is larger than {self.largest:,} bytes")
        try:
            if not data.isascii():
                data.decode()  # msgspec does not check members that it keeps raw or ignores
            found: T = self._decode(data)
            if self._nests and data.count(b"[") + data.count(b"{") > self.deepest:
                self._check_depth(data)
        except RecursionError:
            raise self.unreadable(f"it is nested more than {self.deepest} deep") from None
        except (msgspec.MsgspecError, ValueError, OverflowError) as error:
            raise self.unreadable(str(error)) from None
        return found

    def unreadable(self, reason: str) -> Unreadable:
        """The error for bytes of this kind."""
        shown = reason.encode("ascii", "backslashreplace").decode()
        plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
        return Unreadable(f"{self.what} cannot be read: {plain[:LONGEST_REASON]}")

    def _check_depth(self, data: bytes) -> None:
        level: list[Any] = [_anything(data)]
        for _ in range(self.deepest + 1):
            level = [
                child
                for value in level
                if isinstance(value, (dict, list))
                for child in (value.values() if isinstance(value, dict) else value)
            ]
            if not level:
                return
        raise self.unreadable(f"it is nested more than {self.deepest} deep")


_anything = msgspec.json.Decoder().decode


def _nests(kind: Any) -> bool:
    """Whether a type has members of any shape; raw members are decoded, and checked, elsewhere."""
    seen: set[Any] = set()
    left: list[Any] = [msgspec.inspect.type_info(kind)]
    while left:
        found = left.pop()
        if isinstance(found, msgspec.inspect.AnyType):
            return True
        if isinstance(found, msgspec.inspect.StructType):
            if found.cls not in seen:
                seen.add(found.cls)
                left += [field.type for field in found.fields]
        elif isinstance(found, msgspec.inspect.Type):
            for name in ("item_type", "key_type", "value_type"):
                if (inner := getattr(found, name, None)) is not None:
                    left.append(inner)
            for name in ("types", "item_types"):
                left += getattr(found, name, ())
    return False


def whole_number(text: str | None, default: int = 0, digits: int = 18) -> int:
    """The number in a header; anything else, or a number with too many digits, counts as absent."""
    if text and text.isascii() and text.isdigit() and len(text) <= digits:
        return int(text)
    return default


JSON: Final = Codec[Any](Any, "the value")
"""Any value: a result, a payload, a return."""
