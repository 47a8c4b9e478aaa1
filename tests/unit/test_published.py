"""What workers publish about payloads, and the check of a payload against it."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from holdfast.errors import InvalidPayload
from holdfast.payload import Signature
from holdfast.payload.keys import KeyRule
from holdfast.payload.misfit import ignored, misfit
from holdfast.payload.published import Published, key_in, published, read_label, sample


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Order:
    id: int
    email: str
    tags: list[str] | None = None


class Item(BaseModel):
    id: int
    name: str = ""


class Form(BaseModel):
    """Every kind of member that pydantic makes something else of."""

    n: int = 1
    b: bool = True
    a: str = ""
    id: Literal["a", "5"] | None = None
    items: dict[str, float] = {}


class Renamed(BaseModel):
    """Takes more than its schema says."""

    model_config = ConfigDict(populate_by_name=True)
    id: int = Field(alias="item")


class Chosen(BaseModel):
    id: Annotated[int, Field(validation_alias=AliasChoices("a", "b"))]


class Counted(BaseModel):
    n: Annotated[int, BeforeValidator(lambda value: len(str(value)))]


class Options(TypedDict, total=False):
    deep: bool


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    a: int


def one(order: Order) -> None: ...
def number(n: int) -> None: ...
def several(a: int, b: str = "x", c: float = 0.5) -> None: ...
def model(item: Item) -> None: ...
def both(item: Item, colour: Colour = Colour.RED, *, options: Options | None = None) -> None: ...
def rest(a: int, **others: int) -> None: ...
def nothing() -> None: ...
def anything(data: Any, plain=None) -> None: ...  # type: ignore[no-untyped-def]
def strict(items: list[Strict], where: dict[str, int] | None = None) -> None: ...
def some(n: int = 1) -> None: ...
def form(item: Form) -> None: ...
def renamed(item: Renamed) -> None: ...
def chosen(item: Chosen) -> None: ...
def counted(item: Counted | None) -> None: ...


HANDLERS = [one, number, several, model, both, rest, nothing, anything, strict]
HANDLERS += [some, form, renamed, chosen, counted]


def known(handler: Any) -> Published:
    found = read_label(published(Signature.of(handler)))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("handler", "body", "says"),
    [
        (one, '{"id": 1, "emial": "x"}', "order: 'emial' is unknown; did you mean 'email'?"),
        (one, '{"id": 1}', "order: 'email' is missing"),
        (one, '{"id": "1", "email": "x"}', "order.id: expected integer, not a string"),
        (one, '{"id": 1, "email": "x", "tags": ["a", 5]}', "order.tags[1]: expected string"),
        (one, "", "the payload is empty, but 'order' is needed"),
        (one, "[]", "order: expected object, not an array"),
        (number, '"five"', "n: expected integer, not a string"),
        (several, '{"a": 1, "bb": "y"}', "payload: 'bb' is unknown; did you mean 'b'?"),
        (several, '{"b": "y"}', "payload: 'a' is missing"),
        (several, "{}", "payload: 'a' is missing"),
        (one, "{}", "order: 'id', 'email' are missing"),
        (model, '{"name": "x"}', "item: 'id' is missing"),
        (both, "5", "an object with 'item', 'colour', 'options', not an integer"),
        (both, '{"item": {"id": 1}, "colour": "green"}', "colour: expected one of 'blue', 'red'"),
        (rest, '{"b": 1}', "payload: 'a' is missing"),
        (strict, '{"items": [{"a": 1, "b": 2}]}', "items[0]: 'b' is unknown; known are 'a'"),
        (number, '{"m": 5}', "payload: 'm' is unknown; known are 'n'"),
        (number, '{"n": "five"}', "n: expected integer, not a string"),
        (model, '{"item": {"id": 1}}', "item: 'item' is unknown"),
        (model, '{"id": "five"}', "item.id: expected integer, not a string"),
        (model, '{"id": 1.5}', "item.id: expected integer, not a number"),
        (model, '{"id": 1, "name": 5}', "item.name: expected string, not an integer"),
        (form, '{"id": "b"}', "item.id: expected one of 'a', '5'"),
        (form, '{"b": "maybe"}', "item.b: expected boolean, not a string"),
        (form, '{"items": {"x": "y"}}', "item.items.x: expected number, not a string"),
    ],
)
def test_misfit_says_what_is_wrong(handler: Any, body: str, says: str) -> None:
    """Misspelt, missing and wrong members are named before anything is sent."""
    assert says in misfit(known(handler), body.encode())


@pytest.mark.parametrize(
    ("handler", "body"),
    [
        (one, '{"id": 1, "email": "x", "more": 1}'),
        (number, "5"),
        (number, '{"n": 5}'),
        (number, "5.0"),
        (several, '{"a": 1, "c": 2}'),
        (several, "7"),
        (model, '{"id": "5"}'),
        (both, '{"item": {"id": 1}, "options": {"deep": true}}'),
        (rest, '{"a": 1, "b": 2}'),
        (nothing, '"whatever"'),
        (anything, '{"data": {"x": [1, null]}}'),
        (strict, '{"items": [], "where": {"x": 1}}'),
        (some, "{}"),
        (form, '{"n": "1.0", "b": "yes", "a": "x", "items": {"x": "5"}}'),
        (renamed, '{"id": 1}'),
        (chosen, '{"b": 1}'),
        (counted, '{"n": "abc"}'),
    ],
)
def test_fitting_payload_passes(handler: Any, body: str) -> None:
    """What the worker takes is sent."""
    assert misfit(known(handler), body.encode()) == ""


def test_member_that_the_job_ignores_is_remarked_on() -> None:
    """The job takes the payload, but somebody has probably mistyped; other members say nothing."""
    told = ignored(known(one), b'{"id": 1, "email": "x", "tag": ["a"], "note": 1}')
    assert told == ["order: the job ignores 'tag'; did you mean 'tags'?"]
    assert ignored(known(form), b'{"nn": 1}') == ["item: the job ignores 'nn'; did you mean 'n'?"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.sampled_from(["", "5"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "id", "email", "item", "n", "items"]), inner)
    ),
    max_leaves=8,
)


@given(st.sampled_from(HANDLERS), VALUES)
def test_check_refuses_nothing_that_the_worker_takes(handler: Any, value: Any) -> None:
    """Whatever the payload is: refused here means refused there."""
    body = json.dumps(value).encode()
    if misfit(known(handler), body):
        with pytest.raises(InvalidPayload):
            Signature.of(handler).decode(body)


@given(st.dictionaries(st.sampled_from(Published.__struct_fields__), VALUES), VALUES)
def test_odd_labels_check_nothing_and_break_nothing(label: dict[str, Any], value: Any) -> None:
    """A label is somebody else's bytes."""
    found = read_label(json.dumps(label))
    if found is not None:
        misfit(found, json.dumps(value).encode())
    assert read_label("[" * 5_000) is None


@pytest.mark.parametrize("handler", [one, number, several, model, both, rest, strict])
def test_sample_is_a_payload_that_the_job_takes(handler: Any) -> None:
    """Required members only, with values of their types."""
    body = json.dumps(sample(known(handler), "abc")).encode()
    Signature.of(handler).decode(body)


def test_key_of_a_bare_value_is_found() -> None:
    """The first parameter's value may come without its name, if nothing else is required."""

    def ocr(page: str, lang: str = "en") -> None: ...

    label = read_label(published(Signature.of(ocr), KeyRule("ocr", "page", Signature.of(ocr))))
    assert label is not None
    assert key_in(label, b'"p7"') == key_in(label, b'{"page": "p7"}') == "p7"
    assert key_in(label, b'{"lang": "de"}') == ""


def test_key_that_pydantic_may_change_is_left_to_the_worker() -> None:
    """A text that becomes a number, or a validator, would give the worker another key."""

    def label(handler: Any) -> Published:
        signature = Signature.of(handler)
        found = read_label(published(signature, KeyRule("f", "id", signature)))
        assert found is not None
        return found

    assert key_in(label(model), b'{"id": 7}') == "7"
    assert key_in(label(model), b'{"id": "007"}') == ""
    assert key_in(label(renamed), b'{"id": 7}') == ""
