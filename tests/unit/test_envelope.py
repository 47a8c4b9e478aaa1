"""Which run a message is for: headers are optional, and may be nonsense."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Holdfast
from holdfast.model.message import LARGEST_COUNT, NUMBER_DIGITS, next_message
from holdfast.names import (
    H_ATTEMPT,
    H_CRASHES,
    H_CREATED,
    H_FAILURES,
    H_MSG_ID,
    H_RUN,
    Names,
    check_run,
)
from holdfast.worker.attempt import Held

app = Holdfast("shop")


@app.job
async def resize() -> None: ...


@app.job(group="images")
async def crop() -> None: ...


class Delivery:
    """A message as it would be delivered."""

    subject = "hf.job.default.resize"
    body = b""
    reply = "reply"
    deliveries = 1
    sequence = 17
    stored_ns = 1_700_000_000_123_456_789

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers


def identified(headers: dict[str, str], job: Any = resize, event: str = "") -> Held:
    held = Held(Delivery(headers), job, 0.0, event)  # type: ignore[arg-type]  # needs no acks
    held.identify()
    return held


def test_identify_without_headers_uses_place_and_time() -> None:
    """A plain publish from any client is a valid run; its redelivery is the same run."""
    held = identified({})
    assert check_run(held.run) == held.run
    assert held.run == identified({}).run
    assert (held.stamp, held.failures, held.attempt) == (1, 0, 1)
    assert held.created == pytest.approx(1_700_000_000.123)


def test_identify_uses_the_message_id() -> None:
    """A message id is the run's id, made usable when it is not."""
    assert identified({H_MSG_ID: "order-17"}).run == "order-17"
    odd = identified({H_MSG_ID: "order.17 *>\r\n"})
    assert check_run(odd.run) == odd.run
    assert odd.run != identified({H_MSG_ID: "order.17 *> \r\n"}).run


def test_identify_prefers_the_run_header() -> None:
    """A retry has a message id of its own and the run's id beside it."""
    headers = {H_RUN: "order-17", H_MSG_ID: "order-17.3", H_ATTEMPT: "3", H_FAILURES: "2"}
    held = identified(headers)
    assert (held.run, held.stamp, held.failures, held.attempt) == ("order-17", 3, 2, 3)


def test_identify_ignores_counts_without_a_run() -> None:
    """Counts belong to a run that is named: a stray header does not use up anybody's retries."""
    held = identified({H_MSG_ID: "order-17", H_ATTEMPT: "9", H_FAILURES: "14"})
    assert (held.stamp, held.failures) == (1, 0)


def test_identify_keeps_subscribers_apart() -> None:
    """One event makes a run of its own for each job, the same one each time it is delivered."""
    headers = {H_MSG_ID: "r1.image-resized.1"}
    one = identified(headers, resize, "image-resized")
    other = identified(headers, crop, "image-resized")
    assert one.run == identified(headers, resize, "image-resized").run
    assert len({one.run, other.run, identified(headers).run}) == 3
    assert identified({}, resize, "image-resized").run != identified({}).run


def test_scope_gives_a_run_of_one_s_own() -> None:
    """Two jobs that were given one id: the second gets another, the same each time."""
    held = identified({H_MSG_ID: "order-17"}, crop)
    held.scope()
    assert check_run(held.run) == held.run != "order-17"
    assert held.keyed


@pytest.mark.parametrize(
    "nonsense",
    ["", " ", "-1", "+1", "1.5", "1e3", "0x10", "٣", "²", "many", "9" * 30, "1\r\n", "\x00"],
)
def test_numbers_that_are_nonsense_count_as_absent(nonsense: str) -> None:
    """A header that is no small whole number changes nothing."""
    held = identified({H_RUN: "run", H_ATTEMPT: nonsense, H_FAILURES: nonsense})
    assert (held.stamp, held.failures) == (1, 0)
    assert identified({H_CRASHES: nonsense}).crashes == 0


@pytest.mark.parametrize("nonsense", ["", "soon", "nan", "inf", "-inf", "-5", "1e300", "0"])
def test_deadline_that_is_nonsense_counts_as_absent(nonsense: str) -> None:
    """Nor does a time that never was: the run's time begins when its message was stored."""
    assert identified({H_CREATED: nonsense}).created == identified({}).created


headers = st.dictionaries(
    st.sampled_from([H_RUN, H_MSG_ID, H_ATTEMPT, H_FAILURES, H_CRASHES, H_CREATED, "Tenant"]),
    st.text(st.characters()),
)


@given(headers, st.sampled_from(["", "image-resized"]))
def test_identify_survives_any_headers(found: dict[str, str], event: str) -> None:
    """Whatever the headers say: a usable run id, small counts, and the same ones again."""
    held, again = identified(found, event=event), identified(found, event=event)
    assert check_run(held.run) == held.run
    assert 0 <= held.failures <= LARGEST_COUNT
    assert 0 < held.stamp < 10**NUMBER_DIGITS
    assert 0 < held.created < 1e11
    assert (held.run, held.stamp, held.created) == (again.run, again.stamp, again.created)


@given(headers)
def test_parked_headers_find_the_same_run_again(found: dict[str, str]) -> None:
    """The message of the next attempt is for the same run, counted on; the user's headers stay."""
    held = identified(found)
    held.failures += 1
    parked = next_message(
        Names("hf"),
        "default",
        "resize",
        held.run,
        b"",
        found,
        number=held.stamp + 1,
        failures=held.failures,
        created=held.created,
    ).headers
    assert parked.get("Tenant") == found.get("Tenant")
    later = identified(parked)
    assert later.run == held.run
    if held.failures <= LARGEST_COUNT:
        assert (later.failures, later.stamp) == (held.failures, held.stamp + 1)
    assert later.created == pytest.approx(held.created, abs=0.001)
