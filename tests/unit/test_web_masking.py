"""What is masked for viewers, and what is not."""

from __future__ import annotations

import pytest

from holdfast.redaction import is_secret
from holdfast.web.auth import User
from holdfast.web.masking import (
    MASK,
    masked,
    masked_body,
    masked_headers,
    masked_payload,
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
        ("mysql -h db --password hunter2", "hunter2"),
        ("curl -u ann:hunter2 https://db", "hunter2"),
        ("redis://:hunter2@cache:6379/0", "hunter2"),
        ("postgres://ann:hun/ter2@db/x", "ter2"),
        ("-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----", "hunter2"),
        ("-----BEGIN PRIVATE KEY-----\nhunter2", "hunter2"),
        ('{"secret": {"x": ["hunter2"', "hunter2"),
        ('{"p\\u0061ssword": "hunter2"', "hunter2"),
        ('{\\"password\\": \\"hunter2\\"}', "hunter2"),
        ("Cookie: a=b; c=hunter2", "hunter2"),
        ("password: |\n  one\n  hunter2\n", "hunter2"),
        ("PGPASSWORD=hunter2", "hunter2"),
        ("password=" + " " * 200 + "hunter2", "hunter2"),
        ("login(password=SecretStr('hunter2'))", "hunter2"),
        ('{"name": "DB_PASSWORD", "value": "hunter2"', "hunter2"),
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


@pytest.mark.parametrize(
    "text",
    [
        "curl --user=bob:hunter2Zx9 https://x",
        "<password>hunter2Zx9 and more</password>",
        "<wsse:Password>hunter2Zx9</wsse:Password>",
        "GET /?next=%2F%3Fclient_secret%3Dhunter2Zx9",
        '{"Name": "DB_PASSWORD", "Value": "hunter2Zx9"}',
        '{"k": "password", "v": "hunter2Zx9"} and text',
        "https://hooks.slack.com/services/T000/B000/hunter2Zx9",
        "https://discord.com/api/webhooks/1/hunter2Zx9",
        "https://api.telegram.org/bot12:hunter2Zx9/sendMessage",
        "Passwort: hunter2Zx9",
        "contrase\u00f1a=hunter2Zx9",
    ],
)
def test_secrets_in_other_notations_are_masked(text: str) -> None:
    """Elements, encoded queries, addresses that are passwords; twice is as good as once."""
    once = masked_text(text)
    assert "hunter2Zx9" not in once
    assert masked_text(once) == once
    assert "hunter2Zx9" not in masked_body(text)


def test_text_behind_an_element_is_left_alone() -> None:
    """Only what an element of a secret name contains; an arrow is no element."""
    text = "<p>the token</p> <token/> a->password>b <user>bob</user> done"
    assert masked_text(text) == text


def test_words_and_pairs_are_masked() -> None:
    """Lists of words, pairs of headers and named values have their secrets beside the name."""
    assert masked(["mysql", "--password", "x", "db"]) == ["mysql", "--password", MASK, "db"]
    assert masked([["Authorization", "x"], ["A", "b"]]) == [["Authorization", MASK], ["A", "b"]]
    assert masked([{"name": "TOKEN", "value": "x"}]) == [{"name": "TOKEN", "value": MASK}]


def test_bare_payload_is_masked_by_the_parameter() -> None:
    """The payload of a job with one parameter has no name in it: the job's signature has."""
    assert masked_payload('"hunter2"', ("password",)) == f'"{MASK}"'
    assert masked_payload('"ann"', ("user",)) == '"ann"'
    assert masked_payload('"hunter2"', None) == f'"{MASK}"'
    assert masked_payload('{"user": "ann"}', None) == '{"user": "ann"}'
    assert masked_payload("", None) == ""


@pytest.mark.parametrize("levels", [600, 5_000])
def test_deep_values_are_masked(levels: int) -> None:
    """However deep a value is: nothing here recurses."""
    text = '{"a":' * levels + '{"password": "hunter2"}' + "}" * levels
    assert "hunter2" not in masked_body(text)
    value: dict[str, object] = {"password": "hunter2"}
    for _ in range(levels):
        value = {"a": value}
    masked(value)


def test_masking_twice_changes_nothing() -> None:
    """What a route has masked is masked again on its way out."""
    text = "password=x --token y redis://:z@a {'secret': 'q'} Authorization: Bearer abcdefghi"
    assert masked_text(masked_text(text)) == masked_text(text)


def test_only_viewers_are_kept_from_secrets() -> None:
    """Who may send a payload again must be able to read it."""
    assert not User("v", "viewer").sees_secrets
    assert User("o", "operator").sees_secrets
