"""`holdfast settings` and `holdfast secrets` as a person uses them."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from holdfast import Backoff, Context, Holdfast
from holdfast.errors import RunFailed
from holdfast.identity.seed import AccountSeed
from holdfast.server import Server
from holdfast.settings.sealing import Sealer
from holdfast.settings.tree import read_tree
from tests.fleet_world import World as Fleet
from tests.integration.cli_support import holdfast
from tests.integration.settings_support import CANARY, World, following, reaches
from tests.integration.support import broker_of, working

TOP = "base: {'web*': [db]}\n"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree, and a seed where the commands look for it."""
    monkeypatch.chdir(tmp_path)
    AccountSeed.create(tmp_path / "auth" / "account.seed")
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "top.yaml").write_text(TOP)
    (folder / "db.yaml").write_text("# the database\ndb:\n  host: db1\n")
    return folder


def seed(tree: Path) -> AccountSeed:
    return AccountSeed.load(tree.parent / "auth" / "account.seed")


async def test_secret_goes_in_sealed_and_never_comes_out(app: Holdfast, tree: Path) -> None:
    """Set from standard input, listed, published, looked at: the value is in no output."""
    file = str(tree / "db.yaml")
    said = []
    for words, stdin in [
        (["secrets", "set", file, "db.password"], f"{CANARY}\n"),
        (["secrets", "list", str(tree)], ""),
        (["settings", "push", str(tree), "--agent", "web1", "--dry-run"], ""),
        (["settings", "push", str(tree), "--agent", "web1"], ""),
        (["settings", "push", str(tree), "--agent", "web1"], ""),
        (["settings", "diff", str(tree)], ""),
        (["secrets", "list"], ""),
        (["settings", "status"], ""),
    ]:
        ended = await holdfast(app, *words, stdin=stdin.encode())
        assert ended.code == 0, ended.err
        said.append(ended.out + ended.err)
    assert CANARY not in "".join(said)
    assert CANARY not in (tree / "db.yaml").read_text()
    assert (
        (tree / "db.yaml")
        .read_text()
        .startswith("# the database\ndb:\n  password: !encrypted hf1:")
    )
    assert read_tree(tree, Sealer(seed(tree))).secrets == {"db:db.password": CANARY}
    assert "nothing was written" in said[2]
    assert "added      secret db:db.password" in said[3]
    assert "revision 1 is published" in said[3]
    assert "nothing changes" in said[4]
    assert said[5] == ""
    assert "db:db.password" in said[6]
    assert "no agent has reported yet" in said[7]


async def test_diff_shows_lines_and_placeholders(app: Holdfast, tree: Path) -> None:
    """What would change, as a person reads it; a secret in plain is noted, not shown."""
    await holdfast(app, "settings", "push", str(tree))
    (tree / "db.yaml").write_text(f"db:\n  host: db2\n  password: !encrypted {CANARY}\n")
    ended = await holdfast(app, "settings", "diff", str(tree))
    assert "-  host: db1" in ended.out
    assert "+  host: db2" in ended.out
    assert '+  password: "__HOLDFAST_SECRET(db:db.password)__"' in ended.out
    assert "are plain text in the folder" in ended.err
    assert CANARY not in ended.out + ended.err
    sealed = await holdfast(app, "secrets", "seal", str(tree))
    assert sealed.out == "sealed     db:db.password\n"
    assert CANARY not in (tree / "db.yaml").read_text()
    assert (await holdfast(app, "settings", "push", str(tree))).err == ""


async def test_edit_opens_a_private_file_and_writes_back_what_changed(
    app: Holdfast, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The editor sees the values, in a file that only its user may read and that is gone after."""
    file = tree / "db.yaml"
    for path, value in (("db.password", CANARY), ("db.token", "other")):
        await holdfast(app, "secrets", "set", str(file), path, stdin=value.encode())
    before = Sealer(seed(tree)), file.read_text()
    seen = tree.parent / "seen"
    editor = tree.parent / "editor.py"
    editor.write_text(
        "import os, pathlib, sys\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "text = path.read_text()\n"
        f"pathlib.Path({str(seen)!r}).write_text(f'{{path.stat().st_mode:o}} {{path}}')\n"
        f"assert {CANARY!r} in text\n"
        f"path.write_text(text.replace({CANARY!r}, 'changed'))\n"
    )
    monkeypatch.setenv("EDITOR", f"{sys.executable} {editor}")
    monkeypatch.delenv("VISUAL", raising=False)
    ended = await holdfast(app, "secrets", "edit", str(file))
    assert ended.out == "db.password written\n"
    mode, where = seen.read_text().split(" ")
    assert stat.S_IMODE(int(mode, 8)) == 0o600
    assert not Path(where).exists()
    assert not Path(where).parent.exists()
    secrets = read_tree(tree, before[0]).secrets
    assert secrets == {"db:db.password": "changed", "db:db.token": "other"}
    monkeypatch.setenv("EDITOR", "false")
    failed = await holdfast(app, "secrets", "edit", str(file))
    assert (failed.code, "nothing was changed" in failed.err) == (1, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["settings", "push", "tree", "--seed", "nothing"], "cannot be read"),
        (["secrets", "set", "tree/top.yaml", "a"], "not a file for secrets"),
        (["secrets", "set", "tree/db.yaml", "db.host.x"], "not a mapping"),
        (["secrets", "set", "tree/bd.yaml", "db.password"], "pass --create to make 'bd' a new"),
        (["settings", "push", "auth"], "auth has no settings, not even a top.yaml"),
        (["secrets", "rotate"], "nothing is published"),
        (["settings", "get", "nobody"], "does not answer"),
    ],
)
async def test_mistakes_are_told_in_a_sentence(
    words: list[str], said: str, app: Holdfast, tree: Path
) -> None:
    """One line, exit code 1, and the tree as it was."""
    before = (tree / "db.yaml").read_text()
    await (await app.backend()).topology.ensure()  # type: ignore[attr-defined]
    await app.close()
    ended = await holdfast(app, *words, stdin=CANARY.encode())
    assert (ended.code, ended.out) == (1, "")
    assert said in ended.err
    assert CANARY not in ended.err
    assert (tree / "db.yaml").read_text() == before
    assert sorted(path.name for path in tree.iterdir()) == ["db.yaml", "top.yaml"]


async def test_secret_in_a_new_file_is_said_to_be_one(app: Holdfast, tree: Path) -> None:
    """With --create the file is made, and that it is new is told."""
    words = ("secrets", "set", "tree/apps.yaml", "token", "--create")
    ended = await holdfast(app, *words, stdin=CANARY.encode())
    assert ended.code == 0, ended.err
    assert "token is set in tree/apps.yaml, a new file: name it in top.yaml" in ended.out
    assert (tree / "apps.yaml").read_text().startswith("token: !encrypted hf1:")


async def test_rotation_is_known_to_those_who_issue(app: Holdfast, tree: Path) -> None:
    """After 'secrets rotate' new agents get the new generation without being told its number."""
    auth = tree.parent / "users"
    assert (await holdfast(app, "auth", "init", "--out", str(auth))).code == 0
    for words in (["settings", "push", str(tree)], ["secrets", "rotate"]):
        ended = await holdfast(app, *words, "--seed", str(auth / "account.seed"))
        assert ended.code == 0, ended.err
    ended = await holdfast(app, "auth", "agent", "web9", "--dir", str(auth))
    assert (ended.code, "with keys of generations 1 and 2" in ended.err) == (0, True)


async def test_handlers_read_the_settings_of_their_host(app: Holdfast, tmp_path: Path) -> None:
    """Through the agent's snapshot, read again when it changes; no secret is in a stored error."""
    w = World(await broker_of(app), tmp_path)
    w.write(top=TOP, db=f"db: {{host: db1, password: !encrypted {CANARY}}}\n")
    agent = w.agent("web1")

    @app.job(retry=Backoff.never())
    async def show(ctx: Context) -> list[object]:
        return [ctx.settings.revision, ctx.settings["db.host"], len(ctx.settings["db.password"])]

    @app.job(retry=Backoff.never())
    async def leak(ctx: Context) -> None:
        raise ValueError(f"cannot log in with {ctx.settings['db']}")

    file = str(tmp_path / "state" / "web1" / "settings.json")
    async with working(app, settings_file=file):
        run = await show.enqueue()
        with pytest.raises(RunFailed, match="has no settings"):
            await run.result(timeout=60)
        for number in (1, 2):
            w.write(db=f"db: {{host: db{number}, password: !encrypted {CANARY}}}\n")
            await w.push("web1")
            await agent.refresh()
            run = await show.enqueue()
            assert await run.result(timeout=60) == [number, f"db{number}", len(CANARY)]
        leaked = await leak.enqueue()
        with pytest.raises(RunFailed) as failed:
            await leaked.result(timeout=60)
    assert CANARY not in str(failed.value)
    assert "'password': '***'" in str(failed.value)
    await w.renderer.close()
    await app.close()


async def test_handler_without_settings_is_told_how_to_get_them(app: Holdfast) -> None:
    """Never an empty mapping that looks like settings."""

    @app.job(retry=Backoff.never())
    async def show(ctx: Context) -> str:
        return str(ctx.settings)

    async with working(app):
        run = await show.enqueue()
        with pytest.raises(RunFailed, match="HOLDFAST_WORKER_SETTINGS_FILE"):
            await run.result(timeout=60)


async def test_settings_are_taken_back_from_the_command_line(app: Holdfast, tree: Path) -> None:
    """History, files and differences without the folder; then one step back, by name or not."""
    await holdfast(app, "secrets", "set", str(tree / "db.yaml"), "db.password", stdin=b"s3cret-s\n")
    await holdfast(app, "settings", "push", str(tree), "--agent", "web1")
    (tree / "db.yaml").write_text("db:\n  host: db2\n")
    await holdfast(app, "settings", "push", str(tree), "--agent", "web1")
    listed = await holdfast(app, "settings", "history", "--json")
    assert [r["number"] for r in listed.json] == [2, 1]
    shown = await holdfast(app, "settings", "history")
    assert "db.yaml" in shown.out
    differs = await holdfast(app, "settings", "diff", "1")
    assert "+  host: db2" in differs.out
    same = await holdfast(app, "settings", "diff", "1", "1")
    assert "the two are the same" in same.out
    file = await holdfast(app, "settings", "show", "db.yaml", "--revision", "1")
    assert "password: !encrypted hf1:" in file.out
    assert (await holdfast(app, "settings", "show", "nothing")).code == 1
    copied = await holdfast(app, "settings", "show", "--out", "copy", "--revision", "1")
    assert "2 files written" in copied.out
    assert (await holdfast(app, "settings", "show", "--out", "copy")).code == 1
    asked = await holdfast(app, "settings", "rollback")
    assert (asked.code, "Go back to revision 1?" in asked.err) == (1, True)
    dry = await holdfast(app, "settings", "rollback", "--dry-run")
    assert "nothing was written" in dry.out
    back = await holdfast(app, "settings", "rollback", "--yes")
    assert "revision 3 is published: back to revision 1" in back.out
    again = await holdfast(app, "settings", "push", "copy", "--agent", "web1")
    assert "nothing changes" in again.out
    unknown = await holdfast(app, "settings", "rollback", "9", "--yes")
    assert (unknown.code, "these are: 1, 2, 3" in unknown.err) == (1, True)


async def test_canary_from_the_command_line(
    app: Holdfast, nats: Server, namespace: str, tree: Path, tmp_path: Path
) -> None:
    """Its check runs on the wave; what does not pass is taken back, with another exit code."""
    async with Fleet(nats, namespace, tmp_path / "a") as fleet, fleet.dispatcher():
        await fleet.start_agents("web1", "web2")
        world = World(fleet.broker, tmp_path / "b", seed(tree))
        web1, web2 = world.agent("web1"), world.agent("web2")
        async with following(web1, web2):
            first = await holdfast(app, "settings", "push", str(tree), "--canary", "1")
            assert (first.code, "nothing is published yet" in first.err) == (1, True)
            await holdfast(app, "settings", "push", str(tree))
            await reaches(web1, 1)
            await reaches(web2, 1)
            (tree / "db.yaml").write_text("db:\n  host: db2\n")
            words = ["settings", "push", str(tree), "--soak", "100ms"]
            nobody = await holdfast(app, *words, "--canary", "db*")
            assert (nobody.code, "no agent that is online" in nobody.err) == (1, True)
            bad = await holdfast(app, *words, "--canary", "web1", "--check", "fail now")
            assert (bad.code, "the check failed on web1" in bad.err) == (2, True)
            assert "what was in force before" in bad.out
            good = await holdfast(app, *words, "--canary", "50%", "--check", "look now")
            assert (good.code, "the canary with revision 4 succeeded" in good.out) == (0, True)
            await reaches(web1, 5)
            await reaches(web2, 5)
            assert web1.settings["db.host"] == web2.settings["db.host"] == "db2"
        await world.renderer.close()
