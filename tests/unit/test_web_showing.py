"""Data as people read it: JSON that folds, tracebacks, searches for members."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from holdfast.model.fleet import Return
from holdfast.status.searching import Member, member
from holdfast.status.totals import Counted
from holdfast.web.pages import charts
from holdfast.web.pages.fleet import kinds
from holdfast.web.pages.showing import FOLDED, MOST_NODES, frames, json_tree

TRACEBACK = """Traceback (most recent call last):
  File "/usr/lib/python3.11/site-packages/holdfast/worker/calling.py", line 10, in call
    await handler()
  File "/srv/shop/jobs.py", line 42, in charge
    bank.pay(order)
    ^^^^^^^^^^^^^^^
  File "/usr/lib/python3/dist-packages/bank/client.py", line 7, in pay
    raise Refused(order)
  File "/srv/shop/bank.py", line 3, in refuse
    raise ValueError("no")
ValueError: no
and more
"""


def test_traceback_shows_the_users_frames_first() -> None:
    """Frames of libraries and of Holdfast are one click away; the error stays."""
    found = frames(TRACEBACK)
    assert re.findall(r'File "([^"]+)"', found.own) == ["/srv/shop/jobs.py", "/srv/shop/bank.py"]
    assert found.own.endswith("ValueError: no\nand more")
    assert found.whole == TRACEBACK


@pytest.mark.parametrize("text", ["", "ValueError: no", 'File "x"', "  File broken\n" * 3])
def test_traceback_that_cannot_be_split_is_shown_whole(text: str) -> None:
    """Nothing is lost of an error of another form."""
    assert frames(text) == (text, "")


def test_traceback_without_own_frames_is_shown_whole() -> None:
    """An error inside a library is still shown."""
    text = TRACEBACK.replace("/srv/shop/", "/usr/lib/python3/")
    assert frames(text).own == text


def test_json_folds_and_its_text_is_that_json() -> None:
    """What is copied from a tree is the document; markup in it is text."""
    value: dict[str, Any] = {
        "a": [1, {"b": "<img>"}],
        "": None,
        "many": list(range(FOLDED + 1)),
        "c": {},
    }
    tree = json_tree(json.dumps(value))
    assert tree is not None
    assert "<img>" not in tree
    text = re.sub(r"<[^>]+>", "", tree).replace("&#34;", '"')
    text = text.replace("&lt;", "<").replace("&gt;", ">")
    assert json.loads(text) == value
    assert tree.count("<details open>") == 3
    assert tree.count("<details>") == 1


@pytest.mark.parametrize(
    "text", ["", "5", '"x"', "{", "[]", "[" * 10_000, f"[{'1,' * MOST_NODES}1]"]
)
def test_json_that_does_not_fold_is_left_alone(text: str) -> None:
    """Single values, nothing, damage, and more than a browser draws at once."""
    assert json_tree(text) is None


def test_search_for_a_member_looks_at_payload_and_headers() -> None:
    """At any depth, as text, and only the whole value."""
    wanted = member("customer=7")
    assert wanted == Member("customer", "7")
    for body in (b'{"customer": 7}', b'{"order": {"customer": "7"}}', b'[{"customer":7}]'):
        assert wanted.matches(body, {}), body
    for body in (b'{"customer": 77}', b'{"custom": 7}', b"customer=7", b"\xff", b""):
        assert not wanted.matches(body, {}), body
    assert wanted.matches(b"", {"Customer": "7"})
    assert not wanted.matches(b"", {"Customer": "8"})
    assert member("order-7") is None
    assert member("customer=") is None
    assert Member("", "7").matches(b"7", {})
    assert not Member("", "7").matches(b'{"customer":7}', {})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.0042, "4.2 ms"),
        (0.149, "149 ms"),
        (2.5, "2.5 s"),
        (59, "59 s"),
        (90, "1 min"),
    ],
)
def test_axis_says_durations_as_people_write_them(seconds: float, text: str) -> None:
    """Never with an exponent, which is wider than the axis."""
    assert charts.brief(seconds) == text


def test_chart_of_a_job_without_runs_costs_nothing() -> None:
    """A range without a single period is empty, and not walked from 1970 on."""
    begun = time.process_time()
    found = charts.spread(Counted(60, [], 0.0), 1.8e9, 3_600, lambda period: period.took)
    assert found.empty
    assert time.process_time() - begun < 0.5


async def test_returns_of_a_fleet_are_same_or_different() -> None:
    """Most agents in one line, the others as a difference from them."""

    class Page:
        async def value(self, value: Any) -> str:
            return json.dumps(value, indent=2)

    returns = {
        f"web{n}": Return("f", f"web{n}", "ok", value={"kernel": "6.1" if n < 997 else "5.4"})
        for n in range(1000)
    }
    returns["bad"] = Return("f", "bad", "failed", error="no")
    page: Any = Page()
    usual, other = await kinds(page, returns)
    assert (len(usual.agents), usual.diff) == (997, "")
    assert other.agents == ["web997", "web998", "web999"]
    assert '-  "kernel": "6.1"' in other.diff
    assert '+  "kernel": "5.4"' in other.diff
