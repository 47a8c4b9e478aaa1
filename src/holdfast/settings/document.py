"""A settings document: YAML with templates, and secrets marked `!encrypted`.

The publisher must find every secret before anything is rendered, so templates are masked: `{{ }}`
becomes letters, `{% %}` and `{# #}` become spaces, of the same length. The result is YAML in which
every offset is the same as in the original text.

Guaranteed: what `read` returns contains no `!encrypted` value. Each is replaced by a placeholder
that names its path; a mark that cannot be parsed, or an unknown tag (`!encrypt`), rejects the
document. Errors never quote the document: the faulty line may be the one with the secret.

Not checked here: whether a template renders, and what it renders to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

import yaml

from holdfast.errors import SettingsError
from holdfast.names import encode

TAG: Final = "!encrypted"
PLACEHOLDER: Final = re.compile(r"__HOLDFAST_SECRET\(([A-Za-z0-9_=.:/~-]+)\)__")
MARK: Final = "__HOLDFAST_SECRET("
LONGEST_BYTES: Final = 512 * 1024  # as one message it must fit NATS's default limit of 1 MiB

_OPENING = re.compile(r"\{\{|\{%|\{#")
_END_OF_RAW = re.compile(r"\{%[-+]?\s*endraw\s*[-+]?%\}")
_CLOSING: Final = {"{{": "}}", "{%": "%}"}
_BRACKETS: Final = {"(": ")", "[": "]", "{": "}"}
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_CORE = re.compile(r"tag:yaml\.org,2002:(null|bool|int|float|str|seq|map|merge|timestamp)")


class Secret(NamedTuple):
    """A value marked `!encrypted` and its span in the text."""

    path: str
    """Keys and list indexes joined by dots, encoded to plain characters."""
    value: str
    start: int
    end: int

    def __repr__(self) -> str:
        return f"Secret({self.path!r})"


class Document(NamedTuple):
    """A document with its secrets cut out, and those secrets."""

    text: str
    secrets: tuple[Secret, ...]


def placeholder(id: str) -> str:
    """Replaces the secret with this id in a published file."""
    return f"{MARK}{id})__"


def secret_id(file: str, path: str) -> str:
    """A secret's unique id: its file and its path in it."""
    return f"{file}:{path}"


def read(file: str, text: str) -> Document:
    """Cut the secrets out of a document."""
    if MARK in text:
        raise _refused(file, text.index(MARK), text, "has text that looks like a placeholder")
    found = secrets(file, text)
    out, at = [], 0
    for secret in found:
        tail = "\n" if text[secret.start : secret.end].endswith("\n") else ""
        out += [text[at : secret.start], f'"{placeholder(secret_id(file, secret.path))}"{tail}']
        at = secret.end
    sanitized = "".join([*out, text[at:]])
    if TAG in sanitized:
        raise SettingsError(
            f"{file}.yaml has {TAG} where it cannot be understood (in a comment, a quoted text or "
            "a template): remove it, or write it before one value"
        )
    return Document(sanitized, tuple(found))


def secrets(file: str, text: str) -> list[Secret]:
    """Every secret of a document, in order; rejects text that, once masked, is not YAML."""
    masked = mask(text)
    counts: dict[str, int] = {}
    found = []
    marked = [(path, node) for path, node in nodes(file, text) if node.tag == TAG]
    for path, node in sorted(marked, key=lambda pair: int(pair[1].start_mark.index)):
        value = _value(file, node, text, masked)
        count = counts[path] = counts.get(path, 0) + 1
        name = path if count == 1 else f"{path}~{count}"
        found.append(Secret(name, value, node.start_mark.index, node.end_mark.index))
    return found


def nodes(file: str, text: str) -> Iterator[tuple[str, yaml.Node]]:
    """Every value of a document with its path, templates masked."""
    return _walk(file, compose(file, mask(text)), text)


def compose(file: str, text: str) -> yaml.Node | None:
    """The YAML nodes of a text, with their positions."""
    try:
        found: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        return found
    except yaml.YAMLError as error:
        raise SettingsError(not_yaml(file, error)) from None
    except RecursionError:
        raise SettingsError(f"{file}.yaml is nested too deeply") from None


def not_yaml(file: str, error: yaml.YAMLError) -> str:
    """The error and its position, without quoting the text."""
    mark = getattr(error, "problem_mark", None)
    where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    problem = _QUOTED.sub(_blanked, str(getattr(error, "problem", "") or ""))
    hint = "a {% … %} needs a line of its own, or quotes around it"
    return f"{file}.yaml is not YAML{where}{': ' + problem if problem else ''} ({hint})"


def _blanked(quoted: re.Match[str]) -> str:
    """Show single characters and the parser's `<stream end>`; hide names and tags."""
    text = quoted[0]
    return text if len(text) == 3 or text[1:2] == "<" else "…"


def _walk(file: str, root: yaml.Node | None, text: str) -> Iterator[tuple[str, yaml.Node]]:
    """Every node once, with its path; rejects unknown tags and secrets that are not scalars."""
    seen: set[int] = set()
    waiting: list[tuple[str, yaml.Node]] = [] if root is None else [("", root)]
    while waiting:
        path, node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        _check(file, node, text)
        yield path, node
        if isinstance(node, yaml.SequenceNode):
            waiting += [(_below(path, str(n)), child) for n, child in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            for key, child in node.value:
                if key.tag == TAG or not isinstance(key, yaml.ScalarNode):
                    raise _refused(file, key.start_mark.index, text, "has a key that is no text")
                _check(file, key, text)
                waiting.append((_below(path, key.value), child))


def _below(path: str, key: str) -> str:
    name = encode(key) if key else "="
    return f"{path}.{name}" if path else name


def _check(file: str, node: yaml.Node, text: str) -> None:
    at = node.start_mark.index
    if node.tag == TAG:
        if not isinstance(node, yaml.ScalarNode):
            raise _refused(file, at, text, f"has {TAG} before several values: mark each by itself")
        if "&" in text[at : node.end_mark.index].partition(TAG)[0]:
            raise _refused(file, at, text, "gives a secret an anchor: repeat the secret instead")
    elif not _CORE.fullmatch(node.tag):
        raise _refused(file, at, text, f"has a tag that is not known: only {TAG} is")


def _value(file: str, node: yaml.Node, text: str, masked: str) -> str:
    """A secret's literal value: template syntax inside a secret is not a template."""
    span = slice(node.start_mark.index, node.end_mark.index)
    if text[span] != masked[span]:
        alone = compose(file, text[span])
        if not isinstance(alone, yaml.ScalarNode) or alone.tag != TAG:
            raise _refused(file, span.start, text, "has a secret that looks like a template: quote")
        node = alone
    value = str(node.value)
    if not value:
        raise _refused(
            file,
            span.start,
            text,
            "has a secret without a value: 'holdfast secrets set FILE PATH' asks for it",
        )
    return value


def _refused(file: str, at: int, text: str, what: str) -> SettingsError:
    return SettingsError(f"{file}.yaml, line {text.count(chr(10), 0, at) + 1}, {what}")


# ---------------------------------------------------------------- templates


def mask(text: str) -> str:
    """Blank out templates; every other character keeps its offset."""
    out, at = [], 0
    while found := _OPENING.search(text, at):
        start, end = found.start(), _end(text, found.start(), found[0])
        if end < 0:  # never closed, so not a template
            out.append(text[at : start + 2])
            at = start + 2
            continue
        filler = "x" if found[0] == "{{" else " "
        out += [text[at:start], re.sub(r"[^\r\n]", filler, text[start:end])]
        at = end
        if found[0] == "{%" and text[start + 2 : end - 2].strip(" -+") == "raw":
            closed = _END_OF_RAW.search(text, at)
            out.append(text[at : closed.start() if closed else at])
            at = closed.start() if closed else at
    return "".join([*out, text[at:]])


def _end(text: str, start: int, opening: str) -> int:
    """The end of the template starting there, or -1; ignores closing marks inside strings."""
    if opening == "{#":
        return text.find("#}", start) + 2 if "#}" in text[start:] else -1
    open_brackets: list[str] = []
    closing, at = _CLOSING[opening], start + 2
    while at < len(text):
        char = text[at]
        if not open_brackets and text.startswith(closing, at):
            return at + 2
        if char in "'\"":
            at = _end_of_string(text, at)
            continue
        if char in _BRACKETS:
            open_brackets.append(_BRACKETS[char])
        elif open_brackets and char == open_brackets[-1]:
            open_brackets.pop()
        at += 1
    return -1


def _end_of_string(text: str, start: int) -> int:
    at = start + 1
    while at < len(text) and text[at] != text[start]:
        at += 2 if text[at] == "\\" else 1
    return at + 1
