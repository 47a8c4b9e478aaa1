"""A run's message is built and read by one set of rules."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from holdfast.model.message import (
    NUMBER_DIGITS,
    cause_of,
    count_of,
    due_of,
    first_message,
    next_message,
    number_of,
    read_heading,
    user_headers,
)
from holdfast.names import H_CAUSE, H_CRASHES, H_FAILURES, IdMaker, Names, keyed_run
from holdfast.status.messages import Kept

NAMES = Names("hf")
STORED_NS = 1_700_000_000_000_000_000
make_id = IdMaker()
headers = st.dictionaries(
    st.sampled_from(["Hf-Run", "Hf-Attempt", "Hf-Failures", "Hf-Created", "Nats-Msg-Id", "Mine"]),
    st.text(max_size=40),
)


def test_first_message_carries_the_run_id_as_message_id_and_nothing_else() -> None:
    """The plain form: what any NATS client can publish."""
    message = first_message(NAMES, "default", "mail", "r1", b"{}", {"Trace": "1"})
    assert message == ("hf.job.default.mail", b"{}", {"Trace": "1", "Nats-Msg-Id": "r1"})


def test_first_message_of_a_slot_names_its_instant_and_its_cause() -> None:
    """A handler is told which slot it works for, and operators what sent the run."""
    found = first_message(NAMES, "g", "j", "s/=t1", b"", {}, slot=0, cause="r9").headers
    assert found["Hf-Slot"] == "1970-01-01T00:00:00.000Z"
    assert cause_of(found) == "r9"


def test_first_message_that_is_delayed_waits_under_its_own_subject() -> None:
    """The server moves it to the job's subject when it is due, and refuses a second one."""
    message = first_message(NAMES, "g", "j", "j/a", b"1", {}, keyed=True, due=1_700_000_000.25)
    assert message.subject == "hf.later.g.j.j/a.1"
    assert message.headers == {
        "Nats-Msg-Id": "j/a",
        "Hf-Run": "j/a",
        "Nats-Expected-Last-Subject-Sequence": "0",
        "Nats-Schedule": "@at 2023-11-14T22:13:20.250Z",
        "Nats-Schedule-Target": "hf.job.g.j",
    }
    assert due_of(message.headers) == 1_700_000_000.25


def test_first_message_with_a_key_is_refused_while_a_delayed_one_waits() -> None:
    """The condition is on the subject of the delayed one."""
    found = first_message(NAMES, "g", "j", "j/a", b"1", {}, keyed=True)
    assert found.subject == "hf.job.g.j"
    assert found.headers["Nats-Expected-Last-Subject-Sequence-Subject"] == "hf.later.g.j.j/a.1"


def test_next_message_keeps_user_headers_and_replaces_ours() -> None:
    """A dead letter's own headers must not come back with its replay."""
    old = {"Mine": "1", "Hf-Reason": "failed", "Hf-Error": '"x"', "Nats-Msg-Id": "old"}
    message = next_message(
        NAMES, "g", "j", "j/a", b"1", old, number=3, failures=2, crashes=1, created=12.5
    )
    assert message.subject == "hf.job.g.j"
    assert message.headers == {
        "Mine": "1",
        "Hf-Run": "j/a",
        "Nats-Msg-Id": "j/a.3",
        "Hf-Attempt": "3",
        "Hf-Failures": "2",
        "Hf-Crashes": "1",
        "Hf-Created": "12.500",
    }


def test_next_message_with_a_mark_differs_from_one_without() -> None:
    """A replay is not taken for a parked message of the same number."""
    plain = next_message(NAMES, "g", "j", "r1", b"", {}, number=2, due=5.0)
    marked = next_message(NAMES, "g", "j", "r1", b"", {}, number=2, mark="-77", due=5.0)
    assert plain.headers["Nats-Msg-Id"] == "r1.2"
    assert plain.subject == "hf.later.g.j.r1.2"
    assert marked.headers["Nats-Msg-Id"] == "r1.2-77"
    assert marked.subject == "hf.later.g.j.r1.2-77"


@given(st.integers(2, 10**NUMBER_DIGITS - 1), st.integers(0, 999_999), st.text(max_size=200))
def test_heading_of_a_later_message_is_what_was_written(
    number: int, failures: int, key: str
) -> None:
    """Writing and reading are each other's inverse."""
    run = keyed_run("g", "j", key or "k")
    message = next_message(
        NAMES, "g", "j", run, b"", {}, number=number, failures=failures, created=5.25
    )
    heading = read_heading(message.headers, 1, STORED_NS)
    assert heading == (run, True, number, failures, 5.25)


def test_heading_of_a_made_up_id_is_not_keyed() -> None:
    """Only an id that somebody chose can come again."""
    run = make_id()
    assert read_heading({"Nats-Msg-Id": run}, 1, STORED_NS)[:2] == (run, False)
    assert read_heading({"Nats-Msg-Id": "order-7"}, 1, STORED_NS)[:2] == ("order-7", True)


def test_heading_of_an_event_is_derived_for_each_subscriber() -> None:
    """Two jobs that subscribe to one event have a run each, the same at every redelivery."""
    found = read_heading({"Nats-Msg-Id": "e1"}, 4, STORED_NS, ("default", "mail"))
    assert found[:2] == ("mail/=ee1", True)


@given(headers, st.integers(1, 10**9))
def test_heading_never_fails_and_is_the_same_for_worker_and_operator(
    found: dict[str, str], sequence: int
) -> None:
    """Whatever the headers are, both see one run id of a usable form and one number."""
    heading = read_heading(found, sequence, STORED_NS)
    kept = Kept(sequence, "hf.job.g.j", STORED_NS, b"", found)
    assert (kept.run, kept.stamp) == (heading.run, heading.number)
    assert set(heading.run) <= set(string.ascii_letters + string.digits + "_=/-")
    assert heading.number >= 1
    assert 0 <= heading.failures <= 1_000_000
    assert heading.created > 0


def test_number_of_nonsense_is_that_of_a_first_message() -> None:
    """16 digits and more lose precision in a JSON parser; 0 is no number of a message."""
    for text in ("0", "-1", "1e3", "²", "9" * 16, ""):
        assert number_of({"Hf-Run": "r", "Hf-Attempt": text}) == 1
    assert number_of({"Hf-Attempt": "7"}) == 1
    assert number_of({"Hf-Run": "", "Hf-Attempt": "7"}) == 1
    assert count_of({H_FAILURES: "12"}, H_FAILURES) == 12
    assert count_of({H_CRASHES: "9999999"}, H_CRASHES) == 1_000_000


def test_due_and_cause_of_nonsense_are_empty() -> None:
    """Headers come from outside."""
    assert due_of({"Nats-Schedule": "@every 5s"}) == 0.0
    assert due_of({"Nats-Schedule": "@at 2023-11-14T22:13:20"}) == 0.0
    assert cause_of({H_CAUSE: "a b"}) == ""
    assert user_headers({"Hf-Run": "x", "Nats-TTL": "1", "Mine": "y"}) == {"Mine": "y"}
