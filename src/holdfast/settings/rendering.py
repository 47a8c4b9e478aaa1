"""Rendering: templates and an agent's facts in, one merged mapping out. No I/O, no secrets.

Placeholders pass through untouched: the agent inserts secrets afterwards, outside the process that
runs this code. So a template cannot use a secret, and no template error can reveal one.

The environment is Jinja's immutable sandbox without a loader: no include, import or extends, and no
attribute that leads into Python. Undefined names are errors (`default(…)` allows them). This module
bounds a file's output; the caller (`renderer`) bounds time and memory.

Mappings merge key by key; any other value is replaced by the later file's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

import jinja2
import yaml
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from holdfast.errors import SettingsError
from holdfast.settings.document import LONGEST_BYTES, not_yaml

LARGEST_OUTPUT: Final = 2 * LONGEST_BYTES  # stops loops that would fill memory
DEEPEST: Final = 64  # far below Python's recursion limit

_NO_FILES: Final = "templates cannot read files: no include, import, from or extends"
_READERS: Final = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)

Values = dict[str, Any]


class _Strict(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """Plain values only; duplicate keys are errors, and dates stay strings."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's convention
        first: [(tag, pattern) for tag, pattern in known if not tag.endswith(":timestamp")]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag.endswith(":merge"):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, "a key occurs twice", key.start_mark
                )
            seen.add(key.value)
        found: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return found


def _plain_tags_only() -> None:
    plain = ("null", "bool", "int", "float", "str", "seq", "map")
    kept = {f"tag:yaml.org,2002:{name}" for name in plain} | {None}
    _Strict.yaml_constructors = {
        tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag in kept
    }


_plain_tags_only()


def load(file: str, text: str) -> Any:
    """Parse YAML into plain values."""
    try:
        return yaml.load(text, Loader=_Strict)  # noqa: S506 - stricter than SafeLoader
    except yaml.YAMLError as error:
        raise SettingsError(not_yaml(file, error), reason="template") from None
    except (RecursionError, ValueError):
        raise SettingsError(f"{file}.yaml has a value that cannot be read") from None


@functools.cache
def environment() -> jinja2.Environment:
    """The sandbox for every template."""
    made = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, autoescape=False)
    made.globals.pop("lipsum")
    return made


@functools.lru_cache(maxsize=512)
def _compiled(file: str, text: str) -> jinja2.Template:
    check_template(file, text)
    return environment().from_string(text)


def check_template(file: str, text: str) -> None:
    """Reject what no agent could render: syntax errors, and attempts to read files."""
    try:
        tree = environment().parse(text)
        reader = next(tree.find_all(_READERS), None)
    except jinja2.TemplateSyntaxError as error:
        raise SettingsError(
            f"{file}.yaml, line {error.lineno}, has a template that cannot be read: {error.message}"
        ) from None
    except RecursionError:
        raise SettingsError(f"{file}.yaml has a template that is nested too deeply") from None
    if reader is not None:
        raise SettingsError(f"{file}.yaml, line {reader.lineno}: {_NO_FILES}")


def render(files: Iterable[tuple[str, str]], facts: Mapping[str, Any]) -> Values:
    """Render files in order and merge them; a template sees what those before it have set."""
    merged: Values = {}
    for file, text in files:
        values = load(file, _rendered(file, text, facts, merged))
        if values is None:
            continue
        if not isinstance(values, dict):
            raise SettingsError(f"{file}.yaml renders to {_kind(values)}, not to a mapping")
        _check_plain(file, values, DEEPEST)
        merged = merge(merged, values)
    return merged


def _rendered(file: str, text: str, facts: Mapping[str, Any], settings: Values) -> str:
    out, size = [], 0
    try:
        for piece in _compiled(file, text).generate(facts=facts, settings=settings):
            out.append(piece)
            size += len(piece)
            if size > LARGEST_OUTPUT:
                raise SettingsError(f"{file}.yaml renders to more than {LARGEST_OUTPUT:,} bytes")
    except jinja2.TemplateError as error:
        raise SettingsError(f"{file}.yaml cannot be rendered: {error}", reason="template") from None
    except SettingsError as error:
        raise SettingsError(str(error), reason="template") from None
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise SettingsError(f"{file}.yaml cannot be rendered: {what}", reason="template") from None
    return "".join(out)


def merge(below: Values, above: Mapping[str, Any]) -> Values:
    """`above` merged over `below`; changes neither."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        both = isinstance(under, dict) and isinstance(value, dict)
        merged[key] = merge(under, value) if both else value  # type: ignore[arg-type]
    return merged


def _check_plain(file: str, value: Any, depth: int) -> None:
    """Check that values can be stored as JSON: string keys, finite numbers, limited depth."""
    if depth < 0:
        raise SettingsError(f"{file}.yaml is nested more than {DEEPEST} deep", reason="template")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                text = f"{file}.yaml has the key {key!r}, which is no text: put quotes around it"
                raise SettingsError(text, reason="template")
            _check_plain(file, inner, depth - 1)
    elif isinstance(value, list):
        for inner in value:
            _check_plain(file, inner, depth - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{file}.yaml has a number that is not finite", reason="template")


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, Sequence) and not isinstance(value, str) else "one value"
