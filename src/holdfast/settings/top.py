"""The top: which agents get which files, by target expressions.

    base:
      'web*': [common, db]
      'G@os:debian': [apt]

An agent gets the files of every expression that matches it, in the order written; a file named
twice counts at its first position. Files are named without `.yaml`.

Secrets depend on agent ids only: expressions that use facts may not name a file with secrets,
because a host chooses its own facts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from holdfast.errors import SettingsError
from holdfast.model import target as targets
from holdfast.model.target import InvalidTarget, Target
from holdfast.settings.document import TAG
from holdfast.settings.rendering import load

NAME: Final = "top"
_BASE: Final = "base"
_FILE = re.compile(r"[A-Za-z0-9_-]{1,100}(/[A-Za-z0-9_-]{1,100}){0,9}")


class TopRule(NamedTuple):
    """One line of the top."""

    target: Target
    files: tuple[str, ...]


class Top:
    """The parsed top."""

    def __init__(self, rules: Iterable[TopRule]) -> None:
        self.rules = tuple(rules)

    @classmethod
    def parse(cls, text: str) -> Top:
        """Parse a top; it has no templates and no secrets."""
        if TAG in text:
            raise SettingsError(f"top.yaml has {TAG}: secrets belong in the files that it names")
        found = load(NAME, text)
        if found is None:
            return cls(())
        if not isinstance(found, dict) or set(found) != {_BASE}:
            raise SettingsError(
                "top.yaml must have the one key 'base', with expressions and lists of files below "
                "it: base: {'web*': [db]}"
            )
        rules = found[_BASE] or {}
        if not isinstance(rules, dict):
            raise SettingsError("top.yaml: 'base' must map expressions to lists of files")
        return cls(_rule(expression, files) for expression, files in rules.items())

    @property
    def files(self) -> set[str]:
        """Every file named."""
        return {file for rule in self.rules for file in rule.files}

    def files_for(self, agent: str, facts: Mapping[str, Any]) -> list[str]:
        """The files of one agent, in merge order."""
        found: dict[str, None] = {}
        for rule in self.rules:
            if rule.target.matches(agent, facts):
                found |= dict.fromkeys(rule.files)
        return list(found)

    def check_entitlement(self, file: str) -> None:
        """Reject a file with secrets if any expression assigns it by facts."""
        for rule in self.rules:
            if file in rule.files and rule.target.needs_facts:
                raise SettingsError(
                    f"{file}.yaml has secrets and top.yaml gives it to {rule.target.text!r}, which "
                    "selects by facts, and a host could claim any facts. Name the agents by their "
                    "ids (web*, "
                    "E@web[0-9]+, L@web1,web2), or move the secrets to another file",
                    reason="entitlement",
                )

    def entitled(self, file: str, agents: Iterable[str]) -> set[str]:
        """Agents that get a file, among the given ones and those named literally; only ids
        decide."""
        known, found = set(agents), set()
        for rule in self.rules:
            if file in rule.files and not rule.target.needs_facts:
                candidates = known | set(rule.target.named or ())
                found |= {agent for agent in candidates if rule.target.matches(agent, {})}
        return found


def _rule(expression: object, files: object) -> TopRule:
    try:
        target = targets.parse(expression)
    except InvalidTarget as error:
        raise SettingsError(f"top.yaml: {expression!r}: {error}") from None
    if not isinstance(files, list) or not files:
        raise SettingsError(f"top.yaml: {expression!r} must have a list of files, such as [db]")
    return TopRule(target, tuple(check_file(file) for file in files))


def check_file(name: object) -> str:
    """Check a file's name: letters, digits, '-' and '_', with '/' between folders."""
    if not isinstance(name, str) or not _FILE.fullmatch(name) or name == NAME:
        raise SettingsError(
            f"{name!r} cannot name a file of the settings: letters, digits, '-' and '_', with '/' "
            "between folders, without '.yaml'"
        )
    return name
