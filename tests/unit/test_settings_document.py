"""Documents of the settings: templates around YAML, and the secrets cut out of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import SettingsError
from holdfast.settings.document import TAG, mask, read, secrets
from holdfast.settings.editing import put

CANARY = "canary-plaintext"


def values(text: str) -> dict[str, str]:
    return {secret.path: secret.value for secret in secrets("f", text)}


def test_secrets_are_found_wherever_they_stand() -> None:
    """In mappings, lists, blocks, flow style, both branches of a statement; all text stays."""
    text = """\
# a comment
db:
  host: {{ facts.host }}
  {% if facts.os == 'x' %}
  password: !encrypted one
  {% else %}
  password: !encrypted two
  {% endif %}
  pem: !encrypted |
    first
    second
list:
  - !encrypted three
  - {a: !encrypted "four", b: 5}
"""
    assert values(text) == {
        "db.password": "one",
        "db.password~2": "two",
        "db.pem": "first\nsecond\n",
        "list.0": "three",
        "list.1.a": "four",
    }
    assert (
        read("f", text).text
        == """\
# a comment
db:
  host: {{ facts.host }}
  {% if facts.os == 'x' %}
  password: "__HOLDFAST_SECRET(f:db.password)__"
  {% else %}
  password: "__HOLDFAST_SECRET(f:db.password~2)__"
  {% endif %}
  pem: "__HOLDFAST_SECRET(f:db.pem)__"
list:
  - "__HOLDFAST_SECRET(f:list.0)__"
  - {a: "__HOLDFAST_SECRET(f:list.1.a)__", b: 5}
"""
    )


@pytest.mark.parametrize("value", ["a{{b}}c", "{% raw %}", "x}}y", "{#", "p{{w", "hf1", "#no"])
def test_secret_that_looks_like_a_template_is_taken_as_it_stands(value: str) -> None:
    """What a secret contains is nobody's syntax."""
    text = f"a: {{{{ facts.x }}}}\nb: !encrypted '{value}'\n"
    assert values(text) == {"b": value}
    assert value not in read("f", text).text.replace("{{ facts.x }}", "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"a: !encrypt {CANARY}", "tag that is not known"),
        (f"a: !!python/name:os.system {CANARY}", "tag that is not known"),
        (f"a: !encrypted [{CANARY}]", "before several values"),
        (f"# a: !encrypted {CANARY}", "cannot be understood"),
        (f"a: '!encrypted {CANARY}'", "cannot be understood"),
        (f"a: {{{{ '!encrypted {CANARY}' }}}}", "cannot be understood"),
        (f"? !encrypted {CANARY}\n: 1", "a key that is no text"),
        (f"a: &x !encrypted {CANARY}\nb: *x", "anchor"),
        (f"a: !encrypted *{CANARY}", "not YAML at line 1"),
        (f"a: !encrypted '{CANARY}\nb: [", "not YAML at line"),
        (f"a: !encrypted {CANARY}\n\tb: 1", "not YAML at line 2"),
        (f"a: [!encrypted {CANARY}", "expected ',' or ']', but got '<stream end>'"),
        ("a: !encrypted", "without a value"),
        ("a: __HOLDFAST_SECRET(f:x)__", "looks like a placeholder"),
        ("{% if x %}a: 1\nb: 2{% endif %}", "a line of its own"),
        ("a: 1\n---\nb: 2", "not YAML"),
    ],
)
def test_document_that_cannot_be_understood_is_refused_without_its_secret(
    text: str, words: str
) -> None:
    """Nothing is published by mistake, and the message does not quote the line."""
    with pytest.raises(SettingsError) as refused:
        read("f", text)
    assert words in str(refused.value)
    assert CANARY not in str(refused.value)


@settings(deadline=None)
@given(st.text(alphabet="ab{}%#'\"\\ \n-+raw!encypt:", max_size=60))
def test_mask_keeps_every_character_in_its_place(text: str) -> None:
    """Masked text has the same length and the same lines: positions carry over."""
    masked = mask(text)
    assert len(masked) == len(text)
    assert [i for i, c in enumerate(masked) if c == "\n"] == [
        i for i, c in enumerate(text) if c == "\n"
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.text(alphabet='abzAZ09{}%#"\\ :-!&*[]äß€', min_size=12, max_size=30),
    st.sampled_from(
        ["k: {}\n", "k:\n  j: {}\n", "k: [1, {}]\n", "{{% if a %}}\nk: {}\n{{% endif %}}"]
    ),
)
def test_no_secret_survives_in_what_is_published(value: str, around: str) -> None:
    """Whatever a quoted secret contains, the published text does not."""
    text = around.format(f"{TAG} '{value}'")
    found = read("f", text)
    assert value not in found.text
    assert [s.value for s in found.secrets] == [value]


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ("", "a", "a: !encrypted X\n"),
        ("", "a.b.c", "a:\n  b:\n    c: !encrypted X\n"),
        ("a: 1", "b", "a: 1\nb: !encrypted X\n"),
        ("d:\n  h: x # c\nz: 2\n", "d.p", "d:\n  p: !encrypted X\n  h: x # c\nz: 2\n"),
        ("d:\n  p: old # c\n", "d.p", "d:\n  p: !encrypted X # c\n"),
        ("d:\n  p:\n  q: 1\n", "d.p", "d:\n  p: !encrypted X\n  q: 1\n"),
        ("p: !encrypted |\n  a\n  b\nq: 1\n", "p", "p: !encrypted X\nq: 1\n"),
        ("l:\n  - a: 1\n", "l.0.b", "l:\n  - b: !encrypted X\n    a: 1\n"),
        ("{% if x %}\na: !encrypted b\n{% endif %}", "a", None),
        ("a: 1\n", "on", 'a: 1\n"on": !encrypted X\n'),
    ],
)
def test_secret_is_written_where_it_belongs(text: str, path: str, expected: str | None) -> None:
    """One value changes or one key is added; the rest of the file stays as it stands."""
    written = put("f", text, path, "X")
    assert written == (expected or text.replace("!encrypted b", "!encrypted X"))


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("a: 1", "a.b"),
        ("a: {b: 1}", "a.c"),
        ("{% if x %}\na: 1\n{% endif %}", "b"),
        ("a: [1]", "a"),
    ],
)
def test_secret_that_has_no_clear_place_is_not_written(text: str, path: str) -> None:
    """A file is never guessed at."""
    with pytest.raises(SettingsError):
        put("f", text, path, "X")
