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
Types are checked strictly by msgspec ("5" is no int), and `object` means `Any`. pydantic is
imported, and its own rules apply, only for an annotation that has something of pydantic in it.

Not checked: that a value is *equal* after its travel. A tuple inside `Any` arrives as a list.
"""

from holdfast.payload.reading import decode_result
from holdfast.payload.signature import Bound, Signature
from holdfast.payload.writing import encode_result, encode_value

__all__ = ["Bound", "Signature", "decode_result", "encode_result", "encode_value"]
