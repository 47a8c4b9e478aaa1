"""What the page of a job makes of parameters and totals."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import pytest

from holdfast.errors import InvalidInput
from holdfast.model.job import JobSpec
from holdfast.payload.published import Published, published, read_label
from holdfast.payload.signature import Signature
from holdfast.status.totals import Change, Counted, Pace, Period
from holdfast.web.pages import charts
from holdfast.web.pages.job_form import fields_of, payload
from holdfast.web.pages.jobs import pace, sample

ORDER = {"type": "integer"}


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (None, ""),
        (Published(("what",), ()), ""),
        (Published(("order",), ("order",), schemas={"order": ORDER}), "0"),
        (Published(("order",), ("order",)), "null"),
        (
            Published(("order", "note"), ("order",), schemas={"order": ORDER}),
            '{\n  "order": 0\n}',
        ),
    ],
)
def test_form_starts_with_what_is_required(parameters: Published | None, expected: str) -> None:
    """Each required parameter has an empty value of its type; without any, the form is empty."""
    assert sample(parameters) == expected


def test_period_without_runs_is_a_gap() -> None:
    """A line of percentiles ends where nothing ran, and another one begins after it."""
    times = (0.1, 0.2, 0.4)
    periods = [Period(at, {"done": 1}, 0, 0, times, times) for at in (0, 60, 240)]
    found = Counted(60, periods, 300.0)
    chart = charts.spread(found, 300.0, 300, lambda period: period.took)
    assert [name for name, _ in chart.series] == ["p50", "p50", "p95", "p95", "p99", "p99"]
    assert found.ends() == {"done": 3}
    assert found.behind(310.0) == 0.0
    assert found.behind(1000.0) == 300.0


def test_labels_of_days_are_dates() -> None:
    """A range of more than a day names days, a shorter one hours."""
    found = Counted(43_200, [Period(86_400, {"done": 2}, 0, 0, (1, 1, 1), (1, 1, 1))], 0.0)
    chart = charts.ended(found, 10 * 86_400.0, 9 * 86_400)
    assert chart.columns[0].label == "01-02"
    assert "2 done" in chart.hits[0].title


def period(at: int, **members: Any) -> Period:
    none = (0.0, 0.0, 0.0)
    return Period(at, members.pop("ended", {}), 0, 0, none, none, **members)


def test_lag_is_a_gap_while_nobody_counted() -> None:
    """Idle is a line at zero; two hours without a coordinator are a shaded gap, and no line."""
    counted = [period(at, waiting=5) for at in (0, 60)] + [period(at) for at in (600, 660)]
    chart = charts.lag(Counted(60, counted, 690.0), 719.0, 719)
    assert [name for name, _ in chart.series] == ["waiting", "second"] * 2
    first, last = (points for name, points in chart.series if name == "waiting")
    assert len({point.split(",")[1] for point in first.split()}) == 1, "5 throughout"
    assert last.split()[0].split(",")[1] == "160.0", "idle is zero"
    (gap,) = chart.blocks
    assert gap.look == "gap"
    assert first.split()[-1].split(",")[0] == f"{gap.x:.1f}"
    assert last.split()[0].split(",")[0] == f"{gap.x + gap.width:.1f}"
    assert chart.gaps
    assert "not counted" in gap.title


def test_bars_tell_not_counted_from_nothing_ended() -> None:
    """Before the first total and after the last one nobody counted; in between, nothing ended."""
    counted = [period(600, ended={"done": 2}), period(660), period(720)]
    chart = charts.ended(Counted(60, counted, 779.0), 1_200.0, 1_200)
    told = {hit.title.split(": ", 1)[1] for hit in chart.hits}
    assert told == {charts.NOT_COUNTED, "no runs ended", "2 done"}
    assert len([block for block in chart.blocks if block.look == "gap"]) == 10 + 8
    assert not charts.ended(Counted(60, [period(1_140)], 1_190.0), 1_200.0, 60).gaps


def test_nothing_is_counted_yet() -> None:
    """Without a coordinator the whole range is a gap, not a row of zeros."""
    chart = charts.lag(Counted(60, [], 0.0), 86_400.0, 900)
    assert [block.look for block in chart.blocks] == ["gap"]
    assert chart.series == []


# ---- the form


class Line(msgspec.Struct):
    sku: str
    count: int = 1


def order(
    order: int,
    note: str,
    kind: Literal["a", "b"] = "a",
    price: float = 1.5,
    fast: bool = False,
    lines: list[Line] | None = None,
    until: int | None = None,
    token: str = "hunter2",
) -> None: ...


def form(func: Callable[..., Any]) -> Published:
    found = read_label(published(Signature.of(func), spec=JobSpec("order", timeout_seconds=90)))
    assert found
    return found


def test_form_has_a_field_for_each_parameter() -> None:
    """With the kind of its type, its choices, and its default; defaults of secrets are not told."""
    found = {f.name: f for f in fields_of(form(order))}
    kinds = {name: field.kind for name, field in found.items()}
    assert kinds == {
        "order": "integer",
        "note": "text",
        "kind": "choice",
        "price": "number",
        "fast": "boolean",
        "lines": "json",
        "until": "integer",
        "token": "text",
    }
    assert [name for name, field in found.items() if field.required] == ["order", "note"]
    assert found["kind"].choices == ("a", "b")
    assert found["price"].default == "1.5"
    assert found["token"].default == ""


def test_form_sends_what_was_filled_in() -> None:
    """As values of their types; empty fields leave the default to the job."""
    given = {"p.order": "7", "p.note": "", "p.fast": "true", "p.lines": '[{"sku": "x"}]'}
    body = payload(form(order), given)
    assert json.loads(body) == {"order": 7, "note": "", "fast": True, "lines": [{"sku": "x"}]}
    assert Signature.of(order).decode(body).kwargs["lines"] == [Line("x")]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "order is needed"),
        ({"p.order": "x"}, "order: expected a value of type integer"),
        ({"p.order": "1.5"}, "order: expected a whole number"),
        ({"p.order": "1", "p.lines": "[,"}, "lines: expected JSON"),
    ],
)
def test_form_says_which_field_is_wrong(given: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        payload(form(order), given)


def test_form_of_one_parameter_sends_its_value() -> None:
    """As a sender in Python would; nothing at all if it is left to its default."""

    def tidy(what: str = "shelves") -> None: ...

    assert payload(form(tidy), {"p.what": "boxes"}) == b'"boxes"'
    assert payload(form(tidy), {"p.what": ""}) == b""


def test_job_without_known_parameters_has_no_fields() -> None:
    def anything(**members: Any) -> None: ...

    assert fields_of(None) == []
    assert fields_of(form(anything)) == []


def test_options_of_a_job_are_published_in_words() -> None:
    options = form(order).options
    assert options["delivery"] == "effectively_once"
    assert options["timeout"] == "1m30s"
    assert "attempts" in options["retry"]
    assert "debounce" not in options


def test_jobs_that_got_slower_say_so() -> None:
    """A week is compared with the week before; what is within the steps of counting is not told."""

    def told(now: float, before: float, runs: int = 5) -> tuple[str, str]:
        return pace(Change(Pace(runs, now / 2, now), Pace(5 if before else 0, 0, before)))

    assert told(3.0, 1.0) == ("3 s", "3.0× slower")
    assert told(0.5, 1.0) == ("500 ms", "2.0× faster")
    assert told(1.1, 1.0) == ("1.1 s", "")
    assert told(1.0, 0.0) == ("1 s", "")
    assert told(0.0, 1.0, runs=0) == ("", "")
