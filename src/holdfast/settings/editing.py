"""Writes secrets into the files of a tree, sealed at rest.

Comments, order and templates are preserved: only one value is replaced, or one key added. Each
change is parsed back before it is written; if the secret is not found at its path, the change is
rejected and the file stays unchanged.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from holdfast.errors import SettingsError
from holdfast.names import encode
from holdfast.settings import document
from holdfast.settings.document import TAG, Secret, compose, mask, nodes, secret_id
from holdfast.settings.sealing import AT_REST, Sealer
from holdfast.settings.top import NAME
from holdfast.settings.tree import SUFFIX, read_text, yaml_files

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_RESERVED = re.compile(r"(?i)y|n|yes|no|on|off|true|false|null|none|~")


def locate(path: Path) -> tuple[Path, str]:
    """The tree that contains a file, and the file's name in it."""
    if path.suffix != SUFFIX or path.name == NAME + SUFFIX:
        raise SettingsError(
            f"{path} is not a file for secrets: one that ends in .yaml, not the top"
        )
    for folder in path.resolve().parents:
        if (folder / (NAME + SUFFIX)).exists():
            return folder, path.resolve().relative_to(folder).with_suffix("").as_posix()
    raise SettingsError(f"{path} is in no tree of settings: no folder above it has a top.yaml")


def secrets_in(path: Path) -> tuple[str, list[Secret]]:
    """The file's name in its tree, and its secrets as written there."""
    _, name = locate(path)
    return name, document.secrets(name, read_text(path)) if path.exists() else []


def check_exists(path: Path) -> None:
    """Reject a file that does not exist: the name may be mistyped."""
    folder, name = locate(path)
    if not path.exists():
        known = ", ".join(found for found, _ in yaml_files(folder) if found != NAME)
        raise SettingsError(
            f"{path} does not exist: pass --create to make {name!r} a new file"
            + (f" (the tree has {known})" if known else "")
        )


def set_secrets(path: Path, values: dict[str, str], sealer: Sealer) -> None:
    """Seal values and write them into a file; adds missing paths."""
    _, name = locate(path)
    text = read_text(path) if path.exists() else ""
    for where, value in values.items():
        sealed = sealer.seal_at_rest(secret_id(name, where), value)
        text = put(name, text, where, sealed)
    path.write_text(text, encoding="utf-8")


def seal_tree(folder: Path, sealer: Sealer) -> list[str]:
    """Seal every plaintext secret of a tree; returns their ids."""
    sealed = []
    for name, path in yaml_files(folder):
        if name == NAME:
            continue
        plain = {
            secret.path: secret.value
            for secret in document.secrets(name, read_text(path))
            if not secret.value.startswith(AT_REST)
        }
        if plain:
            set_secrets(path, plain, sealer)
            sealed += [secret_id(name, where) for where in plain]
    return sealed


def put(file: str, text: str, path: str, value: str) -> str:
    """The text with `!encrypted value` at a path."""
    changed = _replaced(file, text, path, value) or _added(file, text, path, value)
    found = [s for s in document.secrets(file, changed) if s.path == path]
    if [s.value for s in found] != [value]:
        raise SettingsError(
            f"{path} cannot be added to {file}.yaml automatically: put '{TAG} x' there with an "
            "editor, and set it again"
        )
    return changed


def _replaced(file: str, text: str, path: str, value: str) -> str:
    """The text with an existing path's value replaced; empty if the path does not exist."""
    for where, node in nodes(file, text):
        if where != path:
            continue
        if not isinstance(node, yaml.ScalarNode):
            raise SettingsError(f"{path} of {file}.yaml is not a single value: name one inside it")
        start, end = node.start_mark.index, node.end_mark.index
        before = " " if text[start - 1 : start] == ":" else ""
        after = "\n" if text[start:end].endswith("\n") else ""
        return f"{text[:start]}{before}{TAG} {value}{after}{text[end:]}"
    return ""


def _added(file: str, text: str, path: str, value: str) -> str:
    """The text with a new key added."""
    if "{%" in text:
        raise SettingsError(
            f"{file}.yaml has no {path}, and template statements leave no clear place for it: add "
            f"it with an editor as '{TAG} x', and set it again"
        )
    parent, rest = _parent(file, text, path)
    if parent is None:
        lines = _lines(rest, 0, value)
        return f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{lines}\n"
    if parent.flow_style or not parent.value:
        raise SettingsError(
            f"{file}.yaml has {path} inside {{}}: write it over several lines first"
        )
    first = parent.value[0][0].start_mark
    return (
        f"{text[: first.index]}{_lines(rest, first.column, value)}\n{' ' * first.column}"
        + (text[first.index :])
    )


def _parent(file: str, text: str, path: str) -> tuple[yaml.MappingNode | None, list[str]]:
    """The innermost existing mapping on a path (None: the root), and the keys missing below it."""
    parts = path.split(".")
    known = dict(nodes(file, text))
    for length in range(len(parts) - 1, 0, -1):
        node = known.get(".".join(parts[:length]))
        if isinstance(node, yaml.MappingNode):
            return node, parts[length:]
        if node is not None:
            raise SettingsError(f"{'.'.join(parts[:length])} of {file}.yaml is not a mapping")
    root = compose(file, mask(text))
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise SettingsError(f"{file}.yaml is not a mapping")
    if root is not None and root.flow_style:
        return root, parts
    return None, parts


def _lines(parts: list[str], column: int, value: str) -> str:
    """Nested keys as lines; the first is not indented because the text already is."""
    lines = [_key(part) + ":" for part in parts]
    lines[-1] += f" {TAG} {value}"
    return "\n".join(
        (" " * (column + 2 * depth) if depth else "") + line for depth, line in enumerate(lines)
    )


def _key(name: str) -> str:
    if encode(name) != name:
        raise SettingsError(f"{name!r} cannot be added by itself: write the key with an editor")
    plain = _PLAIN_KEY.fullmatch(name) and not _RESERVED.fullmatch(name)
    return name if plain else json.dumps(name)
