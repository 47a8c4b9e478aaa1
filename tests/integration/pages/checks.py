"""Checks that hold for every page, evaluated in the browser."""

from __future__ import annotations

import time
from importlib import resources
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

from tests.support import LEAST_SECONDS

SCRIPT = (Path(__file__).parent / "checks.js").read_text(encoding="utf-8")
AXE = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
VIOLATIONS = """axe.run({resultTypes: ["violations"]}).then(found =>
    found.violations.map(v => `${v.id}: ${v.nodes.map(node => node.target).join(", ")}`))"""


def wrong(tab: Page, what: str) -> list[str]:
    """The findings of one check; checks run beside the page's scripts, bypassing its policy."""
    tab.evaluate(SCRIPT)
    found: list[str] = tab.evaluate(f"window.checks.{what}()")
    return found


def check_page(tab: Page) -> None:
    """Landmarks, names, contrast, nothing inline, nothing from other origins."""
    assert tab.locator("main").count() == 1
    assert tab.locator("h1").count() == 1
    assert tab.locator("nav[aria-label]").count() >= 1
    assert tab.locator("html").get_attribute("lang") == "en"
    assert wrong(tab, "nameless") == []
    assert wrong(tab, "inline") == []
    assert wrong(tab, "foreign") == []
    check_contrast(tab)


def check_axe(tab: Page) -> None:
    """No rule of axe-core is violated."""
    tab.evaluate(AXE)
    found: list[str] = tab.evaluate(VIOLATIONS)
    assert found == [], found


def check_contrast(tab: Page) -> None:
    """Every visible text has the contrast of WCAG AA."""
    assert wrong(tab, "faint") == []


def check_fits(tab: Page) -> None:
    """The page does not scroll sideways."""
    wide = tab.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert wide == 0, f"{wide} px too wide"


def wait_live(tab: Page) -> None:
    """Wait until the page is connected to the feed."""
    tab.wait_for_selector('[data-light][data-state="live"]')


def load_until(tab: Page, url: str, wanted: Locator) -> None:
    """Load a page that has no scripts until it shows something: it is a picture of one moment."""
    deadline = time.monotonic() + LEAST_SECONDS
    while True:
        tab.goto(url)
        if wanted.count():
            return
        assert time.monotonic() < deadline, f"never shown: {wanted}\n{tab.inner_text('body')}"


def told(tab: Page, text: str) -> None:
    """The next page says what was done, and its scripts have started."""
    expect(tab.locator(".flash")).to_contain_text(text)
    tab.wait_for_load_state("load")
