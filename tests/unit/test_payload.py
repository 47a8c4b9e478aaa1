"""Payloads: bytes on one side, arguments on the other."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NewType, TypedDict
from uuid import UUID, uuid4

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import DefinitionError, InvalidPayload
from holdfast.payload import Signature, decode_result, encode_result, encode_value

if TYPE_CHECKING:
    import elsewhere  # type: ignore[import-not-found]
    from elsewhere import Missing


class Context:
    """Stands for the real one."""


class Colour(Enum):
    RED = "red"


class Image(pydantic.BaseModel):
    id: int
    width: float = 0.0


class Renamed(pydantic.BaseModel):
    number: int = pydantic.Field(alias="n")


class Locked(pydantic.BaseModel):
    password: pydantic.SecretStr


class Opened(Locked):
    @pydantic.field_serializer("password", when_used="json")
    def _reveal(self, value: pydantic.SecretStr) -> str:
        return value.get_secret_value()


class Fussy(pydantic.BaseModel):
    id: int

    @pydantic.field_validator("id")
    @classmethod
    def _explode(cls, value: int) -> int:
        return {1: 1}[value]


@dataclass
class Point:
    x: int
    y: int = 0


@dataclass(slots=True)
class Measure:
    value: float | None


@dataclass
class Album:
    cover: Image
    tags: list[str]


@dataclass
class Node:
    name: str
    children: list[Node]


@dataclass
class Stubborn:
    n: int

    def __post_init__(self) -> None:
        raise RuntimeError("no\nway")


class Options(TypedDict, total=False):
    at: datetime


class Pair(NamedTuple):
    left: int
    right: int


class Frame(msgspec.Struct):
    id: UUID
    price: Decimal = Decimal(0)


class Mixed(msgspec.Struct):
    image: Image


@dataclass
class Loose:
    extra: object
    more: dict[str, object]


Count = NewType("Count", int)
NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)


def nothing() -> None: ...
def context_only(ctx) -> None: ...  # type: ignore[no-untyped-def]
def one_dict(event: dict[str, Any]) -> None: ...
def one_any(event) -> None: ...  # type: ignore[no-untyped-def]
def one_object(event: object) -> None: ...
def one_object_dict(event: dict[str, object]) -> None: ...
def one_object_list(items: list[object]) -> None: ...
def one_object_maybe(event: object | None) -> None: ...
def one_loose(it: Loose) -> None: ...
def several_objects(n: int, extra: object, more: dict[str, object]) -> None: ...
def one_int(n: int) -> None: ...
def one_optional(n: int | None) -> None: ...
def one_default(n: int = 5) -> None: ...
def one_list(items: list[int]) -> None: ...
def one_model(image: Image, ctx: Context) -> Image: ...  # type: ignore[empty-body]
def one_models(images: list[Image]) -> None: ...
def one_maybe(image: Image | None = None) -> None: ...
def one_album(album: Album) -> None: ...
def one_point(point: Point) -> None: ...
def one_node(node: Node) -> None: ...
def one_options(options: Options) -> None: ...
def one_pair(pair: Pair) -> None: ...
def one_frame(frame: Frame) -> None: ...
def one_colour(colour: Colour) -> None: ...
def one_count(count: Count) -> None: ...
def one_limited(n: Annotated[int, msgspec.Meta(gt=0)]) -> None: ...
def one_positive(n: pydantic.PositiveInt) -> None: ...
def one_url(url: pydantic.HttpUrl) -> None: ...
def one_stubborn(it: Stubborn) -> None: ...
def one_fussy(it: Fussy) -> None: ...
def one_locked(it: Locked) -> None: ...
def one_opened(it: Opened) -> None: ...
def one_renamed(it: Renamed) -> None: ...
def one_choice(kind: Literal["a", "b"]) -> None: ...
def several(n: int, ctx: Context, name: str = "x") -> None: ...
def keywords(image: Image, *, times: int = 1) -> None: ...
def rest(n: int, **others: int) -> None: ...
def only_rest(**others: Any) -> None: ...


SIGNATURES = {
    name: Signature.of(value, (Context,))
    for name, value in list(globals().items())
    if name.startswith(("nothing", "context_", "one_", "several", "keywords", "rest", "only_"))
}


def decoded(name: str, body: bytes) -> dict[str, Any]:
    bound = SIGNATURES[name].decode(body)
    assert bound.args == ()
    return bound.kwargs


def refusal(name: str, body: bytes) -> str:
    with pytest.raises(InvalidPayload) as caught:
        SIGNATURES[name].decode(body)
    return str(caught.value)


def refusal_or_nothing(name: str, body: bytes) -> str:
    try:
        SIGNATURES[name].decode(body)
    except InvalidPayload as refused:
        return str(refused)
    return ""


# -- decoding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"5", b"\xff\x00", b"{", b'{"a": 1}'])
@pytest.mark.parametrize("name", ["nothing", "context_only"])
def test_decode_without_parameters_ignores_the_body(name: str, body: bytes) -> None:
    """A handler that takes nothing runs whatever was sent."""
    assert decoded(name, body) == {}


@pytest.mark.parametrize(
    ("name", "body", "value"),
    [
        ("one_dict", b'{"a": {"b": 1}}', {"a": {"b": 1}}),
        ("one_any", b"[1, null]", [1, None]),
        ("one_any", b'{"event": 1}', {"event": 1}),
        ("one_object", b'"x"', "x"),
        ("one_int", b"5", 5),
        ("one_optional", b"null", None),
        ("one_list", b"[1, 2]", [1, 2]),
        ("one_model", b'{"id": 1}', Image(id=1)),
        ("one_models", b'[{"id": 1}]', [Image(id=1)]),
        ("one_maybe", b"null", None),
        ("one_maybe", b'{"id": 1}', Image(id=1)),
        ("one_album", b'{"cover": {"id": 1}, "tags": ["a"]}', Album(Image(id=1), ["a"])),
        ("one_point", b'{"x": 1}', Point(1)),
        ("one_node", b'{"name": "a", "children": [{"name": "b", "children": []}]}', None),
        (
            "one_options",
            b'{"at": "2026-01-01T00:00:00Z"}',
            {"at": NEW_YEAR},
        ),
        ("one_pair", b"[1, 2]", Pair(1, 2)),
        ("one_colour", b'"red"', Colour.RED),
        ("one_count", b"3", 3),
        ("one_limited", b"3", 3),
        ("one_positive", b"3", 3),
        ("one_url", b'"http://a.b"', pydantic.HttpUrl("http://a.b")),
        ("one_choice", b'"a"', "a"),
        ("one_renamed", b'{"n": 1}', Renamed(n=1)),
    ],
)
def test_decode_of_one_parameter_takes_the_body_as_its_value(
    name: str, body: bytes, value: Any
) -> None:
    """The body is the payload: a model, dataclass, TypedDict, Struct, dict, list or scalar."""
    (found,) = decoded(name, body).values()
    if name == "one_node":
        value = Node("a", [Node("b", [])])
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "body", "value"),
    [
        ("one_int", b'{"n": 5}', 5),
        ("one_optional", b'{"n": null}', None),
        ("one_list", b' {"items": [1]} ', [1]),
        ("one_models", b'{"images": [{"id": 1}]}', [Image(id=1)]),
        ("one_pair", b'{"pair": [1, 2]}', Pair(1, 2)),
        ("one_url", b'{"url": "http://a.b"}', pydantic.HttpUrl("http://a.b")),
        ("one_count", b'{"count": 7}', 7),
        ("one_positive", b'{"n": 7}', 7),
        ("one_colour", b'{"colour": "red"}', Colour.RED),
    ],
)
def test_decode_of_one_parameter_takes_a_member_of_its_name(
    name: str, body: bytes, value: Any
) -> None:
    """`{"n": 5}` works for `def f(n: int)`, because an int is never an object."""
    assert list(decoded(name, body).values()) == [value]


@pytest.mark.parametrize("value", [None, 5, "x", [1, None], {"a": [{}]}])
def test_definition_with_object_inside_takes_every_value(value: Any) -> None:
    """`object` means `Any` wherever it stands: alone, in a container, or in a class."""
    body = msgspec.json.encode(value)
    assert decoded("one_object", body) == {"event": value}
    assert decoded("one_object_dict", b'{"a":%s}' % body) == {"event": {"a": value}}
    assert decoded("one_object_list", b"[%s]" % body) == {"items": [value]}
    assert decoded("one_object_maybe", body) == {"event": value}
    members = {"extra": value, "more": {"a": value}}
    assert decoded("one_loose", msgspec.json.encode(members)) == {"it": Loose(**members)}
    assert decoded("several_objects", msgspec.json.encode({"n": 1, **members})) == {
        "n": 1,
        **members,
    }
    assert decode_result(b"[%s]" % body, list[object]) == [value]


def test_decode_of_one_object_is_never_unwrapped() -> None:
    """A dict that happens to have a member of the parameter's name arrives whole."""
    assert decoded("one_dict", b'{"event": {"a": 1}}') == {"event": {"event": {"a": 1}}}
    assert "missing required field 'x'" in refusal("one_point", b'{"point": {"x": 1}}')


def test_decode_of_an_empty_body_means_no_arguments() -> None:
    """Empty is null where null fits, the default where there is one, and refused elsewhere."""
    assert decoded("one_default", b"") == {}
    assert decoded("one_default", b"{}") == {}
    assert decoded("one_maybe", b"") == {}
    assert decoded("one_optional", b" ") == {"n": None}
    assert decoded("one_any", b"") == {"event": None}
    assert decoded("only_rest", b"") == decoded("only_rest", b"null") == {}
    assert refusal("one_int", b"") == "payload: empty, but 'n' is needed"
    assert refusal("several", b"") == "payload: missing 'n'"


def test_decode_of_null_is_not_the_default() -> None:
    """A caller who sends null for an int is told so."""
    assert refusal("one_default", b"null") == "payload: expected 'int', got 'null'"


def test_decode_of_several_takes_members_as_arguments() -> None:
    """Each member is one argument; defaults stay the handler's own."""
    assert decoded("several", b'{"n": 1}') == {"n": 1}
    assert decoded("several", b'{"name": "y", "n": 1}') == {"n": 1, "name": "y"}
    body = b'{"image": {"id": 3}, "times": 2}'
    assert decoded("keywords", body) == {"image": Image(id=3), "times": 2}
    assert decoded("rest", b'{"n": 1, "a": 2}') == {"n": 1, "a": 2}


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("several", b"{}", "payload: missing 'n'"),
        ("several", b'{"n": 1, "z": 2}', "payload: 'z' is unknown; known are 'n', 'name'"),
        ("several", b'{"n": 1, "ctx": 2}', "payload: 'ctx' is unknown; known are 'n', 'name'"),
        ("several", b'{"n": "1"}', "payload member 'n': expected 'int', got 'str'"),
        ("several", b"[1]", "payload: expected 'object', got 'array'"),
        ("rest", b'{"n": 1, "a": "2"}', "payload member 'a': expected 'int', got 'str'"),
        ("one_int", b'{"n": "5"}', "payload member 'n': expected 'int', got 'str'"),
        ("one_int", b'{"n": 5, "m": 6}', "payload: 'm' is unknown; known are 'n'"),
        ("one_int", b"true", "payload: expected 'int', got 'bool'"),
        ("one_point", b'{"x": "1"}', "payload member 'x': expected 'int', got 'str'"),
        ("one_list", b'[1, "2"]', "payload member '[1]': expected 'int', got 'str'"),
        ("one_list", b'{"items": ["2"]}', "payload member 'items[0]': expected 'int', got 'str'"),
        ("one_limited", b"0", "payload: expected 'int' >= 1"),
        ("one_colour", b'"blue"', "payload: invalid enum value 'blue'"),
        ("one_stubborn", b'{"n": 1}', "payload: RuntimeError: no way"),
        ("one_fussy", b'{"id": 2}', "payload: KeyError: 2"),
        ("one_any", b'"\xff"', "payload: not UTF-8 text"),
    ],
)
def test_decode_refuses_with_one_line_that_names_the_member(
    name: str, body: bytes, message: str
) -> None:
    """Whoever reads the dead letter sees which member was wrong, and what was expected."""
    assert refusal(name, body) == message


def test_decode_reports_pydantic_errors_in_one_line() -> None:
    """pydantic's first error is named, the number of others too, and no value is repeated."""
    message = refusal("one_model", b'{"id": "hunter2", "width": []}')
    assert message.startswith("payload member 'id': input should be a valid integer")
    assert message.endswith("(and 1 more)")
    assert "hunter2" not in message
    assert "member 'images.0.id'" in refusal("one_models", b'{"images": [{"id": "x"}]}')
    assert "member 'image.id'" in refusal("keywords", b'{"image": {"id": "x"}}')


HOSTILE = {
    "nan": b"NaN",
    "nan member": b'{"id": 1, "width": NaN}',
    "infinity": b'{"id": 1, "width": -Infinity}',
    "float overflow": b'{"id": 1, "width": 1e999}',
    "huge int": b'{"id": ' + b"9" * 5000 + b"}",
    "deep list": b"[" * 500_000,
    "deep and closed": b"[" * 500_000 + b"]" * 500_000,
    "deep member": b'{"n": ' * 150_000,
    "lone surrogate": b'"\\ud800"',
    "surrogate pair broken": b'{"n": "\\ud800\\u0041"}',
    "encoded surrogate": b'"\xed\xa0\x80"',
    "bad key": b'{"\xff": 1}',
    "trailing": b"{} {}",
    "byte order mark": b"\xef\xbb\xbf{}",
    "utf-16": "{}".encode("utf-16"),
    "zeros": b"\x00" * 1000,
    "many unknown": json.dumps({f"k{n}": n for n in range(50_000)}).encode(),
    "long name": b'{"' + b"k" * 1_000_000 + b'": 1}',
    "line break in a name": b'{"n": 1, "a\\nb": "x"}',
}


@pytest.mark.parametrize("name", list(SIGNATURES))
@pytest.mark.parametrize("case", list(HOSTILE))
def test_decode_of_hostile_bodies_raises_invalid_payload_only(name: str, case: str) -> None:
    """No body takes a worker down, and every refusal is one short line."""
    message = refusal_or_nothing(name, HOSTILE[case])
    assert len(message) < 1000
    assert message.isprintable()


@pytest.mark.parametrize("case", ["nan", "nan member", "infinity", "float overflow"])
@pytest.mark.parametrize("name", ["one_any", "one_model", "one_dict", "keywords", "only_rest"])
def test_decode_refuses_numbers_that_json_does_not_have(name: str, case: str) -> None:
    """NaN and Infinity never reach a handler, not even through pydantic's parser."""
    refusal(name, HOSTILE[case])


def test_decode_of_a_member_given_twice_takes_the_last() -> None:
    """Duplicates are not an error; which one counts is stated."""
    assert decoded("one_dict", b'{"a": 1, "a": 2}') == {"event": {"a": 2}}
    assert decoded("several", b'{"n": 1, "n": 2}') == {"n": 2}
    assert decoded("one_model", b'{"id": 1, "id": 2}') == {"image": Image(id=2)}


@pytest.mark.parametrize("name", ["one_any", "one_list", "one_models"])
def test_decode_takes_a_mebibyte(name: str) -> None:
    """The largest message the server takes by default is read, whatever its type."""
    item = b'{"id": 1, "width": 2.5}' if name == "one_models" else b"123456"
    body = b"[" + b",".join([item] * (2**20 // (len(item) + 1))) + b"]"
    [value] = decoded(name, body).values()
    assert len(value) == body.count(item)


json_text = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from("nabxyz"), inner),
    max_leaves=10,
).map(json.dumps)


@given(st.sampled_from(list(SIGNATURES)), st.binary() | json_text.map(str.encode))
def test_decode_never_raises_anything_else(name: str, body: bytes) -> None:
    """For any bytes there are arguments or `InvalidPayload`, and nothing else."""
    assert refusal_or_nothing(name, body).isprintable()


def test_decode_lets_a_memory_error_through() -> None:
    """Too little memory says nothing about the payload, so the run is not given up for it."""

    class Hungry(pydantic.BaseModel):
        n: int

        @pydantic.field_validator("n")
        @classmethod
        def _eat(cls, value: int) -> int:
            raise MemoryError

    def handler(it: Any) -> None: ...

    handler.__annotations__["it"] = Hungry
    with pytest.raises(MemoryError):
        Signature.of(handler).decode(b'{"n": 1}')


# -- the call ----------------------------------------------------------------------------------


def test_call_kwargs_fills_in_the_context() -> None:
    """Every context parameter receives the context; the payload cannot set it."""
    ctx = Context()
    several_ = SIGNATURES["several"]
    assert several_.contexts == ("ctx",)
    assert several_.parameters == ("n", "name")
    assert several_.call_kwargs(several_.decode(b'{"n": 1}'), ctx) == {"n": 1, "ctx": ctx}
    alone = SIGNATURES["context_only"]
    assert alone.call_kwargs(alone.decode(b"5"), ctx) == {"ctx": ctx}


def test_call_kwargs_of_rest_cannot_forge_the_context() -> None:
    """A member called like the context parameter does not replace it."""

    def handler(ctx: Context, **others: Any) -> None: ...

    signature = Signature.of(handler, (Context,))
    bound = signature.decode(b'{"ctx": "forged", "a": 1}')
    assert signature.call_kwargs(bound, "real") == {"ctx": "real", "a": 1}


# -- encoding ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("nothing", (), {}),
        ("one_dict", ({"a": [1, None, "é"]},), {}),
        ("one_int", (), {"n": 5}),
        ("one_default", (), {}),
        ("one_model", (Image(id=1),), {}),
        ("one_models", ([Image(id=1), Image(id=2)],), {}),
        ("one_maybe", (None,), {}),
        ("one_album", (Album(Image(id=1), []),), {}),
        ("one_point", (Point(1, 2),), {}),
        ("one_node", (Node("a", [Node("b", [])]),), {}),
        ("one_options", ({"at": NEW_YEAR},), {}),
        ("one_pair", (Pair(1, 2),), {}),
        ("one_frame", (Frame(uuid4(), Decimal("1.10")),), {}),
        ("one_colour", (Colour.RED,), {}),
        ("one_url", (pydantic.HttpUrl("http://a.b"),), {}),
        ("one_opened", (Opened(password=pydantic.SecretStr("x")),), {}),
        ("one_renamed", (Renamed(n=3),), {}),
        ("several", (1,), {"name": "y"}),
        ("keywords", (Image(id=1),), {"times": 3}),
        ("rest", (1,), {"a": 2}),
        ("only_rest", (), {"a": {"b": 1}}),
    ],
)
def test_encode_is_undone_by_decode(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """What `enqueue` is given is what the handler receives."""
    signature = SIGNATURES[name]
    received = signature.decode(signature.encode(args, kwargs)).kwargs
    assert list(received.values()) == [*args, *kwargs.values()]


def test_encode_accepts_a_dict_for_a_model() -> None:
    """A caller that does not have the class may send what it is made of."""
    body = SIGNATURES["one_model"].encode(({"id": 7},), {})
    assert decoded("one_model", body) == {"image": Image(id=7)}


def test_encode_writes_what_other_languages_read() -> None:
    """The body is plain JSON, and nothing at all when there are no arguments."""
    assert SIGNATURES["nothing"].encode((), {}) == b""
    assert SIGNATURES["one_int"].encode((5,), {}) == b"5"
    assert SIGNATURES["several"].encode((5,), {}) == b'{"n":5}'
    assert SIGNATURES["one_renamed"].encode((Renamed(n=3),), {}) == b'{"n":3}'


def test_encode_turns_number_keys_into_texts() -> None:
    """Keys become texts as in JSON; keys that no text stands for are refused."""
    assert SIGNATURES["one_any"].encode(({1: 2},), {}) == b'{"1":2}'
    for key in (None, True, (1, 2)):
        with pytest.raises(InvalidPayload):
            SIGNATURES["one_any"].encode(({key: 1},), {})


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "teaches"),
    [
        ("nothing", (1,), {}, "too many positional"),
        ("one_int", (), {}, "missing a required argument: 'n'"),
        ("one_int", ("5",), {}, "expected 'int', got 'str'"),
        ("one_int", (True,), {}, "expected 'int', got 'bool'"),
        ("one_int", (), {"n": 1, "m": 1}, "'m'"),
        ("one_default", (None,), {}, "got 'null'"),
        ("several", (1,), {"ctx": 1}, "'ctx'"),
        ("several", (1,), {"name": 2}, "member 'name': expected 'str', got 'int'"),
        ("one_model", ({"id": "x"},), {}, "member 'id'"),
        ("one_model", (5,), {}, "should be an object"),
        ("one_model", (Image(id=1, width=math.nan),), {}, "NaN"),
        ("one_any", ([1.0, {"a": -math.inf}],), {}, "NaN"),
        ("one_any", (Measure(math.inf),), {}, "NaN"),
        ("one_any", ({"deep": Image(id=1, width=math.inf)},), {}, "NaN"),
        ("one_any", (object(),), {}, "objects of type object are not supported; pass JSON"),
        ("one_any", (1j,), {}, "complex"),
        ("one_any", ("\ud800",), {}, "surrogate"),
        ("one_any", (ENDLESS,), {}, "contains itself"),
        ("one_locked", (Locked(password=pydantic.SecretStr("x")),), {}, "asterisks"),
        ("one_any", ([Locked(password=pydantic.SecretStr("x"))],), {}, "asterisks"),
        ("one_stubborn", ({"n": 1},), {}, "RuntimeError"),
    ],
)
def test_encode_refuses_a_wrong_call_at_its_caller(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], teaches: str
) -> None:
    """What the worker could not read is never sent, and the message says why."""
    with pytest.raises(InvalidPayload, match=teaches) as caught:
        SIGNATURES[name].encode(args, kwargs)
    assert "\n" not in str(caught.value)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # half surrogate pairs are refused, see above
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc"), inner),
    max_leaves=20,
)


@given(json_values)
def test_encode_keeps_json_values_equal(value: Any) -> None:
    """Any JSON value arrives as it was sent."""
    assert decoded("one_any", SIGNATURES["one_any"].encode((value,), {})) == {"event": value}
    assert decode_result(encode_result(value)) == value


@given(st.recursive(st.floats(), lambda inner: st.lists(inner) | st.tuples(inner, st.none())))
def test_encode_sends_no_endless_number_as_null(value: Any) -> None:
    """A NaN anywhere is refused; what is sent arrives as it was."""
    try:
        body = encode_value(value)
    except InvalidPayload:
        assert any(word in repr(value) for word in ("nan", "inf"))
    else:
        assert not any(word in repr(value) for word in ("nan", "inf"))
        assert json.loads(body) == json.loads(json.dumps(value))


# -- results and events ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, type(None)),
        (Image(id=1), Image),
        ([Image(id=1)], list[Image]),
        ({"a": Point(1)}, dict[str, Point]),
        (Album(Image(id=1), []), Album),
        (Frame(uuid4()), Frame),
        ({Colour.RED}, set[Colour]),
        (timedelta(days=1), timedelta),
        (b"\x00\xff", bytes),
        (Renamed(n=1), Renamed),
        (2**100, int),
        (5, Annotated[int, {"unhashable": True}]),
    ],
)
def test_result_is_read_back_as_its_type(value: Any, kind: Any) -> None:
    """`await run.result()` gives what the handler returned."""
    assert decode_result(encode_result(value), kind) == value


def test_result_of_an_empty_body_is_none() -> None:
    """A record without a result reads as None."""
    assert decode_result(b"") is None


def test_result_that_cannot_travel_says_what_to_return() -> None:
    """The handler's author learns what is possible instead."""
    with pytest.raises(InvalidPayload, match=r"generator.*; return None, JSON values, dataclasses"):
        encode_result(x for x in [1])


def test_result_of_another_type_is_refused() -> None:
    """A result that does not fit the annotation is an error that says so."""
    with pytest.raises(InvalidPayload, match="result: expected 'int', got 'str'"):
        decode_result(b'"x"', int)
    with pytest.raises(InvalidPayload, match=r"result: .*complex"):
        decode_result(b"1", complex)


def test_value_of_an_event_is_json() -> None:
    """Event data may be anything that JSON, a dataclass or a model can say."""
    assert encode_value({"key": Image(id=1), "at": Point(1)}) == (
        b'{"key":{"id":1,"width":0.0},"at":{"x":1,"y":0}}'
    )
    with pytest.raises(InvalidPayload, match="; send JSON values"):
        encode_value(lambda: None)


# -- definition --------------------------------------------------------------------------------


def positional(n: int, /) -> None: ...
def star(*items: int) -> None: ...
def unresolvable(it: Missing) -> None: ...
def unresolvable_inside(it: list[Missing]) -> None: ...
def unresolvable_return() -> Missing: ...
def unsupported(it: complex) -> None: ...
def unsupported_inside(it: dict[str, list[complex]]) -> None: ...
def unsupported_iterable(it: Iterable[int]) -> None: ...
def ambiguous(it: list[int] | list[str]) -> None: ...
def mixed(it: Mixed) -> None: ...


@pytest.mark.parametrize(
    ("handler", "teaches"),
    [
        (positional, "'n' is positional-only"),
        (star, r"'\*items' cannot be in a payload"),
        (unresolvable, "'Missing' of 'it' cannot be resolved"),
        (unresolvable_inside, r"'list\[Missing\]' of 'it' cannot be resolved"),
        (unresolvable_return, "of 'return' cannot be resolved"),
        (unsupported, "'it' cannot be a payload .*complex"),
        (unsupported_inside, "'it' cannot be a payload .*complex"),
        (unsupported_iterable, "'it' cannot be a payload"),
        (ambiguous, "'it' cannot be a payload"),
        (mixed, "'it' cannot be a payload .*not Structs and models in one type"),
        (5, "no readable parameters"),
    ],
)
def test_definition_that_cannot_work_is_refused(handler: Any, teaches: str) -> None:
    """A handler whose payload could never be read fails when it is defined."""
    with pytest.raises(DefinitionError, match=teaches):
        Signature.of(handler, (Context,))


class Service:
    def method(self, n: int, ctx: Context) -> None: ...

    def __call__(self, image: Image) -> None: ...


def wrapped() -> Callable[..., Any]:
    @functools.wraps(several)
    def inner(*args: Any, **kwargs: Any) -> Any: ...

    return inner


def quoted_context(n: int, where: "Context | None") -> None: ...  # noqa: UP037 - quoted on purpose
def dotted_context(n: int, where: elsewhere.Context) -> None: ...
def annotated_context(n: int, where: Annotated[Context, "x"]) -> None: ...
def typed_ctx(n: int, ctx: int) -> None: ...


@pytest.mark.parametrize(
    ("handler", "parameters", "contexts"),
    [
        (Service().method, ("n",), ("ctx",)),
        (Service(), ("image",), ()),
        (functools.partial(several, name="y"), ("n", "name"), ("ctx",)),
        (wrapped(), ("n", "name"), ("ctx",)),
        (quoted_context, ("n",), ("where",)),
        (dotted_context, ("n",), ("where",)),
        (annotated_context, ("n",), ("where",)),
        (typed_ctx, ("n", "ctx"), ()),
    ],
)
def test_definition_finds_payload_and_context(
    handler: Any, parameters: tuple[str, ...], contexts: tuple[str, ...]
) -> None:
    """Methods, callables, partials, wrapped functions and every way to annotate the context."""
    signature = Signature.of(handler, (Context,))
    assert (signature.parameters, signature.contexts) == (parameters, contexts)


def test_definition_knows_the_return_type() -> None:
    """The result's type is resolved once, `Any` when there is none."""
    assert SIGNATURES["one_model"].returns is Image
    assert SIGNATURES["nothing"].returns is type(None)
    assert Signature.of(lambda: None).returns is Any


def test_pydantic_is_imported_for_models_only() -> None:
    """A worker whose handlers use no model does not pay for importing pydantic."""
    code = """
import sys, dataclasses
from holdfast.payload import Signature, encode_result
@dataclasses.dataclass
class Point:
    x: int
def handler(event: dict, point: Point | None = None): ...
signature = Signature.of(handler)
signature.decode(signature.encode(({"a": 1}, Point(1)), {}))
encode_result([Point(1)])
assert "pydantic" not in sys.modules, "pydantic was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
