"""Target expressions: which agents a command or a set of settings is for.

    word        web*  db?  web[0-9]       a glob over agent ids
                E@web\\d+                  a regular expression, matched from the start of the id
                L@web1,web2               a list of ids
                G@os:linux                a fact; `G@mem>=4096`, `G@net.eth0.mtu!=1500`
    expression  word | not expression | expression and expression | expression or expression
                | ( expression )

`not` binds before `and`, `and` before `or`; the operators are read in any case. Words have no
spaces in them. An expression is parsed once, into plain functions, and then asked for each agent:
a hundred thousand fact sets take about a tenth of a second.

Facts. Nested ones are reached by dots. Two sides that both read as numbers are compared as numbers,
else as text without regard to case; `:` also takes a glob. A fact that is a list matches when one
of its members does (`!=`: when none is equal). A missing fact matches nothing, not even `!=`: a
host that reports nothing is not selected. Write `not G@os:windows` for "everything but".

Regular expressions come from operators and may still be slow by mistake. An expression that could
take more than a bounded number of steps on the longest id is refused when it is parsed.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from holdfast.errors import InvalidInput

LONGEST_EXPRESSION: Final = 512 * 1024
"""Characters of an expression: enough for a list of thousands of ids, at half of the server's
default message limit."""
MOST_WORDS: Final = 500
"""Most words of an expression: each one is a call for each agent."""
DEEPEST: Final = 50
"""Most nested parentheses: each level is four frames of the parser, so this stays far below
Python's limit of a thousand."""
LONGEST_PATTERN: Final = 500
"""Characters of a pattern, far more than people write."""
LONGEST_ID: Final = 64
"""As `names.check_name` allows."""
MOST_STEPS: Final = 200_000
"""Most ways in which one pattern may try to match one id, which take a few milliseconds."""

MOST_REMEMBERED: Final = 1_000
"""Answers cached for each comparison: facts have few different values, but agents may send any."""
Facts = Mapping[str, Any]
Matcher = Callable[[str, Facts], bool]

_GLOB_WORD = re.compile(r"[A-Za-z0-9_.*?\[\]!-]+")
_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,63}")
_FACT = re.compile(r"([A-Za-z0-9_.-]+?)(!=|>=|<=|==|=|>|<|:)(.+)", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(\d{1,40}|\d{0,40}\.\d{1,40}|\d{1,40}\.)([eE][+-]?\d{1,3})?")
_WILD = re.compile(r"[*?\[]")
_PARSER: Final[Any] = importlib.import_module("re._parser")
"""The tree of a pattern; only the standard library's own, unlisted module gives it."""
_OPERATORS: Final = frozenset({"and", "or", "not"})
_HOW_TO = "write a glob (web*), E@regex, L@a,b, G@fact:value, with and, or, not and ( )"


class InvalidTarget(InvalidInput):
    """A target expression that cannot be understood, or would take too long."""


class Target:
    """A parsed expression."""

    __slots__ = ("_match", "named", "needs_facts", "text")

    def __init__(
        self, text: str, match: Matcher, *, needs_facts: bool, named: tuple[str, ...] | None
    ) -> None:
        self.text = text
        self._match = match
        self.needs_facts = needs_facts
        """Whether it looks at facts; otherwise ids are enough."""
        self.named = named
        """The ids, if it is only a list of them: then unknown agents are included too."""

    def matches(self, agent: str, facts: Facts) -> bool:
        """Whether it selects an agent."""
        return self._match(agent, facts)

    def select(self, agents: Mapping[str, Facts] | Iterable[tuple[str, Facts]]) -> list[str]:
        """The agents that it selects, in the given order."""
        pairs = agents.items() if isinstance(agents, Mapping) else agents
        match = self._match
        return [agent for agent, facts in pairs if match(agent, facts)]

    def __repr__(self) -> str:
        return f"Target({self.text!r})"


def parse(text: object) -> Target:
    """The target of an expression; `InvalidTarget` says what is wrong with it."""
    if not isinstance(text, str) or not text.strip():
        raise InvalidTarget(f"the target is empty: {_HOW_TO}")
    if len(text) > LONGEST_EXPRESSION:
        raise InvalidTarget(f"the target has more than {LONGEST_EXPRESSION:,} characters")
    return _ExpressionParser(text.strip()).target()


# ---------------------------------------------------------------- words


def _words(text: str) -> list[str]:
    """The words of an expression; parentheses stand alone unless they belong to a regex."""
    found: list[str] = []
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        end = at + 1 if text[at] in "()" else _end_of_word(text, at)
        found.append(text[at:end])
        if len(found) > 4 * MOST_WORDS:
            raise InvalidTarget(f"the target has too many parts: at most {MOST_WORDS} words")
        at = end
    return found


def _end_of_word(text: str, at: int) -> int:
    """The end of a word: a space, or a parenthesis that it did not open."""
    regex = text.startswith("E@", at)
    depth, in_class, skip = 0, False, False
    for here in range(at, len(text)):
        char = text[here]
        if char.isspace():
            return here
        if skip:
            skip = False
        elif regex and char == "\\":
            skip = True
        elif regex and in_class:
            in_class = char != "]"
        elif regex and char == "[":
            in_class = True
        elif char == "(":
            depth += 1
        elif char == ")":
            if not depth:
                return here
            depth -= 1
    return len(text)


# ---------------------------------------------------------------- grammar


class _ExpressionParser:
    """Recursive descent over the words."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._words = _words(text)
        self._at = 0
        self._depth = 0
        self._count = 0
        self._needs_facts = False

    def target(self) -> Target:
        match = self._either()
        if self._at < len(self._words):
            word = self._words[self._at]
            why = (
                "closes nothing"
                if word == ")"
                else "follows without an operator: put 'and' or 'or' before it"
            )
            raise InvalidTarget(f"target: {_shown(word)} {why}")
        named = _named(self._words[0]) if len(self._words) == 1 else None
        return Target(self._text, match, needs_facts=self._needs_facts, named=named)

    def _next_is(self, operator: str) -> bool:
        if self._at < len(self._words) and self._words[self._at].lower() == operator:
            self._at += 1
            return True
        return False

    def _either(self) -> Matcher:
        parts = [self._all()]
        while self._next_is("or"):
            parts.append(self._all())
        return _any(parts)

    def _all(self) -> Matcher:
        parts = [self._one()]
        while self._next_is("and"):
            parts.append(self._one())
        return _every(parts)

    def _one(self) -> Matcher:
        negate = False
        while self._next_is("not"):
            negate = not negate
        match = self._group() if self._next_is("(") else self._word()
        return (lambda agent, facts: not match(agent, facts)) if negate else match

    def _group(self) -> Matcher:
        self._depth += 1
        if self._depth > DEEPEST:
            raise InvalidTarget(f"target: parentheses go deeper than {DEEPEST}")
        match = self._either()
        if not self._next_is(")"):
            raise InvalidTarget("target: a parenthesis is not closed")
        self._depth -= 1
        return match

    def _word(self) -> Matcher:
        if self._at >= len(self._words):
            raise InvalidTarget(f"target: something is missing at its end; {_HOW_TO}")
        word = self._words[self._at]
        if word.lower() in _OPERATORS or word == ")":
            raise InvalidTarget(f"target: {_shown(word)} is where a word is expected; {_HOW_TO}")
        self._at += 1
        self._count += 1
        if self._count > MOST_WORDS:
            raise InvalidTarget(f"target: more than {MOST_WORDS} words; use a list (L@a,b)")
        self._needs_facts |= word[:2] in ("G@", "I@")
        return _matcher(word)


def _any(parts: list[Matcher]) -> Matcher:
    def either(left: Matcher, right: Matcher) -> Matcher:
        return lambda agent, facts: left(agent, facts) or right(agent, facts)

    return functools.reduce(either, parts)


def _every(parts: list[Matcher]) -> Matcher:
    def both(left: Matcher, right: Matcher) -> Matcher:
        return lambda agent, facts: left(agent, facts) and right(agent, facts)

    return functools.reduce(both, parts)


def _matcher(word: str) -> Matcher:
    """What one word means."""
    kind, found, rest = word.partition("@")
    if not found:
        return _glob(word)
    if kind in ("G", "I"):
        return _fact(rest)
    if kind == "E":
        return _regex(rest)
    if kind == "L":
        members = frozenset(_listed(rest))
        return lambda agent, facts: agent in members
    raise InvalidTarget(f"target: {_shown(word)} begins with an unknown {kind[:20]!r}@; {_HOW_TO}")


def _glob(word: str) -> Matcher:
    if word == "*":
        return lambda agent, facts: True
    if not _GLOB_WORD.fullmatch(word):
        raise InvalidTarget(f"target: {_shown(word)} is no glob over agent ids; {_HOW_TO}")
    if not _WILD.search(word):
        return lambda agent, facts: agent == word
    match = _glob_pattern(word).match
    return lambda agent, facts: match(agent) is not None


def _glob_pattern(word: str, flags: int = 0) -> re.Pattern[str]:
    """A glob as a pattern; adjacent stars are merged, and none is ever backtracked into."""
    if len(word) > LONGEST_PATTERN:
        raise InvalidTarget(f"target: a glob has at most {LONGEST_PATTERN} characters")
    try:
        return re.compile(fnmatch.translate(re.sub(r"\*+", "*", word)), flags)
    except re.error as error:
        raise InvalidTarget(f"target: glob {_shown(word)} cannot be used: {error}") from None


def _listed(rest: str) -> list[str]:
    names = [name for name in rest.split(",") if name]
    bad = next((name for name in names if not _ID.fullmatch(name)), "" if names else rest)
    if not names or bad:
        raise InvalidTarget(f"target: L@ takes agent ids separated by commas, not {_shown(bad)}")
    return list(dict.fromkeys(names))


def _named(word: str) -> tuple[str, ...] | None:
    if word.startswith("L@"):
        return tuple(_listed(word[2:]))
    return (word,) if _ID.fullmatch(word) else None


# ---------------------------------------------------------------- facts


def _fact(rest: str) -> Matcher:
    parsed = _FACT.fullmatch(rest)
    if not parsed:
        raise InvalidTarget(
            f"target: G@{_shown(rest)} is not a fact and a value: write G@os:linux or "
            "G@mem>=4096, with one of : = != > >= < <="
        )
    key, sign, wanted = parsed.groups()
    test = _test(sign, wanted)
    parts = key.split(".")
    if len(parts) == 1:
        return lambda agent, facts: test(facts.get(key))
    return lambda agent, facts: test(lookup(facts, key, parts))


def lookup(facts: Facts, key: str, parts: list[str] | None = None) -> Any:
    """A fact by its dotted name, or None; a key that contains dots itself wins."""
    if key in facts:
        return facts[key]
    value: Any = facts
    for part in parts if parts is not None else key.split("."):
        if value.__class__ is not dict and not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _test(sign: str, wanted: str) -> Callable[[Any], bool]:
    """The comparison of a fact's value with the wanted one."""
    if sign in ("=", "==", ":"):
        glob = sign == ":" and _WILD.search(wanted)
        return _for_any(_like(wanted) if glob else _equal(wanted))
    if sign == "!=":
        equal = _for_any(_equal(wanted))
        return lambda value: value is not None and not equal(value)
    return _for_any(_ordered(sign, wanted))


def _for_any(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The test over a value, or the members of a list.

    Answers for texts are cached: a fleet has few different values.
    """
    known: dict[str, bool] = {}

    def ask(text: str) -> bool:
        if len(known) >= MOST_REMEMBERED:
            known.clear()
        found = known[text] = test(text)
        return found

    def for_any(value: Any) -> bool:
        kind = value.__class__
        if kind is str:
            found = known.get(value)
            return ask(value) if found is None else found
        if kind is list or kind is tuple:
            for member in value:  # noqa: SIM110 - a generator costs three times as much
                if member.__class__ is not list and for_any(member):
                    return True
            return False
        return value is not None and kind is not dict and test(value)

    return for_any


def _equal(wanted: str) -> Callable[[Any], bool]:
    text, number = wanted.lower(), _number(wanted)

    def equal(value: Any) -> bool:
        if value.__class__ is str:
            if value == wanted or value.lower() == text:
                return True
            return number is not None and _number(value) == number
        if value is True or value is False or value is None:
            return _text(value) == text
        return number is not None and value == number

    return equal


def _like(wanted: str) -> Callable[[Any], bool]:
    match = _glob_pattern(wanted, re.IGNORECASE).match
    return lambda value: match(_text(value)) is not None


def _ordered(sign: str, wanted: str) -> Callable[[Any], bool]:
    compare = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}[sign]
    text, number = wanted.lower(), _number(wanted)

    def ordered(value: Any) -> bool:
        if number is not None:
            kind = value.__class__
            found = value if kind is int or kind is float else _number(_text(value))
            if found is not None:
                return bool(compare(found, number))
        return bool(compare(_text(value).lower(), text))

    return ordered


def _number(text: str) -> int | float | None:
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return int(text)
    except ValueError:
        return float(text)


def _text(value: Any) -> str:
    if value is True or value is False:
        return "true" if value else "false"
    return value if isinstance(value, str) else "null" if value is None else str(value)


# ---------------------------------------------------------------- regular expressions


def _regex(source: str) -> Matcher:
    if not source:
        raise InvalidTarget("target: E@ takes a regular expression, such as E@web[0-9]+")
    if len(source) > LONGEST_PATTERN:
        raise InvalidTarget(f"target: a regex has at most {LONGEST_PATTERN} characters")
    try:
        # `[[` only warns of a possible future meaning: match by today's.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            pattern = re.compile(source)
            steps = _steps(_PARSER.parse(source))
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidTarget(f"target: E@{_shown(source)} cannot be used: {error}") from None
    if steps > MOST_STEPS:
        raise InvalidTarget(
            f"target: E@{_shown(source)} may take too long: use fewer repeats (* + ? {{}}), and "
            "none inside another"
        )
    match = pattern.match
    return lambda agent, facts: match(agent) is not None


def _steps(tree: Any) -> float:
    """How many ways the engine may try on the longest id; infinite if there is no bound.

    Unlimited repeats share the characters of one id, so k of them have at most as many ways as
    there are to cut it into k + 1 parts.
    """
    ways, unlimited = _ways(tree)
    return ways * math.comb(LONGEST_ID + unlimited, unlimited)


def _ways(tree: Any) -> tuple[float, int]:
    ways, unlimited = 1.0, 0
    for node, value in tree:
        more, also = _ways_of(str(node), value)
        ways *= more
        unlimited += also
    return ways, unlimited


def _ways_of(node: str, value: Any) -> tuple[float, int]:
    if node in ("LITERAL", "NOT_LITERAL", "IN", "ANY", "AT", "RANGE", "CATEGORY"):
        return 1.0, 0
    if node == "SUBPATTERN":
        return _ways(value[3])
    if node == "ATOMIC_GROUP":
        return _ways(value)
    if node == "BRANCH":
        found = [_ways(branch) for branch in value[1]]
        return sum(ways for ways, _ in found), max(unlimited for _, unlimited in found)
    if node in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        return _ways_of_repeat(*value)
    return math.inf, 0  # back references, look-around, conditions


def _ways_of_repeat(least: int, most: int, body: Any) -> tuple[float, int]:
    ways, unlimited = _ways(body)
    if most <= 1:
        return ways + 1, unlimited
    if ways > 1 or unlimited:
        return (ways**most, 0) if most <= 10 and not unlimited else (math.inf, 0)
    if most >= LONGEST_ID:
        return 1.0, 1
    return float(most - least + 1), 0


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 60 else repr(text[:57]) + "…"
