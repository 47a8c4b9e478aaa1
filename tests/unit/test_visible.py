"""Foreign text on a terminal and in a text log: nothing that acts gets through."""

from __future__ import annotations

import ast
import json
import logging
import sys
import unicodedata
from pathlib import Path

import pytest

import holdfast.cli
from holdfast.log_lines import JsonFormatter, TextFormatter
from holdfast.visible import block, json_text, one_line

ACTING = ("Cc", "Cf", "Cs", "Zl", "Zp")


def acting() -> list[str]:
    """Every character that Unicode calls a control, a format, half a pair or a separator."""
    every = map(chr, range(sys.maxunicode + 1))
    return [c for c in every if unicodedata.category(c) in ACTING]


def test_no_character_that_acts_gets_through() -> None:
    """Of all of Unicode: only the line breaks and tabs of a block stay as they are."""
    for character in acting():
        assert one_line(character).isascii()
        assert one_line(character).isprintable()
        if character not in "\n\t":
            assert one_line(character) == block(character)


@pytest.mark.parametrize("text", ["plain", "Grüße", "日本語", "مرحبا", "👍🏽 ❤️", "a  b", "\\x1b"])
def test_what_is_seen_stays(text: str) -> None:
    """Words in any script, and pictures, are printed as they are."""
    assert one_line(text) == text
    assert block(text) == text


def test_escapes_are_readable() -> None:
    """They are written as a programmer would."""
    assert one_line("\x1b[32mok\r\n\u202e\x9b\U000e0041") == (
        "\\x1b[32mok\\r\\n\\u202e\\x9b\\U000e0041"
    )
    assert block("a\n\tb\r") == "a\n\tb\\r"


def test_json_stays_the_same_value() -> None:
    """A program that reads the output gets the character; a terminal does not."""
    value = {"a\u202e": "".join(c for c in acting() if unicodedata.category(c) != "Cs")}
    text = json_text(json.dumps(value, ensure_ascii=False, indent=2))
    assert json.loads(text) == value
    assert not {c for c in text if unicodedata.category(c) in ACTING} - {"\n"}


def record(message: str, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, None) if error else None
    made = logging.LogRecord("holdfast.test", logging.INFO, "", 0, message, None, info)
    made.run = "r\x1b[1m1"
    return made


def test_log_message_is_one_line_whatever_is_in_it() -> None:
    """No message can pass for the next line, and no exception's text either."""
    hostile = "a\x1b[2K\r\n12:00:00.000 INFO    holdfast: all is well"
    line = TextFormatter().format(record(hostile, ValueError(hostile)))
    first, *rest = line.split("\n")
    assert "\\x1b[2K\\r\\n12:00" in first
    assert "run=r\\x1b[1m1" in first
    assert all(text.startswith("  ") for text in rest)
    assert not {c for c in line if unicodedata.category(c) in ACTING} - {"\n"}
    told = json.loads(JsonFormatter().format(record(hostile)))
    assert told["message"] == hostile


def test_only_one_module_of_the_command_line_prints() -> None:
    """Every other one goes through `cli.out`, which knows how."""
    allowed = {"out.py": {"print", "Console"}, "top.py": {"Console"}}  # top draws a screen
    folder = Path(holdfast.cli.__file__).parent
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name in ("print", "echo", "secho", "Console", "print_exception", "print_exc"):
                seen = isinstance(node.func, ast.Attribute) and "visible" in ast.unparse(node)
                assert seen or name in allowed.get(path.name, set()), f"{path.name}: {name}"


def test_no_command_prints_a_line_break_as_an_escape() -> None:
    """`say` and `note` print one line and escape breaks; texts of several lines go to `block`."""
    folder = Path(holdfast.cli.__file__).parent
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in ("say", "note") and not node.keywords:
                texts = [
                    c.value for a in node.args for c in ast.walk(a) if isinstance(c, ast.Constant)
                ]
                assert not any("\n" in str(text) for text in texts), f"{path.name}:{node.lineno}"
