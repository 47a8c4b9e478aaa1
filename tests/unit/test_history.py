"""A line of history: its bytes, and what is not one."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.errors import Unreadable
from holdfast.model import history
from holdfast.model.run import Attempt, RunRecord
from holdfast.names import Names

RECORD = RunRecord(
    "done",
    "default",
    "resize",
    node="worker-1",
    token="worker-1.7",
    created=1000.5,
    started=1001.0,
    ended=1002.25,
    attempts=(Attempt(1, "worker-1", 77, 1001.0, 1002.25, "done"),),
    result=msgspec.Raw(b'{"key":"42"}'),
)

LINE = (
    b'{"run":"resize/42","record":{"state":"done","group":"default","job":"resize",'
    b'"node":"worker-1","token":"worker-1.7","created":1000.5,"started":1001.0,"ended":1002.25,'
    b'"attempts":[{"number":1,"node":"worker-1","epoch":77,"started":1001.0,"ended":1002.25,'
    b'"outcome":"done"}],"result":{"key":"42"}},"payload":"WzQyXQ==","headers":{"Tenant":"a"}}'
)


def test_line_is_stored_as_it_always_was() -> None:
    """Golden bytes: two versions read each other's history. Never change them: add new ones."""
    assert history.line("resize/42", RECORD, b"[42]", {"Tenant": "a"}, 100) == LINE
    found = history.decode(LINE)
    assert (found.run, found.payload, found.headers) == ("resize/42", b"[42]", {"Tenant": "a"})
    assert found.record.result == RECORD.result


def test_line_without_a_large_payload_keeps_its_size() -> None:
    """A payload that does not fit is left out, and the line says how large it was."""
    found = history.decode(history.line("r1", RECORD, b"x" * 101, largest=100))
    assert (found.payload, found.size) == (None, 101)


def test_empty_payload_is_a_payload() -> None:
    """A run without arguments can be run again; one whose payload is not kept cannot."""
    assert history.decode(history.line("r1", RECORD, b"")).payload == b""
    assert history.decode(history.line("r1", RECORD)).payload is None


def test_headers_that_cannot_be_read_back_are_left_out() -> None:
    """A foreign sender's header never costs a run its line."""
    for headers in ({"A": "line\nbreak"}, {"Nats-TTL": "1s"}, {"": "x"}):
        assert history.decode(history.line("r1", RECORD, b"", headers)).headers == {}


def test_line_of_a_newer_version_is_read() -> None:
    """Members that this version does not know are ignored."""
    found = history.decode(LINE[:-1] + b',"colour":"blue"}')
    assert found.identity == ("resize/42", 1002.25)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        LINE.replace(b'"run":"resize/42"', b'"run":"a b"'),
        LINE.replace(b'"run":"resize/42"', b'"run":""'),
        LINE.replace(b'"ended":1002.25,"attempts"', b'"ended":-1,"attempts"'),
        LINE.replace(b'"ended":1002.25,"attempts"', b'"attempts"'),
    ],
)
def test_damaged_line_is_unreadable(body: bytes) -> None:
    """Bytes from outside end in `Unreadable`, and in nothing else."""
    with pytest.raises(Unreadable):
        history.decode(body)


def test_subject_of_a_line_names_group_job_and_state() -> None:
    """Lines can be selected by group, job and state without a subject for each run."""
    names = Names("hf")
    found = names.parse_ended(names.ended("default", "resize", "done"))
    assert found == ("default", "resize", "done")
    assert names.parse_ended("hf.dead.default.resize") is None
