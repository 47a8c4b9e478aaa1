"""What is masked for viewers, and what is not."""

from __future__ import annotations

import pytest

from holdfast.web.auth import User
from holdfast.web.masking import (
    MASK,
    hides,
    is_secret,
    masked,
    masked_body,
    masked_headers,
    masked_text,
)


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "Password",
        "db_password",
        "dbPassword",
        "passwd",
        "secret",
        "client_secret",
        "token",
        "accessToken",
        "api_key",
        "apiKey",
        "X-Api-Key",
        "Authorization",
        "Set-Cookie",
        "credentials",
        "private-key",
        "AWS_SECRET_ACCESS_KEY",
    ],
)
def test_names_of_secrets_are_known(name: str) -> None:
    """However a member or header is spelled."""
    assert is_secret(name)


@pytest.mark.parametrize("name", ["user", "key", "keyboard", "secretary", "compass", "title", ""])
def test_other_names_are_left_alone(name: str) -> None:
    """A word that only contains such a word is none."""
    assert not is_secret(name)


def test_values_are_masked_wherever_they_are() -> None:
    """In lists and objects inside objects; what is empty stays, since there is nothing to hide."""
    given = {"a": [{"token": "t1"}], "b": {"password": {"x": 1}}, "secret": "", "n": 1, "t": None}
    wanted = {"a": [{"token": MASK}], "b": {"password": MASK}, "secret": "", "n": 1, "t": None}
    assert masked(given) == wanted


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("connect failed: password=hunter2 host=db", "hunter2"),
        ('{"token": "hunter2", "a": 1', "hunter2"),
        ("Authorization: Bearer abcdefghij", "abcdefghij"),
        ("postgres://ann:hunter2@db/x", "hunter2"),
        ("got hft_83kkKUmRHGjipDtA26FI9AO2vIqNQ4ygObdZ", "83kkKUm"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-def", "eyJzdWIi"),
        ("api_key='hunter2'", "hunter2"),
    ],
)
def test_secrets_inside_texts_are_masked(text: str, gone: str) -> None:
    """Errors and tracebacks say what they were called with."""
    assert gone not in masked_text(text)
    assert MASK in masked_text(text)


def test_plain_texts_are_left_alone() -> None:
    """What has no secret is shown as it is, byte by byte."""
    for text in ("ValueError: number 7", '{"a":  1}', "https://example.com/a?b=c", ""):
        assert masked_text(text) == text
        assert masked_body(text) == text
    assert masked_headers({"X-Trace": "1", "Cookie": "a=b"}) == {"X-Trace": "1", "Cookie": MASK}


def test_only_viewers_are_kept_from_secrets() -> None:
    """Who may send a payload again must be able to read it."""
    assert hides(User("v", "viewer"))
    assert not hides(User("o", "operator"))
