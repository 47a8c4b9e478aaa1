"""The generated page of the configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from holdfast.config import ROLES, markdown, options, variable

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_configuration_page_is_current() -> None:
    """The page is what the code says; write it anew with `python -m holdfast.config`."""
    assert PAGE.read_text(encoding="utf-8") == markdown()


def test_configuration_page_has_every_field() -> None:
    """Each field is there with its environment variable."""
    page = PAGE.read_text(encoding="utf-8")
    for table, role in ROLES.items():
        assert f"## `[{table}]`" in page
        for spec in options(role):
            assert f"| `{spec.name}` | `{variable(role, spec.name)}` |" in page


def test_configuration_module_prints_the_page() -> None:
    """The command that the page names writes the page."""
    command = [sys.executable, "-m", "holdfast.config"]
    done = subprocess.run(
        command, check=True, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "utf-8"}
    )
    assert done.stdout.decode().splitlines() == markdown().splitlines()
