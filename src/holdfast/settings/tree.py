"""The tree: a folder of YAML files with `top.yaml`, read and checked as a whole.

Guaranteed: a tree that was read can be published. Every file is YAML around templates that compile,
has a valid name and size, and is inside the folder; every file the top names exists; no file with
secrets is assigned by facts; no secret also appears in plaintext elsewhere in the tree. Violations
raise `SettingsError`, which never contains a secret's value.

Hidden files and folders are skipped, and so are files that are not YAML.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.errors import SettingsError
from holdfast.settings import document
from holdfast.settings.document import LONGEST_BYTES, secret_id
from holdfast.settings.rendering import check_template
from holdfast.settings.sealing import AT_REST, Sealer
from holdfast.settings.top import NAME, Top, check_file

SUFFIX: Final = ".yaml"
MOST_FILES: Final = 10_000  # more suggests the wrong folder
_LEAST_CHECKED: Final = 8
"""Shorter secrets may occur in the tree by chance."""


class Source(NamedTuple):
    """One file: its published text, and its secrets by path."""

    text: str
    secrets: dict[str, str]

    def __repr__(self) -> str:
        return f"Source({len(self.text)} characters, {len(self.secrets)} secrets)"


class Tree(NamedTuple):
    """A folder's settings."""

    files: dict[str, Source]
    """By name, including the top."""
    top: Top
    plain: tuple[str, ...] = ()
    """Secrets that are not sealed at rest."""

    @property
    def secrets(self) -> dict[str, str]:
        """Every secret by its id."""
        return {
            secret_id(file, path): value
            for file, source in self.files.items()
            for path, value in source.secrets.items()
        }

    @property
    def unused(self) -> list[str]:
        """Files that no expression names."""
        return sorted(set(self.files) - self.top.files - {NAME})


def read_tree(folder: Path, sealer: Sealer) -> Tree:
    """Read and check a folder."""
    files: dict[str, Source] = {}
    plain: list[str] = []
    for name, text in _texts(folder):
        files[name] = _source(name, text, sealer, plain)
    if not files:
        return Tree({}, Top(()))
    if NAME not in files:
        raise SettingsError(f"{folder} has no top.yaml: it says which agents get which files")
    tree = Tree(files, Top.parse(files[NAME].text), tuple(plain))
    _check(tree)
    return tree


def yaml_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of a tree by name."""
    if not folder.is_dir():
        raise SettingsError(f"{folder} is not a folder")
    root = folder.resolve()
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if any(part.startswith(".") for part in inside.parts) or not path.is_file():
            continue
        if path.suffix in (".yml", ".YAML", ".YML"):
            raise SettingsError(f"{inside}: files of the settings end in .yaml: rename it")
        if path.suffix != SUFFIX:
            continue
        if not path.resolve().is_relative_to(root):
            raise SettingsError(f"{inside} is a link that leads out of {folder}: copy the file")
        name = inside.with_suffix("").as_posix()
        yield (name if name == NAME else check_file(name)), path


def read_text(path: Path) -> str:
    """Read a file as UTF-8, up to `LONGEST_BYTES`."""
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8")
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not UTF-8 text") from None
    if len(raw) > LONGEST_BYTES:
        raise SettingsError(f"{path} has {len(raw):,} bytes and the limit is {LONGEST_BYTES:,}")
    return text


def _texts(folder: Path) -> Iterator[tuple[str, str]]:
    for number, (name, path) in enumerate(yaml_files(folder), 1):
        if number > MOST_FILES:
            raise SettingsError(f"{folder} has more than {MOST_FILES:,} files")
        yield name, read_text(path)


def _source(name: str, text: str, sealer: Sealer, plain: list[str]) -> Source:
    if name == NAME:
        return Source(text, {})
    found = document.read(name, text)
    check_template(name, found.text)
    secrets = {}
    for secret in found.secrets:
        id = secret_id(name, secret.path)
        secrets[secret.path] = sealer.open_at_rest(id, secret.value)
        if not secret.value.startswith(AT_REST):
            plain.append(id)
    return Source(found.text, secrets)


def _check(tree: Tree) -> None:
    for missing in sorted(tree.top.files - set(tree.files)):
        raise SettingsError(f"top.yaml names {missing!r} and there is no {missing}.yaml")
    for name, source in tree.files.items():
        if source.secrets:
            tree.top.check_entitlement(name)
    for id, value in tree.secrets.items():
        if len(value) < _LEAST_CHECKED:
            continue
        for name, source in tree.files.items():
            if value in source.text:
                raise SettingsError(
                    f"the value of secret {id} is also in {name}.yaml without !encrypted: it would "
                    "be published as plain text"
                )
