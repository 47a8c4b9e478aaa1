"""Stored values are JSON; a pickle is read only when told to, and never executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Unreadable
from holdfast.integrations.taskiq import PlainSerializer
from holdfast.integrations.taskiq.plain import readable

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(value=PLAIN, protocol=st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_plain_pickle_is_read_when_told_to(value: Any, protocol: int) -> None:
    """Whatever taskiq-nats can have stored comes back as it was."""
    body = pickle.dumps(value, protocol)
    assert PlainSerializer(read_pickled=True).loadb(body) == value


def test_pickle_is_refused_unless_told_to() -> None:
    """By default a pickle is not even looked into, and the error says what to do."""
    with pytest.raises(Unreadable, match="read_pickled=True"):
        PlainSerializer().loadb(pickle.dumps({"a": 1}))


class Evil:
    """A pickle of this executes a command when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_that_names_a_function_is_refused(protocol: int, tmp_path: Path) -> None:
    """Code in a pickle is not executed, also when pickles are read."""
    body = pickle.dumps({"cron": Evil(tmp_path / "pwned")}, protocol)
    with pytest.raises(Unreadable, match="only plain values"):
        PlainSerializer(read_pickled=True).loadb(body)
    assert not (tmp_path / "pwned").exists()


@given(body=st.binary(max_size=200))
def test_any_bytes_are_a_value_or_unreadable(body: bytes) -> None:
    """Nonsense in a bucket is one error of ours, whatever it is."""
    for serializer in (PlainSerializer(), PlainSerializer(read_pickled=True)):
        try:
            readable(serializer, body)
        except Unreadable:
            continue


@given(body=st.binary(max_size=60))
def test_any_broken_pickle_is_unreadable(body: bytes) -> None:
    """The same for bytes that begin as a pickle does."""
    try:
        readable(PlainSerializer(read_pickled=True), b"\x80\x04" + body)
    except Unreadable:
        return
