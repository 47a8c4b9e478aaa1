"""What a release is made of agrees with itself: version and changelog, locks and constraints."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from holdfast.version import __version__
from tests.docs.pages import ROOT

LOCKS = sorted((ROOT / "locks").glob("*.txt"))


def wrong(text: str, version: str) -> str:
    """What `make release-check` says about a changelog."""
    spec = importlib.util.spec_from_file_location("check", ROOT / "tools" / "release_check.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: str = module.changelog(text, version)
    return found


def test_changelog_is_that_of_the_version() -> None:
    """Its newest release is what version.py says."""
    assert not wrong((ROOT / "CHANGELOG.md").read_text(), __version__)


@pytest.mark.parametrize(
    ("titles", "words"),
    [
        ("## 1.2.0 – 2026-01-02\n## 1.1.0 – 2026-01-01", ""),
        ("## Unreleased\n## 1.2.0 – 2026-01-02", ""),
        ("## Unreleased\n## 1.1.0 – 2026-01-01", "newest version is '1.1.0"),
        ("## 1.2.0\n", "newest version is '1.2.0'"),
        ("## 1.2.0 – 2026-01-02\n## Unreleased", "must be the first"),
    ],
)
def test_changelog_of_another_version_is_refused(titles: str, words: str) -> None:
    """An open section may stand above the version, and nowhere else."""
    found = wrong(titles, "1.2.0")
    assert words in found
    assert bool(words) == bool(found)


def pins(path: Path) -> dict[str, str]:
    """Package and version, of each line that pins one for every platform."""
    found = re.findall(r"^([\w.-]+)(?:\[.*?\])?==([^ ;\\\n]+)(.*)", path.read_text(), re.MULTILINE)
    return {n.lower().replace("_", "-"): v for n, v, when in found if "win32" not in when}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_lock_has_the_versions_that_are_tested(lock: Path) -> None:
    """`make locks` after a change of constraints.txt; what they do not share is a tool's own."""
    tested, locked = pins(ROOT / "constraints.txt"), pins(lock)
    assert locked
    assert {n: v for n, v in locked.items() if tested.get(n, v) != v} == {}
    if lock.stem in ("runtime", "image"):
        assert not set(locked) - set(tested)
