"""Target expressions: what they mean, what they refuse, and how long they may take."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.model.target import MOST_WORDS, InvalidTarget, parse

FLEET: dict[str, dict[str, Any]] = {
    "web1": {"os": "Linux", "mem": 2048, "net": {"eth0": {"mtu": 1500}}, "roles": ["edge", "api"]},
    "web2": {"os": "Linux", "mem": 8192, "net": {"eth0": {"mtu": 9000}}, "roles": ["api"]},
    "db1": {"os": "FreeBSD", "mem": "16384", "version": "9.10.1", "ssd": True},
    "db-eu-7": {"os": "linux", "mem": 512.5, "a.b": "flat"},
    "bare": {},
}


def selected(expression: str) -> set[str]:
    return set(parse(expression).select(FLEET))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("*", set(FLEET)),
        ("web*", {"web1", "web2"}),
        ("web?", {"web1", "web2"}),
        ("web[13]", {"web1"}),
        ("web[!1]", {"web2"}),
        ("db1", {"db1"}),
        ("WEB1", set()),
        ("E@web\\d", {"web1", "web2"}),
        ("E@^db", {"db1", "db-eu-7"}),
        ("E@b1", set()),
        ("E@.*-(eu|us)-\\d+$", {"db-eu-7"}),
        ("L@web1,bare,nobody", {"web1", "bare"}),
        ("G@os:linux", {"web1", "web2", "db-eu-7"}),
        ("I@os:linux", {"web1", "web2", "db-eu-7"}),
        ("G@os:*bsd", {"db1"}),
        ("G@os=*bsd", set()),
        ("G@os!=linux", {"db1"}),
        ("not G@os:linux", {"db1", "bare"}),
        ("G@mem>=8192", {"web2", "db1"}),
        ("G@mem>512", {"web1", "web2", "db1", "db-eu-7"}),
        ("G@mem<=512.5", {"db-eu-7"}),
        ("G@mem:2048.0", {"web1"}),
        ("G@net.eth0.mtu>1500", {"web2"}),
        ("G@net.eth0:1500", set()),
        ("G@net.eth1.mtu!=1", set()),
        ("G@a.b:flat", {"db-eu-7"}),
        ("G@roles:edge", {"web1"}),
        ("G@roles!=edge", {"web2"}),
        ("G@ssd:true", {"db1"}),
        ("G@ssd:1", set()),
        ("G@version>9.2", set()),  # not a number: texts, and '1' comes before '2'
        ("web* and G@mem>4096", {"web2"}),
        ("web1 or db1 and G@os:linux", {"web1"}),
        ("(web1 or db1) and G@os:linux", {"web1"}),
        ("not (web* or db*)", {"bare"}),
        ("NOT web* And Not bare", {"db1", "db-eu-7"}),
        ("not not web1", {"web1"}),
        ("(E@web(1|3) or E@d[)b]1)", {"web1", "db1"}),
        ("( ( web1 ) )", {"web1"}),
    ],
)
def test_target_selects_what_it_says(expression: str, expected: set[str]) -> None:
    """Each kind of word, each operator and their precedence."""
    assert selected(expression) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "  ",
        None,
        7,
        "web1 web2",
        "and",
        "web1 and",
        "or web1",
        "not",
        "(web1",
        "web1)",
        "()",
        "X@web",
        "@web",
        "G@os",
        "G@os:",
        "G@:linux",
        "L@",
        "L@,",
        "L@a,b*",
        "L@a, b",
        "E@",
        "E@(",
        "E@[",
        "web,db",
        "web>1",
        "web1\x00",
        "wéb",
        "(" * 60 + "web1" + ")" * 60,
        " or ".join(["web1"] * (MOST_WORDS + 1)),
        "x" * 600_000,
        "*a" * 400,
    ],
)
def test_target_refuses_what_it_does_not_understand(expression: object) -> None:
    """A command that was meant for some never goes to others because of a slip."""
    with pytest.raises(InvalidTarget):
        parse(expression)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(a*)*b",
        "(a|a)*b",
        "(a|aa)+b",
        "(a?){30}b",
        "a?" * 25 + "a" * 25,
        ".*.*.*.*.*b",
        "(.*a){20}",
        "((a{1,9}){1,9}){1,9}b",
        "(a)\\1",
        "(?=a+)+b",
        "(?:a|b|ab)*c",
        "a{0,60}" * 4 + "b",
    ],
)
def test_regex_that_could_take_for_ever_is_refused(pattern: str) -> None:
    """Slow patterns are refused when they are parsed, before any agent is looked at."""
    with pytest.raises(InvalidTarget, match=r"too long|cannot be used"):
        parse("E@" + pattern)


@settings(max_examples=300, deadline=None)
@given(
    st.from_regex(r"([ab.](\*|\+|\?|\{1,3\})?|\((a|b)[ab]?\)(\*|\?|\{2\})?){1,8}c", fullmatch=True)
)
def test_regex_that_is_accepted_ends_soon(pattern: str) -> None:
    """Whatever is accepted needs a bounded number of steps on the worst of ids."""
    try:
        target = parse("E@" + pattern)
    except InvalidTarget:
        return
    for worst in ("a" * 64, "ab" * 32):  # an exponential one would not end today
        assert target.matches(worst, {}) in (True, False)


def test_target_names_agents_that_nobody_knows_yet() -> None:
    """A list is meant as it stands: an agent that is not there must show up as unreachable."""
    assert parse("L@b,a,b").named == ("b", "a")
    assert parse("web1").named == ("web1",)
    assert parse("web*").named is None
    assert parse("L@a,b and not a").named is None


def test_target_knows_whether_it_needs_facts() -> None:
    """Ids are known sooner than facts."""
    assert parse("web1 or G@os:linux").needs_facts
    assert not parse("web1 or E@db.*").needs_facts


WORDS = ["web*", "E@db.*", "L@web1,bare", "G@os:linux", "G@mem>=2048", "G@roles:api"]


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> tuple[str, Any]:
    """An expression and what it means, as a Python function."""
    kind = draw(st.sampled_from(["word"] if not depth else ["word", "and", "or", "not"]))
    if kind == "word":
        word = draw(st.sampled_from(WORDS))
        return word, lambda agent: agent in selected(word)
    text, means = draw(expressions(depth=depth - 1))
    if kind == "not":
        return f"not ({text})", lambda agent: not means(agent)
    other, also = draw(expressions(depth=depth - 1))
    if kind == "and":
        return f"({text}) and ({other})", lambda agent: means(agent) and also(agent)
    return f"({text} or {other})", lambda agent: means(agent) or also(agent)


@settings(max_examples=200, deadline=None)
@given(expressions())
def test_compound_means_what_logic_says(made: tuple[str, Any]) -> None:
    """Any nesting selects exactly what its parts say."""
    text, means = made
    assert selected(text) == {agent for agent in FLEET if means(agent)}


@settings(max_examples=300, deadline=None)
@example("E@[[", "")
@example("E@[[a]", "")
@given(st.text(max_size=60), st.text(max_size=20))
def test_target_is_parsed_or_refused_never_broken(text: str, value: str) -> None:
    """Any text gives a target that can be asked, or an InvalidTarget."""
    for expression in (text, "G@" + text, "E@" + text, f"({text}) or web1"):
        try:
            target = parse(expression)
        except InvalidTarget:
            continue
        fleet = {"web1": {text: value, "os": [value, 1, None, True, 1.5, {}]}}
        assert set(target.select(fleet)) <= {"web1"}


def test_target_over_a_hundred_thousand_fact_sets(report: Any) -> None:
    """Every one of a large fleet is judged, and the time goes into the report."""
    fleet = {
        f"web{i}": {
            "os": "linux",
            "mem": i % 5000,
            "net": {"mtu": 1500},
            "roles": ["a", f"r{i % 9}"],
        }
        for i in range(100_000)
    }
    for expression, expected in (
        ("G@os:linux", 100_000),
        ("web1* and G@mem>=2500", 5_000),
        ("G@roles:r3 and G@net.mtu=1500 and not E@web9.*", 9_877),
    ):
        target = parse(expression)
        started = time.perf_counter()
        found = len(target.select(fleet))
        took = time.perf_counter() - started
        report(f"{expression!r} over 100,000 fact sets: {took * 1000:.0f} ms")
        assert found == expected
