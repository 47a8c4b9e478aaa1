"""`holdfast settings diff`, `history` and `show`: what is published, and what has changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from holdfast.cli import out
from holdfast.cli.command import command, connected
from holdfast.cli.options import SeedOption, argument, option
from holdfast.cli.settings import (
    AgentsOption,
    ForceOption,
    canary_text,
    issued_agents,
    plain,
    plan_json,
    print_changes,
    remarks,
    sealer,
)
from holdfast.errors import SettingsError

if TYPE_CHECKING:
    from holdfast.settings.records import Manifest, Revision
    from holdfast.settings.store import Published


async def _published() -> Published:
    """What is published, without verifying the signature: agents verify, this only shows."""
    from holdfast.settings.store import SettingsStore

    async with connected() as client:
        return await SettingsStore(client.broker).published(None)


@command("settings history")
async def history() -> None:
    """List the revisions that 'rollback' can make current again, newest first."""
    there = await _published()
    found = [there.history[number] for number in sorted(there.history, reverse=True)]
    if out.as_json([{**plain(r), "files": len(_files(there, r))} for r in found]):
        return
    out.listing(
        found,
        ("revision", lambda r: r.number),
        ("published", lambda r: out.clock_time(r.at)),
        ("files", lambda r: len(_files(there, r))),
        ("changed", lambda r: _changed(there, r)),
        ("note", lambda r: f"back to {r.back_to}" if r.back_to else canary_text(r.canary)),
        empty="nothing is published yet: see 'holdfast settings push'",
    )


@command("settings show")
async def show(
    path: Annotated[str, argument("A file, e.g. db or apps/web.yaml; else a list.", "[FILE]")] = "",
    revision: Annotated[int, option("An earlier revision.", "N", min=0)] = 0,
    into: Annotated[
        Path | None, option("Write all files into this new folder.", "DIR", "--out")
    ] = None,
) -> None:
    """Show what is published, without the folder it came from; secrets stay sealed.

    What this prints can be pushed again with the same account seed.
    """
    there = await _published()
    manifest = there.snapshot(there.kept(revision).manifest)
    files = sorted(manifest.files.items())
    if into is not None:
        _write(there, manifest, into)
    elif path:
        _show_file(there, manifest, path.removesuffix(".yaml"))
    elif not out.as_json({n: {"size": e.size, "secrets": len(e.secrets)} for n, e in files}):
        rows = [(f"{name}.yaml", e.size, len(e.secrets) or "") for name, e in files]
        out.table(("file", "bytes", "secrets"), rows, empty="the snapshot is empty")


def _show_file(there: Published, manifest: Manifest, name: str) -> None:
    if name not in manifest.files:
        raise SettingsError(f"that snapshot has no {name}.yaml: 'holdfast settings show' lists all")
    text = there.source(manifest, name)
    if not out.as_json({"file": name, "text": text}):
        out.block(text.rstrip("\n"))


def _write(there: Published, manifest: Manifest, into: Path) -> None:
    if into.exists() and any(into.iterdir()):
        raise SettingsError(f"{into} is not empty: name a new folder")
    for name in sorted(manifest.files):
        file = into / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(there.source(manifest, name))
    out.say(f"{len(manifest.files)} files written to {into}")


@command("settings diff")
async def diff(
    what: Annotated[str, argument("A folder, or a revision's number.", "DIR|REVISION")],
    other: Annotated[
        int, argument("Compare with this revision; default: the current one.", "[REVISION]", min=0)
    ] = 0,
    agent: AgentsOption = None,
    force: ForceOption = False,
    seed: SeedOption = None,
) -> None:
    """Show what a push of a folder would change, or what changed since an earlier revision.

    The output is a diff with placeholders for secrets. Write ./7 for a folder that is named like a
    number.
    """
    from holdfast.settings.publisher import Publisher

    if what.isascii() and what.isdigit():
        await _diff_revisions(int(what), other)
        return
    agents = [*(agent or ()), *issued_agents(seed)]
    own = sealer(seed)
    async with connected(create=True) as client:
        publisher = Publisher(client.broker, own, client.records)
        tree, plan = await publisher.plan(Path(what), agents=agents, empty=True, force=force)
        there = await publisher.store.published(own, force=force)
    remarks(tree)
    if out.as_json(plan_json(plan)):
        return
    print_changes(plan)
    published = there.texts(there.manifest)
    new = {name: source.text for name, source in tree.files.items()}
    for line in _diff_lines(("published", published), ("folder", new)):
        out.say(line)


async def _diff_revisions(number: int, other: int) -> None:
    """Show what changed between two revisions."""
    there = await _published()
    old, new = there.kept(number), there.kept(other)
    sides = [(f"revision {r.number}", there.texts(there.snapshot(r.manifest))) for r in (old, new)]
    lines = list(_diff_lines(sides[0], sides[1]))
    if out.as_json({"from": old.number, "to": new.number, "lines": lines}):
        return
    for line in lines or ["the two are the same"]:
        out.say(line)


def _diff_lines(
    before: tuple[str, Mapping[str, str]], after: tuple[str, Mapping[str, str]]
) -> Iterator[str]:
    """Two snapshots, file by file, as a unified diff."""
    import difflib

    for name in sorted({*before[1], *after[1]}):
        sides = (f"{before[0]}/{name}.yaml", f"{after[0]}/{name}.yaml")
        both = before[1].get(name, "").splitlines(), after[1].get(name, "").splitlines()
        yield from difflib.unified_diff(*both, *sides, lineterm="", n=2)


def _files(there: Published, revision: Revision) -> dict[str, Any]:
    try:
        return dict(there.snapshot(revision.manifest).files)
    except SettingsError:
        return {}


def _changed(there: Published, revision: Revision) -> str:
    """The files that differ from the revision before."""
    before = there.history.get(revision.number - 1)
    if before is None:
        return ""
    old, new = _files(there, before), _files(there, revision)
    names = [f"{n}.yaml" for n in sorted({*old, *new}) if old.get(n) != new.get(n)]
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
