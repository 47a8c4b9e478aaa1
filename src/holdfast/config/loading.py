"""Loads a role's record from arguments, environment, file and defaults, in this order.

Guaranteed: environment and file are read when `load` is called, never at import; errors name the
value's source; unknown tables and keys of the file are rejected.

Not checked: unknown environment variables, because Kubernetes adds `HOLDFAST_…_PORT` and others for
every service of that name. A missing file counts as empty unless `HOLDFAST_CONFIG` names it; one
that cannot be read, or is not TOML, raises `ConfigError`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any, TypeVar

from holdfast.config.option import RoleConfig, checked, options, variable
from holdfast.errors import ConfigError

FILE = "holdfast.toml"
FILE_VARIABLE = "HOLDFAST_CONFIG"

R = TypeVar("R", bound=RoleConfig)


def load(role: type[R], **overrides: Any) -> R:
    """Load a role's record; an override of None means not given."""
    known = {spec.name: spec for spec in options(role)}
    for name in overrides:
        if name not in known:
            raise ConfigError(f"{role.__name__} has no {name!r}: it has {', '.join(known)}")
    path = _file_path()
    table = _read_file(path).get(role.table, {})
    values, origins = {}, []
    for name, spec in known.items():
        found = _find(role, spec, overrides, table, path)
        if found is not None:
            values[name] = checked(spec, *found)
            origins.append(found[1])
    try:
        return role(**values)
    except ConfigError as error:
        given = f" (given: {', '.join(origins)})" if origins else ""
        raise ConfigError(f"{error}{given}") from None


def _find(
    role: type[RoleConfig],
    spec: Field[Any],
    overrides: Mapping[str, Any],
    table: Mapping[str, Any],
    path: Path,
) -> tuple[Any, str] | None:
    """The first value given for a field, and its source for messages."""
    if overrides.get(spec.name) is not None:
        return overrides[spec.name], f"{role.table}.{spec.name}"
    name = variable(role, spec.name)
    if text := os.environ.get(name, "").strip():
        return _parsed(spec, text), f"environment variable {name}"
    if spec.name in table:
        return table[spec.name], f"{path}: {role.table}.{spec.name}"
    return None


def _parsed(spec: Field[Any], text: str) -> Any:
    """Parse an environment variable as the file would; unparsable text stays text."""
    try:
        return {"int": int, "float": float}.get(str(spec.type), str)(text)
    except ValueError:
        return text


def _file_path() -> Path:
    return Path(os.environ.get(FILE_VARIABLE, "").strip() or FILE)


def _read_file(path: Path) -> dict[str, dict[str, Any]]:
    """The file's tables, with all keys checked; empty if there is no file."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if os.environ.get(FILE_VARIABLE, "").strip():
            raise ConfigError(f"{FILE_VARIABLE} names {path}, which does not exist") from None
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for name, table in found.items():
        _check_keys(path, name, table)
    return found


def _check_keys(path: Path, name: str, table: Any) -> None:
    from holdfast.config.all_roles import ROLES  # only a file needs all roles

    if name not in ROLES or not isinstance(table, dict):
        raise ConfigError(f"{path}: {name!r} is not a table; known are {', '.join(ROLES)}")
    known = [spec.name for spec in options(ROLES[name])]
    for key in table:
        if key not in known:
            raise ConfigError(f"{path}: {name}.{key} is unknown; known are {', '.join(known)}")
