"""Sealing, entitlement and redaction, without a server."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from holdfast.errors import SettingsError
from holdfast.identity.seed import AccountSeed
from holdfast.log_lines import JsonFormatter, TextFormatter
from holdfast.model.settings import Settings
from holdfast.redaction import Redactor
from holdfast.settings.records import Revision, Sealed, decode, sign, verify
from holdfast.settings.sealing import Opener, Sealer
from holdfast.settings.top import Top
from holdfast.settings.tree import read_tree

SEED = AccountSeed(bytes(range(32)))
OTHER = AccountSeed(bytes(range(1, 33)))
SEALER = Sealer(SEED)
CANARY = "canary-plaintext"


def sealed_for(agent: str, secret: str = "db:p", version: str = "1-a") -> Sealed:
    return Sealed({secret: {version: {1: SEALER.seal(agent, 1, secret, version, CANARY)}}})


def opener(agent: str, seed: AccountSeed = SEED) -> Opener:
    return Opener(agent, seed.agent_keys(agent))


def test_agent_opens_what_was_sealed_for_it() -> None:
    """And the account can read what it has sealed."""
    sealed = sealed_for("web1")
    assert opener("web1").open(sealed, "db:p", "1-a") == CANARY
    assert SEALER.open("web1", 1, "db:p", "1-a", sealed.boxes["db:p"]["1-a"][1]) == CANARY
    assert CANARY.encode() not in json.dumps(str(sealed)).encode()


@pytest.mark.parametrize(
    ("who", "sealed", "version", "reason"),
    [
        (opener("web2"), sealed_for("web1"), "1-a", "secret"),
        (opener("web1", OTHER), sealed_for("web1"), "1-a", "secret"),
        (opener("web1"), sealed_for("web1", version="2-b"), "1-a", "secret"),
        (opener("web1"), Sealed(), "1-a", "unresolved"),
        (
            opener("web1"),
            Sealed({"db:p": {"1-a": sealed_for("web1", "db:q").boxes["db:q"]["1-a"]}}),
            "1-a",
            "secret",
        ),
        (
            opener("web1"),
            Sealed({"db:p": {"2-b": sealed_for("web1").boxes["db:p"]["1-a"]}}),
            "2-b",
            "secret",
        ),
        (opener("web1"), Sealed({"db:p": {"1-a": {1: b"x" * 60}}}), "1-a", "secret"),
        (opener("web1"), Sealed({"db:p": {"1-a": {1: b""}}}), "1-a", "secret"),
        (opener("web1"), Sealed({"db:p": {"1-a": {2: b"x" * 60}}}), "1-a", "secret"),
    ],
    ids=[
        "another agent",
        "another account",
        "another version only",
        "nothing",
        "moved from another secret",
        "old under a new version",
        "noise",
        "empty",
        "a generation that it does not hold",
    ],
)
def test_box_that_is_not_exactly_this_one_is_refused(
    who: Opener, sealed: Sealed, version: str, reason: str
) -> None:
    """By agent, path and version inside the box, whatever lies around it says."""
    with pytest.raises(SettingsError) as refused:
        who.open(sealed, "db:p", version)
    assert refused.value.reason == reason
    assert CANARY not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_value_at_rest_opens_where_it_was_sealed_and_nowhere_else() -> None:
    """Only for holders of the seed, and only at its own place in the tree."""
    text = SEALER.seal_at_rest("db:p", CANARY)
    assert CANARY not in text
    assert SEALER.open_at_rest("db:p", text) == CANARY
    assert SEALER.open_at_rest("db:p", "in plain") == "in plain"
    for sealer, secret, given in [
        (SEALER, "db:q", text),
        (Sealer(OTHER), "db:p", text),
        (SEALER, "db:p", text[:-8] + "AAAAAAA="),
        (SEALER, "db:p", "hf1:!!"),
    ]:
        with pytest.raises(SettingsError) as refused:
            sealer.open_at_rest(secret, given)
        assert CANARY not in str(refused.value)


def test_secrets_appear_in_no_repr() -> None:
    """Of whatever holds one."""
    things = [SEALER, opener("web1"), Settings({"a": CANARY}, revision=3, secrets=[("a",)])]
    assert CANARY not in repr(things)
    assert repr(things[2]) == "Settings(revision=3, keys=['a'])"


def test_revision_counts_only_with_the_accounts_signature() -> None:
    """Any change, another account, another namespace, a generation that is not known: refused."""
    revision = Revision(100, 7, "ab" * 32, [1, 2], 1.5)
    keys = {g: SEED.signing_key(g) for g in (1, 2)}
    data = sign(revision, keys, "hf")
    both = {g: SEED.verify_key(g) for g in (1, 2)}
    assert verify(data, both, "hf") == revision
    assert verify(data, {2: SEED.verify_key(2)}, "hf") == revision
    for changed, known, namespace in [
        (data.replace(b'\\"number\\":7', b'\\"number\\":8'), both, "hf"),
        (data, {1: OTHER.verify_key(1)}, "hf"),
        (data, both, "other"),
        (data, {3: SEED.verify_key(3)}, "hf"),
        (sign(revision, {}, "hf"), both, "hf"),
    ]:
        with pytest.raises(SettingsError) as refused:
            verify(changed, known, namespace)
        assert refused.value.reason == "signature"
    with pytest.raises(SettingsError, match="cannot be read"):
        decode(Revision, b"{", "it")


# ---------------------------------------------------------------- entitlement


def test_files_of_an_agent_come_in_the_order_of_the_top() -> None:
    """Each once, where it stands first."""
    top = Top.parse("base:\n  '*': [a]\n  'web*': [b, a]\n  'G@os:linux and web1': [c]\n")
    assert top.files_for("web1", {"os": "linux"}) == ["a", "b", "c"]
    assert top.files_for("db1", {"os": "linux"}) == ["a"]
    assert top.entitled("b", ["web1", "db1"]) == {"web1"}


def test_agents_named_outright_are_entitled_before_they_are_known() -> None:
    """A list of ids needs nobody to have reported."""
    assert Top.parse("base:\n  'L@new1,new2': [a]\n").entitled("a", []) == {"new1", "new2"}


@pytest.mark.parametrize(
    "expression",
    ["G@os:linux", "web* and G@os:linux", "web1 or (db* and not G@os:linux)", "not G@os:windows"],
)
def test_secrets_never_follow_facts(expression: str, tmp_path: Path) -> None:
    """Not in an expression of facts, and not in a compound that contains one."""
    (tmp_path / "top.yaml").write_text(f"base:\n  '{expression}': [db]\n")
    (tmp_path / "db.yaml").write_text(f"p: !encrypted {CANARY}\n")
    with pytest.raises(SettingsError, match="selects by facts") as refused:
        read_tree(tmp_path, SEALER)
    assert CANARY not in str(refused.value)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"db": "a: 1"}, "no top.yaml"),
        ({"top": "base: {'*': [missing]}"}, "there is no missing.yaml"),
        ({"top": "other: {}"}, "one key 'base'"),
        ({"top": "base: {'*': db}"}, "list of files"),
        ({"top": "base: {'((': [db]}"}, "top.yaml"),
        ({"top": "base: {'*': ['../x']}"}, "cannot name a file"),
        ({"top": "base: !encrypted x"}, "secrets belong in the files"),
        ({"top": "base: {}", "db": "{% include 'x' %}"}, "cannot read files"),
        ({"top": "base: {}", "a b": "a: 1"}, "cannot name a file"),
        (
            {"top": "base: {}", "a": f"p: !encrypted {CANARY}", "b": f"q: {CANARY}"},
            "is also in b.yaml",
        ),
        ({"top": f"base: {{}} # {CANARY}", "a": f"p: !encrypted {CANARY}"}, "is also in top"),
    ],
)
def test_tree_that_cannot_work_is_refused(
    files: dict[str, str], words: str, tmp_path: Path
) -> None:
    """Before anything is sent, with a sentence."""
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(SettingsError) as refused:
        read_tree(tmp_path, SEALER)
    assert words in str(refused.value)
    assert CANARY not in str(refused.value)


def test_tree_takes_only_its_own_yaml(tmp_path: Path) -> None:
    """Hidden files and other kinds are skipped; a link that leads out of it is refused."""
    tree = tmp_path / "tree"
    (tree / ".git").mkdir(parents=True)
    (tree / "sub").mkdir()
    (tree / ".git" / "x.yaml").write_text("a: 1")
    (tree / "README.md").write_text("{{ not a template")
    (tree / "top.yaml").write_text("base: {'*': [sub/x]}")
    (tree / "sub" / "x.yaml").write_text("a: 1")
    assert sorted(read_tree(tree, SEALER).files) == ["sub/x", "top"]
    outside = tmp_path / "outside.yaml"
    outside.write_text("a: 1")
    (tree / "link.yaml").symlink_to(outside)
    with pytest.raises(SettingsError, match="leads out of"):
        read_tree(tree, SEALER)


# ---------------------------------------------------------------- what a program sees and tells


def test_settings_are_found_by_key_and_by_path() -> None:
    """What is returned is a copy; what is missing is a KeyError without any value."""
    settings = Settings({"db": {"host": "h", "ports": [1, 2]}, "a.b": 3}, revision=1)
    assert settings["db"]["host"] == settings["db.host"] == settings.get("db.host") == "h"
    assert settings["db.ports.1"] == 2
    assert settings["a.b"] == 3
    assert settings.get("db.nope", "other") == "other"
    assert "db.host" in settings
    settings["db"]["host"] = "changed"
    assert settings["db.host"] == "h"
    with pytest.raises(KeyError, match=r"no 'x\.y'"):
        settings["x.y"]


def test_masked_settings_have_no_secret() -> None:
    """Wherever it stands."""
    settings = Settings({"a": CANARY, "l": [{"p": CANARY}]}, secrets=[("a",), ("l", 0, "p")])
    assert settings.masked() == {"a": "(secret)", "l": [{"p": "(secret)"}]}
    assert settings["a"] == CANARY


@pytest.mark.parametrize("secret", [CANARY, "qu\"o'te\\d", "äöü€-long", "line one\nline two here"])
def test_redactor_knows_a_secret_as_python_prints_it(secret: str) -> None:
    """Plain, in a repr, in JSON, in a URL; and each line of several."""
    redactor = Redactor()
    redactor.register("one", [secret])
    from urllib.parse import quote

    for text in (secret, repr(secret), repr({"a": secret}), json.dumps([secret]), quote(secret)):
        assert not any(line in redactor.scrub(f"x {text} y") for line in secret.splitlines())
    assert redactor.scrub_values({"a": [1, secret, 4321]}) == {"a": [1, "***", 4321]}
    redactor.register("one", [])
    assert redactor.scrub(secret) == secret


def test_log_lines_are_blanked_in_both_formats() -> None:
    """Message, arguments and traceback."""
    from holdfast.redaction import REDACTOR

    REDACTOR.register("a test", [CANARY])
    try:
        try:
            raise ValueError(f"cannot log in with {CANARY}")
        except ValueError as error:
            record = logging.LogRecord(
                "x",
                logging.ERROR,
                "f",
                1,
                "%r",
                ({"p": CANARY},),
                (ValueError, error, error.__traceback__),
            )
        for formatter in (JsonFormatter(), TextFormatter()):
            line = formatter.format(record)
            assert CANARY not in line
            assert "***" in line
    finally:
        REDACTOR.register("a test", [])
