"""Payloads: the bytes of a message on one side, the arguments of a handler on the other.

* No payload parameter: the body is ignored, whatever it is.
* One: the body *is* its value. A parameter that is not an object (a number, a text, a list …) also
  takes `{"<its name>": value}`, so that `{"n": 5}` works for `def f(n: int)`.
* Several, or `**kwargs`: the body is a JSON object and its members are the arguments. Defaults
  apply; a member that is not a parameter is refused unless there is `**kwargs`.

Parameters annotated with a context class, or called `ctx` without an annotation, are never part of
the payload. An empty body means "no arguments", and null where a value is needed.

JSON as it is read and written here: numbers, dates, UUIDs and enums as keys become texts, other
keys are refused; if a member occurs twice, the last one counts; datetime, UUID, Decimal, Enum and
bytes (base64) travel as msgspec writes them.
"""

from holdfast.payload.keys import KeyRule
from holdfast.payload.signature import Bound, Signature
from holdfast.payload.values import decode_result, encode_result, encode_value

__all__ = ["Bound", "KeyRule", "Signature", "decode_result", "encode_result", "encode_value"]
