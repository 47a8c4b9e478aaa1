"""Rendering: what templates may do, what they may not, and how files are merged."""

from __future__ import annotations

import asyncio
import copy
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import SettingsError
from holdfast.settings.renderer import Renderer
from holdfast.settings.rendering import check_template, merge, render
from holdfast.settings.resolving import placeholders, resolve

FACTS = {"os": "linux", "hosts": ["a", "b"]}


def test_files_are_rendered_with_facts_and_merged_in_order() -> None:
    """Mappings are merged key by key; anything else is replaced by what comes later."""
    first = "os: {{ facts.os }}\nmap: {a: 1, deep: {x: 1}}\nlist: [1, 2]\nday: 2026-01-02\n"
    second = "map: {b: 2, deep: {y: 2}}\nlist: [3]\n"
    second += "hosts:\n{% for h in facts.hosts %}\n- {{ h }}\n{% endfor %}"
    assert render([("a", first), ("b", second), ("c", "")], FACTS) == {
        "os": "linux",
        "map": {"a": 1, "b": 2, "deep": {"x": 1, "y": 2}},
        "list": [3],
        "day": "2026-01-02",
        "hosts": ["a", "b"],
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% include '/etc/passwd' %}", "cannot read files"),
        ("{% import 'x' as x %}", "cannot read files"),
        ("{% extends 'x' %}", "cannot read files"),
        ("a: {{ open('/etc/passwd').read() }}", "'open' is undefined"),
        ("a: {{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("a: {{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe"),
        ("a: {{ '{0.__class__}'.format(1) }}", "unsafe"),
        ("a: {{ facts.update(x=1) }}", "unsafe"),
        ("a: {{ range(10**9) | list }}", "Range too big"),
        ("a: {{ facts.missing }}", "no attribute 'missing'"),
        ("a: {{ 1 / 0 }}", "ZeroDivisionError"),
        ("a: {{ ", "cannot be read"),
        ("a: 1\na: 2", "occurs twice"),
        ("1: 2", "is no text"),
        ("a: .inf", "not finite"),
        ("a: !!python/name:os.system x", "not YAML"),
        ("a: !encrypted x", "not YAML"),
        ("- 1", "not to a mapping"),
        ("{% for i in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}", "more than 1,048,576"),
        ("a: " + "[" * 100 + "]" * 100, "nested more than"),
    ],
)
def test_template_that_does_what_it_must_not_is_refused(text: str, words: str) -> None:
    """Each with a sentence that names the file and what was wrong."""
    with pytest.raises(SettingsError) as refused:
        render([("bad", text)], FACTS)
    assert words in str(refused.value)
    assert "bad.yaml" in str(refused.value)


def test_publisher_refuses_a_template_that_reads_files() -> None:
    """Before it reaches any agent."""
    with pytest.raises(SettingsError, match="line 2: templates cannot read files"):
        check_template("f", "a: 1\n{% include 'x' %}")


async def test_endless_and_greedy_templates_are_stopped() -> None:
    """The child is killed, the message says what happened, the next request is served."""
    renderer, patient = Renderer(seconds=0.5), Renderer(seconds=30)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    laughs = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
        for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    story = [
        (renderer, loop, "rendering bad.yaml took more than 0.5 s"),
        (renderer, laughs, "rendering bad.yaml took more than 0.5 s"),
        (patient, "a: {{ 'x' * 10**10 }}", "more than 512 MiB of memory: bad.yaml"),
        (patient, "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "calls itself without end"),
    ]
    try:
        for own, text, words in story:
            with pytest.raises(SettingsError) as refused:
                await own.render([("bad", text)], FACTS)
            assert words in str(refused.value)
            assert refused.value.reason == "template"
        assert await patient.render([("good", "a: {{ facts.os }}")], FACTS) == {"a": "linux"}
    finally:
        await renderer.close()
        await patient.close()


async def test_child_opens_no_file_even_outside_of_the_sandbox(tmp_path: Path) -> None:
    """Should a template ever break out: the process has no descriptor left to open a file with."""
    breakout = tmp_path / "breakout.py"
    breakout.write_text(
        "from holdfast.settings import child\n"
        "child.render = lambda files, facts: {'text': open('/etc/passwd').read()}\n"
        "child.main()\n"
    )
    body = json.dumps({"files": [["f", ""]], "facts": {}, "seconds": 5}).encode()
    done = subprocess.run(
        [sys.executable, str(breakout)],
        input=struct.pack(">I", len(body)) + body,
        capture_output=True,
        check=False,
    )
    assert b"Too many open files" in done.stdout
    assert b"root:" not in done.stdout


async def test_idle_child_ends_and_the_next_request_starts_one() -> None:
    """Nothing is left running on a host whose settings never change."""
    renderer = Renderer(idle_seconds=0.05)
    await renderer.render([("a", "a: 1")], {})
    child = renderer._child
    assert child is not None
    await asyncio.wait_for(child.wait(), 30)
    assert await renderer.render([("a", "a: 2")], {}) == {"a": 2}
    await renderer.close()


plain = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.lists(inner, max_size=3)
    ),
    max_leaves=10,
)
mappings = st.dictionaries(st.text(max_size=3), plain, max_size=4)


@settings(max_examples=40, deadline=None)
@given(mappings, mappings, mappings)
def test_merging_changes_no_side_and_is_stable(a: dict, b: dict, c: dict) -> None:  # type: ignore[type-arg]
    """What was laid on top stays on top when it is laid there again."""
    before = copy.deepcopy((a, b, c))
    left = merge(merge(a, b), c)
    assert (a, b, c) == before
    assert merge(left, c) == left
    assert merge({}, a) == a
    assert merge(a, {}) == a


def test_secrets_take_the_place_of_their_placeholders() -> None:
    """Whole values only; a placeholder anywhere else fails everything."""
    values = {"a": "__HOLDFAST_SECRET(f:a)__", "l": [1, "__HOLDFAST_SECRET(f:l.1)__"], "b": "x"}
    found = list(placeholders(values))
    assert found == [(("a",), "f:a"), (("l", 1), "f:l.1")]
    resolve(values, found, lambda id: f"<{id}>")
    assert values == {"a": "<f:a>", "l": [1, "<f:l.1>"], "b": "x"}


@pytest.mark.parametrize(
    "values",
    [
        {"a": "url://__HOLDFAST_SECRET(f:a)__@host"},
        {"__HOLDFAST_SECRET(f:a)__": 1},
        {"a": ["__HOLDFAST_SECRET(broken"]},
    ],
)
def test_placeholder_where_no_secret_can_stand_is_unresolved(values: dict[str, object]) -> None:
    """A secret is a terminal value; templates cannot build with it."""
    with pytest.raises(SettingsError) as refused:
        list(placeholders(values))
    assert refused.value.reason == "unresolved"
