"""`holdfast auth lint`: every planted flaw is found, and a generated configuration has none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, InvalidInput
from holdfast.identity.conf import read
from holdfast.identity.credentials import new_nkey_seed, public_nkey
from holdfast.identity.grants import covers, overlaps
from holdfast.identity.lint import Flaw, examine
from holdfast.identity.users import CONFIG, EXAMPLE, UserFolder


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = UserFolder(tmp_path_factory.mktemp("template") / "auth", now="2026-11-16T00:00:00Z")
    found.init("hf")
    found.add_agents(["alpha", "beta"])
    return found.path


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> UserFolder:
    """A folder with two agents, to be spoilt."""
    return UserFolder(shutil.copytree(template, tmp_path / "auth"), now="2026-11-16T01:00:00Z")


def flaws(folder: UserFolder, change: Callable[[str], str], file: str = CONFIG) -> list[Flaw]:
    """What lint says after a change to one of the files."""
    path = folder.path / file
    before = path.read_text()
    after = change(before)
    assert after != before, "the flaw was not planted"
    path.write_text(after)
    return examine(folder.path / EXAMPLE, "hf")


def test_generated_configuration_has_no_flaw(folder: UserFolder) -> None:
    """What `auth init`, `agent`, `user` and `revoke` write passes, without a warning."""
    folder.add_user("worker", "blue", ["carts"])
    folder.revoke("beta")
    assert examine(folder.path / EXAMPLE, "hf") == []


# ---- planted flaws: what is replaced, by what, and what lint must say

U = public_nkey(new_nkey_seed())
OF_WORKER = '"hf.dead.>", "hf.canary.>"'
OWN = '"hf.run.*.return.alpha"'
PLANTED: dict[str, tuple[str, str, str, str]] = {
    "publishes others' returns": ("fail", OWN, '"hf.run.*.return.*"', "speak for other agents"),
    "publishes another's return": (
        "fail",
        OWN,
        f'{OWN}, "hf.run.*.return.hf-lint-other"',
        "speak for other agents",
    ),
    "publishes all runs": ("fail", OWN, '"hf.run.>"', "speak for other agents"),
    "writes others' facts": (
        "fail",
        '"$KV.hf_facts.alpha"',
        '"$KV.hf_facts.>"',
        "speak for other agents",
    ),
    "reads others' secrets": (
        "fail",
        '"$JS.API.DIRECT.GET.KV_hf_secrets.$KV.hf_secrets.alpha"',
        '"$JS.API.DIRECT.GET.KV_hf_secrets.>"',
        "speak for other agents",
    ),
    "gets any message": (
        "fail",
        OWN,
        f'{OWN}, "$JS.API.STREAM.MSG.GET.KV_hf_secrets"',
        "sealed secrets of all agents",
    ),
    "consumes secrets": (
        "fail",
        OWN,
        f'{OWN}, "$JS.API.CONSUMER.CREATE.>"',
        "which no agent needs",
    ),
    "commands others": ("fail", OWN, f'{OWN}, "hf.agent.*.exec"', "which no agent needs"),
    "hears others' commands": (
        "fail",
        '"hf.agent.alpha.*"',
        '"hf.agent.alpha.*", "hf.agent.*.exec"',
        "meant for other agents",
    ),
    "hears all inboxes of agents": (
        "fail",
        '"_INBOX.agents.agent-alpha.>"',
        '"_INBOX.agents.>"',
        "meant for other agents",
    ),
    "hears everybody's answers": (
        "fail",
        '"_INBOX.core.worker.>"',
        '"_INBOX.>"',
        "reads the answers to everybody",
    ),
    "hears no answer": ("fail", ', "_INBOX.core.worker.>"', "", "no answer ever reaches it"),
    "publishes everything": ("fail", OF_WORKER, f'">", {OF_WORKER}', "may publish to everything"),
    "hears everything": ("fail", '"hf.kv.hf_runs.>"', '">"', "may subscribe to everything"),
    "the whole API": ("warn", OF_WORKER, f'"$JS.API.>", {OF_WORKER}', "delete any stream"),
    "agents beside streams": (
        "fail",
        '"HF_AGENTS": {',
        '"HF_AGENTS": {\n jetstream: enabled',
        "in an account with streams",
    ),
    "answers without end": (
        "warn",
        'allow_responses: {max: 1, expires: "30s"}',
        'allow_responses: {max: -1, expires: "30s"}',
        "without limit",
    ),
    "cannot answer pings": (
        "warn",
        'allow_responses: {max: 1, expires: "30s"}',
        "",
        "declared lost",
    ),
    "the core beside streams": (
        "warn",
        '"HF_CORE": {',
        '"HF_CORE": {\n jetstream: enabled',
        "delete any stream",
    ),
    "an export for all": ("warn", ', accounts: ["HF_AGENTS"]}', "}", "to every account"),
    "a user without permissions": (
        "fail",
        "    users: [\n",
        f"    users: [\n {{nkey: {U}}}\n",
        "which means all of them",
    ),
    "a password": (
        "fail",
        "    users: [\n",
        "    users: [\n {user: bob, password: s3cret, permissions: {publish: [a]"
        ', subscribe: ["_INBOX.core.bob.>"]}}\n',
        "password is in the file as plain text",
    ),
    "a seed": (
        "fail",
        "    users: [\n",
        f"    users: [\n {{nkey: {new_nkey_seed()}, permissions: {{publish: [a]"
        ', subscribe: ["_INBOX.core.bob.>"]}}\n',
        "private key (seed)",
    ),
    "a broken key": (
        "fail",
        "    users: [\n",
        "    users: [\n {nkey: UABC, permissions: {publish: [a], subscribe: [_INBOX.core.b.>]}}\n",
        "not a user's public key",
    ),
    "answers only": (
        "warn",
        "    users: [\n",
        f"    users: [\n {{nkey: {U}, permissions: {{subscribe: [_INBOX.core.b.>]"
        ", allow_responses: true}}\n",
        "nothing but answers",
    ),
}
AROUND: dict[str, tuple[str, str, str, str]] = {
    "open to others": ("fail", '"127.0.0.1:4222"', '"0.0.0.0:4222"', "in clear text"),
    "open by a port": ("fail", 'listen: "127.0.0.1:4222"', "port: 4222", "in clear text"),
    "no_auth_user": ("fail", "include", f"no_auth_user: {U}\ninclude", "without a login is"),
    "nobody needs a login": ("fail", "include ./auth.conf", "", "nobody needs a login"),
    "a token": (
        "fail",
        "include ./auth.conf",
        "authorization { token: abc }",
        "token is in the file",
    ),
    "plain beside TLS": (
        "fail",
        "include",
        "tls { cert_file: a, key_file: b }\nallow_non_tls: true\ninclude",
        "connect without TLS",
    ),
    "an open monitor": ("warn", '"127.0.0.1:8222"', "8222", "monitor has no login"),
    "an open cluster": (
        "fail",
        "include",
        "cluster { name: c, listen: 0.0.0.0:6222 }\ninclude",
        "join without TLS",
    ),
    "a cluster for anybody": (
        "warn",
        "include",
        "cluster { listen: 0.0.0.0:6222, tls { cert_file: a, key_file: b } }\ninclude",
        "may join",
    ),
    "insecure routes": (
        "fail",
        "include",
        "cluster { listen: 127.0.0.1:6222, tls { insecure: true } }\ninclude",
        "accepts any certificate",
    ),
    "whose clients": (
        "warn",
        "include",
        "tls { cert_file: a, key_file: b, verify: true }\ninclude",
        "authorities of the system",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_flaw_among_the_users_is_found(folder: UserFolder, name: str) -> None:
    """Each has a sentence and something to do."""
    level, old, new, text = PLANTED[name]
    found = flaws(folder, lambda content: content.replace(old, new, 1))
    assert [f.level for f in found if text in f.text][:1] == [level], found
    assert all(f.where and f.todo for f in found)


@pytest.mark.parametrize("name", AROUND)
def test_flaw_around_the_users_is_found(folder: UserFolder, name: str) -> None:
    """The same for what surrounds them."""
    level, old, new, text = AROUND[name]
    found = flaws(folder, lambda content: content.replace(old, new, 1), EXAMPLE)
    assert [f.level for f in found if text in f.text][:1] == [level], found


def test_user_that_stands_twice_is_found(folder: UserFolder) -> None:
    """Which of the two counts would be chance."""
    text = folder.config.read_text()
    first = next(u for u in folder.users() if u.user == "worker").nkey
    second = next(u for u in folder.users() if u.user == "client").nkey
    folder.config.write_text(text.replace(second, first))
    found = examine(folder.path / EXAMPLE, "hf")
    assert any("twice" in flaw.text for flaw in found)


def test_secrets_are_in_no_flaw(folder: UserFolder) -> None:
    """What lint prints can be pasted into a ticket."""
    seed = new_nkey_seed()
    users = f"    users: [\n {{nkey: {seed}}}\n {{user: bob, password: s3cret}}\n"
    found = flaws(folder, lambda content: content.replace("    users: [\n", users, 1))
    assert found
    assert not any(seed in repr(flaw) or "s3cret" in repr(flaw) for flaw in found)


# ---- reading


def test_configuration_is_read_as_the_server_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every way to write a value, comments, includes and variables."""
    monkeypatch.setenv("FROM_OUTSIDE", "yes-it-is")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "more.conf").write_text("inside = 'a # b'\n")
    (tmp_path / "a.conf").write_text(
        """
        # a comment
        port: 4222 // another
        name = "a\\"b"; flag yes
        url: nats://host:4222
        max_payload: 1MB
        list: [1, two, "three", {a: 1}
               four]
        map { Key: v, other { deep: $FROM_OUTSIDE } }
        word: abc
        use: $word
        include ./sub/more.conf
        "quoted key": -5
        """
    )
    assert read(tmp_path / "a.conf") == {
        "port": 4222,
        "name": 'a"b',
        "flag": True,
        "url": "nats://host:4222",
        "max_payload": "1MB",
        "list": [1, "two", "three", {"a": 1}, "four"],
        "map": {"Key": "v", "other": {"deep": "yes-it-is"}},
        "word": "abc",
        "use": "abc",
        "inside": "a # b",
        "quoted key": -5,
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: {", "line 1: the end"),
        ("a: [1, 2", "has no value"),
        ("\n\na: }", "line 3: 'a' has no value"),
        ('a: "not closed', "line 1: a text is not closed"),
        ("]", "where a name is expected"),
        ("include ./gone.conf", "cannot be read"),
        ("include ./bad.conf", "includes itself"),
        ("include", "where a text is expected"),
    ],
)
def test_configuration_that_cannot_be_read_is_told_by_line(
    tmp_path: Path, text: str, says: str
) -> None:
    """A file that the server would not take either."""
    (tmp_path / "bad.conf").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read(tmp_path / "bad.conf")
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("pattern", "subject", "whole", "some"),
    [
        ("a.b", "a.b", True, True),
        ("a.*", "a.b", True, True),
        ("a.>", "a.b.c", True, True),
        ("a.>", "a", False, False),
        ("a.*", "a.>", False, True),
        ("a.b", "a.*", False, True),
        ("*.b", "a.*", False, True),
        ("a.b", "a.c", False, False),
        ("a", "a.b", False, False),
    ],
)
def test_patterns_cover_and_overlap(pattern: str, subject: str, whole: bool, some: bool) -> None:
    """Wildcards on both sides."""
    assert (covers(pattern, subject), overlaps(pattern, subject)) == (whole, some)
    assert overlaps(subject, pattern) == some


# ---- the folder


def test_folder_lists_everybody(folder: UserFolder) -> None:
    """A revoked agent stays in the list, leaves the configuration, and can be issued anew."""
    old = next(u for u in folder.users() if u.agent == "alpha")
    assert [u.user for u in folder.revoke("alpha")] == ["agent-alpha"]
    assert old.nkey not in folder.config.read_text()
    assert not folder.credentials("agent-alpha").exists()
    folder.add_agents(["alpha"])
    new = [u for u in folder.users() if u.agent == "alpha"]
    assert [bool(u.revoked) for u in new] == [True, False]
    assert new[1].nkey != old.nkey
    assert new[1].nkey in folder.config.read_text()


def test_folder_refuses_what_makes_no_sense(folder: UserFolder, tmp_path: Path) -> None:
    """A second init or login, an unknown role, names and a folder that are none."""
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        folder.init("hf")
    for refused, text in (
        (lambda: folder.add_user("worker"), "has a login"),
        (lambda: folder.add_agents(["alpha"]), "has a login"),
        (lambda: folder.add_agents(["new", "new"]), "has a login"),
        (lambda: folder.add_user("king"), "is not one of"),
        (lambda: folder.add_user("worker", "a.b"), "not usable"),
        (lambda: folder.add_user("worker", "x", ["a.b"]), "not usable"),
        (lambda: folder.add_agents(["a.*"]), "not usable"),
        (lambda: folder.revoke("nobody"), "no user or agent"),
    ):
        with pytest.raises(InvalidInput, match=text):
            refused()
    with pytest.raises(ConfigError, match="auth init"):
        UserFolder(tmp_path / "none").users()
    assert not any(u.agent == "new" for u in folder.users())


def test_folder_grants_a_programs_bucket_by_name(folder: UserFolder) -> None:
    """A bucket of a program is open to the users that were given it, and to no other."""
    folder.add_user("worker", "blue", ["carts"])
    lines = folder.config.read_text().split("{nkey: ")
    assert [("KV_hf_data_carts" in line) for line in lines if "# worker" in line] == [False, True]
