"""Durations as people write them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import durations
from holdfast.errors import InvalidInput


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (30, 30),
        (1.5, 1.5),
        ("30", 30),
        (" 2.5 ", 2.5),
        ("500ms", 0.5),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("1.5m", 90),
        ("2d", 172800),
        ("1w", 604800),
        (timedelta(hours=1), 3600),
        (0, 0),
    ],
)
def test_seconds_reads_every_form(value: durations.Duration, seconds: float) -> None:
    """Numbers, texts and timedeltas all become seconds."""
    assert durations.seconds(value) == seconds


@pytest.mark.parametrize(
    "value",
    [
        -1,
        True,
        None,
        "",
        "m",
        "1x",
        "1 0s",
        "-5s",
        "nan",
        "inf",
        "1e400",
        float("nan"),
        float("inf"),
        10**400,
        -(10**400),
        "9" * 400 + "s",
        "101000w",
        timedelta(-1),
        [],
        b"1s",
    ],
)
def test_seconds_refuses_what_is_no_duration(value: Any) -> None:
    """Negative, endless and unreadable durations are refused by name, with nothing else raised."""
    with pytest.raises(InvalidInput, match="delay"):
        durations.seconds(value, "delay")


@given(st.one_of(st.text(), st.text("0123456789.smhdw ")))
def test_seconds_never_raises_anything_else(text: str) -> None:
    """Any text gives seconds or `InvalidInput`."""
    try:
        assert 0 <= durations.seconds(text) < float("inf")
    except InvalidInput:
        pass


@given(st.integers(0, 10**9))
def test_text_of_whole_seconds_is_read_back_exactly(value: int) -> None:
    """Writing and reading whole seconds loses nothing."""
    assert durations.seconds(durations.text(value)) == value


@given(st.floats(0, 10**6))
def test_text_is_read_back_within_its_precision(value: float) -> None:
    """Below a minute the text is exact to the millisecond, above it to the second."""
    precision = 0.00051 if value < 60 else 0.51
    assert durations.seconds(durations.text(value)) == pytest.approx(value, abs=precision)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0s"),
        (0.25, "250ms"),
        (0.9996, "1s"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m"),
        (90, "1m30s"),
        (86400, "1d"),
        (90061, "1d1h1m1s"),
    ],
)
def test_text_is_the_short_way(value: float, text: str) -> None:
    """People see the units they would write themselves."""
    assert durations.text(value) == text
