"""docs/uptime.md has every variable, every member of a check and every request of the API."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from fastapi.routing import APIRoute
from uptime.check import Check
from uptime.config import Config
from uptime.web import api

PAGE = (Path(__file__).parents[2] / "docs" / "uptime.md").read_text(encoding="utf-8")


def test_page_has_every_variable() -> None:
    """And no other."""
    wanted = {f"UPTIME_{field.name.upper()}" for field in fields(Config)}
    assert set(re.findall(r"^\| `(UPTIME_\w+)`", PAGE, re.MULTILINE)) == wanted


def test_page_has_every_member_of_a_check() -> None:
    """Each in its table."""
    rows = re.findall(r"^\| (`[a-z_`, ]+) \|", PAGE, re.MULTILINE)
    assert set(re.findall(r"`([a-z_]+)`", "".join(rows))) == set(Check.model_fields)


def test_page_has_every_request() -> None:
    """Method and path, as the API knows them."""
    routes = [route for route in api.router.routes if isinstance(route, APIRoute)]
    wanted = {f"{method} {route.path}" for route in routes for method in route.methods}
    told = set(re.findall(r"`((?:GET|POST|PUT|DELETE) /[^`]+)`", PAGE))
    assert told == wanted
