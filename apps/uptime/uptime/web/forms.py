"""Converts between form fields and a check's members."""

from __future__ import annotations

from typing import Any

from uptime.check import MASK, Check
from uptime.service import Refusal

_TEXTS = ("name", "kind", "target", "method", "status", "contains", "lacks", "server_name")
_NUMBERS = ("interval", "failures", "recoveries", "slow_ms", "redirects", "warn_days")


def check_from(form: dict[str, str]) -> dict[str, Any]:
    """A check's members, as the API would receive them."""
    found: dict[str, Any] = {name: form[name] for name in ("id", *_TEXTS) if name in form}
    for name in _NUMBERS:
        if name in form:
            found[name] = _number(name, form[name])
    if "timeout" in form:
        found["timeout"] = form["timeout"]  # pydantic reads a text as a number
    for name in ("headers", "expect_headers"):
        found[name] = _pairs(name, form.get(name, ""))
    found["public"] = form.get("public") == "on"
    return found


def fields_of(check: Check | None) -> dict[str, str]:
    """Form fields of a check, or of a new one."""
    base = check or Check(id="new", name="new", target="https://example.org")
    found = {name: str(getattr(base, name)) for name in (*_TEXTS, *_NUMBERS)}
    found["timeout"] = f"{base.timeout:g}"
    found["headers"] = "\n".join(f"{name}: {MASK}" for name in base.headers)
    found["expect_headers"] = "\n".join(f"{n}: {v}" for n, v in base.expect_headers.items())
    found["public"] = "on" if base.public else ""
    return found if check else found | {"name": "", "target": ""}


def _number(name: str, text: str) -> int:
    if not (text.strip().isascii() and text.strip().isdigit() and len(text) < 10):
        raise Refusal(f"{name}: must be a whole number")
    return int(text)


def _pairs(name: str, text: str) -> dict[str, str]:
    """Parse `Name: value` lines."""
    found = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        key, colon, value = line.partition(":")
        if not colon:
            raise Refusal(f"{name}: write one on each line, as Accept: text/html")
        found[key.strip()] = value.strip()
    return found
