"""Names on the wire: built, parsed, and never unsafe."""

from __future__ import annotations

import os
import re
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import names
from holdfast.errors import InvalidName
from holdfast.names import Names

SAFE_TOKEN = re.compile(r"[a-zA-Z0-9_=-]+")
anything = st.text(st.characters())  # surrogates included
plain = string.ascii_letters + string.digits + "_-"
good = st.from_regex(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,63}", fullmatch=True)
good_events = st.from_regex(
    r"[a-z0-9][a-z0-9_-]{0,9}(\.[a-z0-9][a-z0-9_-]{0,9}){0,7}", fullmatch=True
)
wire = Names("hf")


@given(anything)
def test_encode_gives_one_safe_token(text: str) -> None:
    """No text reaches a subject as a wildcard, a dot, a space or a line break."""
    token = names.encode(text)
    assert SAFE_TOKEN.fullmatch(token)
    assert len(token) <= 160


@given(st.text(st.characters(), min_size=1, max_size=13))
def test_encode_is_undone_by_decode(text: str) -> None:
    """A text that fits is read back as it was, half surrogate pairs included."""
    assert names.decode(names.encode(text)) == text


@given(st.text(plain, min_size=1, max_size=160))
def test_encode_leaves_plain_text_alone(text: str) -> None:
    """What a subject can carry is not changed, so that people recognise their keys."""
    assert names.encode(text) == text


@given(st.lists(anything, unique=True, min_size=2, max_size=20))
def test_encode_keeps_different_texts_apart(texts: list[str]) -> None:
    """Two keys are never one token."""
    assert len({names.encode(t) for t in texts}) == len(texts)


@given(anything)
def test_encode_of_long_text_is_a_hash_of_its_own(text: str) -> None:
    """A long text becomes a hash, which no other text can imitate."""
    token = names.encode("é" * 161 + text)
    assert token.startswith("=h")
    assert names.decode(token) == token
    assert names.encode(token) != token


@given(st.one_of(anything, st.text("=0123456789ABCDEF", max_size=8)))
def test_decode_never_raises(token: str) -> None:
    """A token that nobody encoded is shown as it is."""
    assert isinstance(names.decode(token), str)


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "a b",
        "a.b",
        "a*",
        ">",
        "*",
        "-a",
        "_a",
        "a\n",
        "\n",
        "é",
        "a" * 65,
        "a/b",
        "a=b",
        None,
        5,
        b"a",
        "\ud800",
        "a\x00",
        "A\u0301",
        "１",
    ],
)
def test_check_name_refuses_what_a_token_cannot_carry(name: Any) -> None:
    """Job, group and node names are narrow, and the message says how."""
    with pytest.raises(InvalidName, match="letters, digits") as caught:
        names.check_name(name, "job")
    assert "\n" not in str(caught.value)


@given(good)
def test_check_name_accepts_ordinary_names(name: str) -> None:
    """Letters, digits, '-' and '_' up to 64 characters are fine."""
    assert names.check_name(name, "job") == name


@given(anything)
def test_check_name_lets_nothing_unsafe_through(text: str) -> None:
    """Whatever passes is one safe token."""
    try:
        assert SAFE_TOKEN.fullmatch(names.check_name(text, "job"))
    except InvalidName:
        pass


@pytest.mark.parametrize("event", ["", ".", "a.", ".a", "a..b", "a.*", ">", "a.b\n", 5, None])
def test_check_event_refuses_bad_names(event: Any) -> None:
    """Event names may have dots between their parts and nowhere else."""
    with pytest.raises(InvalidName):
        names.check_event(event)


@given(good_events)
def test_event_subject_is_parsed_back(event: str) -> None:
    """Building and parsing an event's subject loses nothing."""
    assert wire.parse_event(wire.event(names.check_event(event))) == event
    assert wire.parse_event(f"other.event.{event}") is None


@given(good, good, anything.filter(bool))
def test_keyed_run_is_an_id_and_one_token(group: str, job: str, key: str) -> None:
    """Any key gives a run id that `check_run` accepts and a subject can carry."""
    run = names.keyed_run(group, job, key)
    assert names.check_run(run) == run
    assert not re.search(r"[.*>\s]", run)
    assert run == names.keyed_run(group, job, key)


@given(st.lists(st.tuples(good, good, anything.filter(bool)), unique=True, min_size=2, max_size=10))
def test_keyed_run_keeps_jobs_and_groups_apart(keys: list[tuple[str, str, str]]) -> None:
    """The same key of another job or group is another run."""
    assert len({names.keyed_run(*key) for key in keys}) == len(keys)


@pytest.mark.parametrize("key", ["", None, 5, b"x"])
def test_keyed_run_refuses_a_key_that_is_no_text(key: Any) -> None:
    """A key that was forgotten does not become a run that all share."""
    with pytest.raises(InvalidName, match="key"):
        names.keyed_run("default", "resize", key)


def test_id_maker_gives_no_id_twice() -> None:
    """Two makers, as in two processes, share no id; each id is usable as a run id."""
    one, other = names.IdMaker(), names.IdMaker()
    ids = {maker() for maker in (one, other) for _ in range(5000)}
    assert len(ids) == 10_000
    assert all(names.check_run(i) == i for i in ids)


def test_id_maker_gives_a_forked_child_ids_of_its_own() -> None:
    """A prefork server's children do not give one id to two runs: one would be dropped."""
    make = names.IdMaker()
    before = make()
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        os.write(theirs, make().encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        other = answer.read()
    assert names.check_run(other) == other
    assert other[:12] != before[:12]
    assert other not in {make() for _ in range(10)}


@given(st.integers(1, 2**63), st.integers(0, 2**63))
def test_sequence_run_is_a_run_id(sequence: int, timestamp: int) -> None:
    """A message without headers gets an id from where and when it was stored."""
    run = names.sequence_run(sequence, timestamp)
    assert names.check_run(run) == run


@given(good, good)
def test_subjects_of_a_job_are_parsed_back(group: str, job: str) -> None:
    """Job, dead letter, delayed run and consumer names all give back group and job."""
    assert wire.parse_job(wire.job(group, job)) == (group, job)
    assert wire.parse_dead(wire.dead_letter(group, job)) == (group, job)
    assert names.parse_consumer(names.consumer(group, job)) == (group, job)
    run = names.keyed_run(group, job, "a.b c")
    assert wire.parse_later(wire.later(group, job, run, 2)) == (group, job, run)
    assert wire.parse_cancel(wire.cancel(run)) == run


@given(anything)
def test_parsers_answer_none_for_foreign_names(text: str) -> None:
    """What is not ours is None, and never an exception."""
    assert wire.parse_job(f"x.{text}") is None
    assert wire.parse_dead(f"x.{text}") is None
    assert wire.parse_later(f"x.{text}") is None
    assert names.parse_consumer(text) is None or "=" in text


@given(good, anything.filter(bool))
def test_kv_key_is_parsed_back(bucket: str, key: str) -> None:
    """The key of a stored record is read from its subject."""
    token = names.encode(key)
    assert names.kv_key(bucket, names.kv_subject(bucket, token)) == token


@pytest.mark.parametrize("namespace", ["", "HF", "a.b", "1a", "a_b", "a" * 33, "*", None, "é"])
def test_namespace_refuses_bad_names(namespace: Any) -> None:
    """A namespace is lower case, so that no two share an upper-case stream name."""
    with pytest.raises(InvalidName, match="namespace"):
        Names(namespace)


def test_namespaces_share_no_name() -> None:
    """Two namespaces have different streams, subjects and buckets."""
    one, other = Names("a"), Names("b")
    for kind in ("jobs", "events", "dead", "ledger", "runs", "nodes", "objects"):
        assert getattr(one, kind) != getattr(other, kind)
    assert one.job("g", "j") != other.job("g", "j")


@pytest.mark.parametrize("name", ["Hf-Run", "hf-anything", "NATS-Msg-Id", "nats-ttl"])
def test_check_header_refuses_reserved_names(name: str) -> None:
    """A user's header can never steer the server or Holdfast."""
    with pytest.raises(InvalidName, match="reserved"):
        names.check_header(name, "x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("", "x"),
        ("a:b", "x"),
        ("a b", "x"),
        ("é", "x"),
        ("a\r\n", "x"),
        (None, "x"),
        ("a", "x\r\nHf-Run: y"),
        ("a", "\x00"),
        ("a", None),
        ("a", "\ud800"),
    ],
)
def test_check_header_refuses_what_could_forge_a_line(name: Any, value: Any) -> None:
    """No header name or value can end its line."""
    with pytest.raises(InvalidName):
        names.check_header(name, value)


def test_attempt_message_id_differs_for_each_attempt() -> None:
    """The first publish carries the run itself, each later one its attempt."""
    assert names.attempt_message_id("r1", 1) == "r1"
    assert names.attempt_message_id("r1", 2) == "r1.2"


def test_pause_key_is_read_back() -> None:
    """Group and job of a pause; other keys of the same bucket are none."""
    assert names.parse_pause_key(names.pause_key("video", "re-size_2")) == ("video", "re-size_2")
    assert names.parse_pause_key(names.schedule_key("pause")) is None
    assert names.parse_pause_key(names.app_key("shop")) is None
