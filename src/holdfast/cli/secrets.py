"""`holdfast secrets`: the secrets in a tree of settings, and the keys that seal them.

No value is ever an argument: it is prompted for without echo, read from standard input, or edited
in a private file that is removed afterwards.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from holdfast.cli import out
from holdfast.cli.command import command, connected, operating
from holdfast.cli.options import SeedOption, argument, option
from holdfast.cli.settings import sealer, seed_file
from holdfast.cli.typed import edited
from holdfast.status import fleet_actions as actions

FileArgument = Annotated[Path, argument("A file of the tree.", "FILE")]


@command("secrets list")
async def list_secrets(
    folder: Annotated[
        Path | None, argument("A folder; default: what is published.", "[DIR]")
    ] = None,
    seed: SeedOption = None,
) -> None:
    """List the secrets of a tree, or the published ones with how many agents have them."""
    rows = _in_tree(folder) if folder else await _published(seed)
    if out.as_json(rows):
        return
    columns = ("secret", "kept") if folder else ("secret", "version", "agents")
    out.table(
        columns, [[row[column] for column in columns] for row in rows], empty="there are no secrets"
    )


def _in_tree(folder: Path) -> list[dict[str, str]]:
    from holdfast.settings import document
    from holdfast.settings.document import secret_id
    from holdfast.settings.sealing import AT_REST
    from holdfast.settings.top import NAME
    from holdfast.settings.tree import read_text, yaml_files

    return [
        {
            "secret": secret_id(name, secret.path),
            "kept": "sealed" if secret.value.startswith(AT_REST) else "in plain",
        }
        for name, path in yaml_files(folder)
        if name != NAME
        for secret in document.secrets(name, read_text(path))
    ]


async def _published(seed: Path | None) -> list[dict[str, str]]:
    from holdfast.settings.document import secret_id
    from holdfast.settings.store import SettingsStore

    own = sealer(seed)
    async with connected() as client:
        there = await SettingsStore(client.broker).published(own)
    rows = []
    for name, entry in sorted(there.manifest.files.items()):
        for path, secret in entry.secrets.items():
            id = secret_id(name, path)
            having = [
                a for a, (_, s) in there.sealed.items() if secret.version in s.boxes.get(id, {})
            ]
            rows.append({"secret": id, "version": secret.version, "agents": str(len(having))})
    return rows


@command("secrets set")
def set_secret(
    file: FileArgument,
    path: Annotated[str, argument("Dotted path of the secret: db.password.", "PATH")],
    create: Annotated[bool, option("Create the file if it does not exist.")] = False,
    seed: SeedOption = None,
) -> None:
    """Write a secret into a file of the tree, sealed so that only this account can read it.

    The value is asked for, or read from standard input when that is not a terminal. A missing
    file is created only with --create.
    """
    from holdfast.settings.editing import check_exists, set_secrets

    own = sealer(seed)
    if not create:
        check_exists(file)
    new = not file.exists()
    set_secrets(file, {path: _asked(path)}, own)
    where = f"{file}, a new file: name it in top.yaml" if new else f"{file}"
    out.say(f"{path} is set in {where}; 'holdfast settings push' publishes it")


def _asked(path: str) -> str:
    from holdfast.errors import SettingsError

    if sys.stdin.isatty():
        import getpass

        value = getpass.getpass(f"{path}: ")
        if getpass.getpass(f"{path} again: ") != value:
            raise SettingsError("the two are not the same: nothing was written")
    else:
        value = sys.stdin.read().removesuffix("\n")
    if not value:
        raise SettingsError("the value is empty: nothing was written")
    return value


@command("secrets edit")
def edit(file: FileArgument, seed: SeedOption = None) -> None:
    """Open the secrets of a file in $EDITOR, then seal and write back those that were changed."""
    from holdfast.errors import SettingsError
    from holdfast.settings.document import secret_id
    from holdfast.settings.editing import secrets_in, set_secrets

    own = sealer(seed)
    name, found = secrets_in(file)
    values = {s.path: own.open_at_rest(secret_id(name, s.path), s.value) for s in found}
    if not values:
        raise SettingsError(f"{file} has no secrets: 'holdfast secrets set' adds one")
    edited = _edited(name, values)
    for path in edited.keys() - values.keys():
        raise SettingsError(f"{path} is not a secret of {file}: 'holdfast secrets set' adds one")
    changed = {path: value for path, value in edited.items() if value != values[path]}
    if changed:
        set_secrets(file, changed, own)
    out.say(f"{', '.join(changed)} written" if changed else "nothing was changed")


def _edited(name: str, values: dict[str, str]) -> dict[str, str]:
    """The values after editing."""
    import yaml

    from holdfast.errors import SettingsError
    from holdfast.settings.rendering import load

    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    found = load(name, edited(text, "secrets.yaml"))
    if not isinstance(found, dict) or not all(
        isinstance(v, (str, int, float)) for v in found.values()
    ):
        raise SettingsError("each line must be a path and its value: nothing was changed")
    return {str(path): str(value) for path, value in found.items()}


@command("secrets seal")
def seal(
    folder: Annotated[Path, argument("A tree of settings.", "DIR")], seed: SeedOption = None
) -> None:
    """Seal the plain-text secrets of a tree, so that it can be kept in git."""
    from holdfast.settings.editing import seal_tree

    done = seal_tree(folder, sealer(seed))
    for id in done:
        out.say(f"sealed     {id}")
    if not done:
        out.say("every secret is sealed already")


def _remember(generation: int, seed: Path | None) -> None:
    """Let 'holdfast auth agent' issue this generation, if the seed is in the users' folder."""
    from holdfast.identity.users import USERS, UserFolder

    folder = seed_file(seed).parent
    if (folder / USERS).exists():
        UserFolder(folder).raise_generation(generation)
    else:
        out.note(f"issue new agents with 'holdfast auth agent ID --generation {generation}'")


@command("secrets rotate")
async def rotate(
    finish: Annotated[
        bool, option("Drop the old keys, once every agent has the new ones.")
    ] = False,
    force: Annotated[bool, option("Finish although some agents do not have the new keys.")] = False,
    seed: SeedOption = None,
) -> None:
    """Start a new generation of keys beside the old one; --finish drops the old one.

    Agents get their new keys, and can read their secrets throughout.
    """
    from holdfast.settings.publisher import Publisher

    async with operating() as by:
        publisher = Publisher(by.client.broker, sealer(seed), by.client.records)
        plan = await actions.rotate_secrets(by, publisher, finish=finish, force=force)
    _remember(max(plan.generations), seed)
    if out.as_json({"generations": plan.generations}):
        return
    in_use = " and ".join(map(str, plan.generations))
    out.say(f"generation {in_use} in use")
    if not finish:
        out.note(
            "when 'holdfast settings status' shows every agent on it, finish with "
            "'holdfast secrets rotate --finish'"
        )
