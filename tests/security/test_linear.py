"""No text freezes a process: what reads foreign text takes time in proportion to its length.

Three registries, each found by a walk, so that what is added later is covered too:

* every pattern that a module of Holdfast or of the monitor has as a global,
* every function of the modules that read foreign text whose first parameter is a text or bytes,
* what is not found that way, by name (`NAMED`).

A function is called with many texts, short and eight times as long, and its processor time is
compared: eight times as much is linear, sixty-four times is a square. Wall clocks play no part.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uptime

import holdfast
from holdfast.errors import HoldfastError
from holdfast.model import fleet, node, run, schedule, slot, target
from holdfast.payload.signature import Signature
from holdfast.redaction import Redactor
from holdfast.web import masking

SHORT, TIMES = 1_000, 8
ALLOWED = 3.0 * TIMES
"""Linear is 8, a square 64: what is between is noise of a busy machine."""
NOTICED = 0.01
"""Seconds of processor time below which nobody cares, and no ratio means anything."""
TRIES = 4

UNITS = (
    *("a", "a-", "a.", "-", "_", "1", "1.", " ", "\t", "\n", "\r\n", "=", ":", "::", ",", "'", '"'),
    *(
        "\\",
        '\\"',
        "(",
        ")",
        "((",
        "[",
        "[]",
        "{",
        "{{",
        "{%",
        "{% raw ",
        "*",
        "?",
        "%",
        "%4",
        "//",
    ),
    *("://a:b/", "://", "@", "a@", "password", "password=", "password: ", "--password ", "token='"),
    *('{"password":{', "eyJ-", "bearer ", "basic ", "-----BEGIN A-", "BEGIN ", "\\u0070", "x=y&"),
    *(
        "and ",
        "not ",
        "a or ",
        "G@a:",
        "E@a+",
        "L@a,",
        "1h",
        "1-",
        "*/1 ",
        "Nats-A: b\r\n",
        "é",
        "𝒳",
    ),
    *("__HOLDFAST_SECRET(", "password: |\n a\n", "listen tcp ", "\x1b[", "\u202e", "2026-11-18T"),
)
PACKAGES = (holdfast, uptime)
SKIPPED = (
    "holdfast.testing",
    "holdfast.deploy",
    "holdfast.integrations.django",  # needs a project; it reads nothing that others wrote
    "__main__",
    "holdfast.settings.child",
)
"""Developers' tools: what they read is their user's own."""
READERS = (
    *("holdfast.web.masking", "holdfast.web.network", "holdfast.web.auth"),
    *("holdfast.web.wire", "holdfast.web.security", "holdfast.web.pages.rendering"),
    *("holdfast.redaction", "holdfast.visible", "holdfast.durations", "holdfast.names"),
    *(
        "holdfast.model.cron",
        "holdfast.model.schedule",
        "holdfast.model.slot",
        "holdfast.model.run",
    ),
    *("holdfast.model.target", "holdfast.model.codec", "holdfast.payload.values"),
    *("holdfast.settings.document", "holdfast.settings.top", "holdfast.settings.editing"),
    *("holdfast.broker.wire", "holdfast.broker.wire", "holdfast.broker.connecting"),
    *("holdfast.status.messages", "holdfast.status.dead", "holdfast.status.finding"),
    *(
        "holdfast.worker.attempt",
        "holdfast.cli.out",
        "holdfast.cli.typed",
        "holdfast.cli.fleet_view",
    ),
    *("uptime.check", "uptime.guard", "uptime.config", "uptime.service", "uptime.web.security"),
    *("uptime.web.forms", "uptime.web.pages", "uptime.web.charts"),
)
"""Modules whose functions read what others wrote."""
BOUNDED = {"holdfast.durations._PART"}
"""Patterns that take the square of a text whose length is limited before."""
OWN = {"holdfast.settings.document.mask"}
"""Functions over what the operator's own folder holds: unclosed templates take the square there."""
ACTS = {"say", "note", "block", "complain", "confirm", "edited"}
"""Functions that print, ask, or open an editor."""


def modules() -> Iterator[types.ModuleType]:
    """Every module, but for those that need what is not installed."""
    for package in PACKAGES:
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.startswith(SKIPPED) or found.name.endswith(SKIPPED):
                continue
            yield importlib.import_module(found.name)


def patterns() -> dict[str, Callable[[str], object]]:
    """Every global pattern, searched for wherever it may be."""
    found: dict[str, Callable[[str], object]] = {}
    for module in modules():
        for name, value in vars(module).items():
            if isinstance(value, re.Pattern) and f"{module.__name__}.{name}" not in BOUNDED:
                found[f"{module.__name__}.{name}"] = _using(module, name, value)
    return found


def _using(
    module: types.ModuleType, name: str, pattern: re.Pattern[Any]
) -> Callable[[str], object]:
    """Use a pattern as its module does: at one place, or searched for everywhere."""
    used = rf"\b{name}\.(?:search|sub|subn|split|findall|finditer)\b"
    searched = re.search(used, inspect.getsource(module)) is not None

    def call(text: str) -> None:
        given: Any = text.encode() if isinstance(pattern.pattern, bytes) else text
        pattern.fullmatch(given)
        pattern.match(given)
        if searched:
            pattern.sub(given[:0], given)

    return call


FILLED = {"str": "x", "bytes": b"x", "int": 1, "float": 1.0, "bool": False, "str | None": None}


def readers() -> dict[str, Callable[[str], object]]:
    """Every function of the readers that takes a text first, and little else."""
    found: dict[str, Callable[[str], object]] = {}
    for name in READERS:
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == name and key not in ACTS:
                call = _calling(value)
                if call is not None and f"{name}.{key}" not in OWN:
                    found[f"{name}.{key}"] = call
    return found


def _calling(function: Callable[..., Any]) -> Callable[[str], object] | None:
    if inspect.iscoroutinefunction(function):
        return None
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or str(parameters[0].annotation) not in (
        "str",
        "bytes",
        "object",
        "str | None",
    ):
        return None
    needed = [p for p in parameters[1:] if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if any(str(p.annotation) not in FILLED for p in needed):
        return None
    as_bytes = str(parameters[0].annotation) == "bytes"
    rest = {p.name: FILLED[str(p.annotation)] for p in needed}
    return lambda text: function(text.encode() if as_bytes else text, **rest)


def _redactor() -> Redactor:
    made = Redactor()
    made.register("test", ["aaaa", "a-a-a-", "password", "s" * 200, "x\ny" * 20])
    return made


def _handler(password: str) -> None: ...


REDACTOR = _redactor()
SIGNATURE = Signature.of(_handler)
NAMED: dict[str, Callable[[str], object]] = {
    "masked": lambda text: masking.masked({"a": [text], text: text, "w": [text, text]}),
    "masked_body": masking.masked_body,
    "masked_bytes": lambda text: masking.masked_bytes(text.encode(), None),
    "masked_headers": lambda text: masking.masked_headers({text: text}),
    "masked_payload": lambda text: masking.masked_payload(text, ("password",)),
    "redactor.scrub": REDACTOR.scrub,
    "redactor.scrub_values": lambda text: REDACTOR.scrub_values({text: [text]}),
    "target.parse": target.parse,
    "target.fact": lambda text: target.parse("G@a:*a*a*b").matches("x", {"a": text}),
    "run.decode": lambda text: run.decode(text.encode()),
    "node.decode": lambda text: node.decode(text.encode()),
    "slot.decode": lambda text: slot.decode(text.encode()),
    "schedule.decode": lambda text: schedule.decode(text.encode()),
    "fleet.decode": lambda text: fleet.decode(text.encode()),
    "signature.decode": lambda text: SIGNATURE.decode(text.encode()),
}


REFUSING = ("uptime", "msgspec", "yaml", "jinja2", "re", "fastapi", "starlette")
"""Libraries whose errors are refusals too."""


def seconds(call: Callable[[str], object], text: str) -> float:
    """The processor time of one call; that it refuses the text is an answer too."""
    began = time.process_time()
    try:
        call(text)
    except (HoldfastError, ValueError, LookupError, ArithmeticError, TypeError, RecursionError):
        pass
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in REFUSING:
            raise
    return time.process_time() - began


def check(name: str, call: Callable[[str], object], unit: str) -> None:
    """Fail for a call that grows faster than its text."""
    short = unit * (SHORT // len(unit))
    worst = 0.0
    for _ in range(TRIES):
        long = seconds(call, short * TIMES)
        if long < NOTICED:
            return
        worst = long / max(seconds(call, short), NOTICED / TIMES / 4)
        if worst <= ALLOWED:
            return
    pytest.fail(f"{name} with {unit!r}: {TIMES} times the text takes {worst:.0f} times as long")


def test_every_pattern_is_linear() -> None:
    """At the start of a text made to fool it, and anywhere in it where it is searched for."""
    found = patterns()
    assert len(found) > 50
    for name, call in found.items():
        for unit in UNITS:
            check(name, call, unit)


def test_every_reader_is_linear() -> None:
    """Masking, parsing and rendering of texts that others wrote."""
    found = readers()
    assert len(found) > 60, sorted(found)
    for name, call in {**found, **NAMED}.items():
        for unit in UNITS:
            check(name, call, unit)


def test_mixed_texts_are_linear() -> None:
    """A unit after another, as a fuzzer puts them together."""
    for name, call in NAMED.items():
        for n, first in enumerate(UNITS):
            second = UNITS[(7 * n + 3) % len(UNITS)]
            check(name, call, f"{first}{second}")


def test_square_would_be_noticed() -> None:
    """The pattern that froze the web once does not pass."""
    old = re.compile(
        r"(\b[\w-]*(?:pass|token)[\w-]*[\"']?\s*[=:]\s*)(\"[^\"]*\"|\S+)", re.IGNORECASE
    )
    with pytest.raises(pytest.fail.Exception, match="times as long"):
        check("old", lambda text: old.sub("", text), "a-")
