"""One world and one browser for all page tests; a fresh tab for each.

The browser's driver keeps an event loop in the main thread, so it lives for this package only:
tests elsewhere run their own loops. Every test here is synchronous.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, expect, sync_playwright

from holdfast.server import Server
from tests.browser import CHROMIUM, FLAGS, LIMIT_MS
from tests.integration.pages.world import World

SHOTS = Path(__file__).parents[3] / "build" / "screenshots"
EXPECTED = "Failed to load resource: the server responded with a status of 4"
"""What Chromium logs for a page that is meant to be refused."""

Open = Callable[..., Page]


expect.set_options(timeout=LIMIT_MS)


@pytest.fixture(scope="package")
def nats() -> Iterator[Server]:
    """The server of that world."""
    with Server(fast=True) as server:
        yield server
        server.kill()


@pytest.fixture(scope="package")
def world(nats: Server) -> Iterator[World]:
    """Everything that a page shows."""
    world = World(nats.url, f"pages{secrets.token_hex(2)}")
    yield world
    world.close()


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One Chromium."""
    assert Path(CHROMIUM).exists(), "no Chromium: 'make system' installs it"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_tab(browser: Browser) -> Iterator[Open]:
    """Watched tabs: an error in the console, or a probe that ran, fails the test."""
    contexts, heard = [], []

    def hear(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(EXPECTED):
            heard.append(f"{message.type}: {message.text}")

    def refuse(dialog: Dialog) -> None:
        heard.append("a dialog of a script")
        dialog.dismiss()

    def open(dark: bool = False, phone: bool = False, **options: object) -> Page:
        context = browser.new_context(
            viewport={"width": 390, "height": 844} if phone else {"width": 1280, "height": 860},
            color_scheme="dark" if dark else "light",
            has_touch=phone,
            reduced_motion="reduce",
            **options,  # type: ignore[arg-type]
        )
        context.set_default_timeout(LIMIT_MS)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", hear)
        tab.on("pageerror", lambda error: heard.append(f"script: {error}"))
        tab.on("dialog", refuse)
        return tab

    yield open
    for context in contexts:
        scripts = all(t.evaluate("window.pwned === undefined") for t in context.pages)
        context.close()
        assert scripts, "a probe was executed"
    assert heard == []


@pytest.fixture
def tab(open_tab: Open) -> Page:
    """One tab of normal size."""
    return open_tab()


def shoot(tab: Page, name: str) -> None:
    """Save a screenshot for a person, if requested: painting takes a while."""
    if not os.environ.get("HOLDFAST_SCREENSHOTS"):
        return
    SHOTS.mkdir(parents=True, exist_ok=True)
    tab.screenshot(path=str(SHOTS / f"{name}.png"), full_page=True)
