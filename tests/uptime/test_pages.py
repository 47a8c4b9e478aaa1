"""The pages in a real Chromium: content, live update, actions, keyboard, phone, dark, no errors.

With HOLDFAST_SCREENSHOTS=1, screenshots are written to build/screenshots.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from playwright.async_api import Browser, Page, async_playwright, expect
from uptime.app import incidents, states
from uptime.config import load
from uptime.probes import Outcome
from uptime.record import DAY_SECONDS, Day, Incident, Rules, State, apply
from uptime.service import Service
from uptime.web import create_app

from holdfast.server import Server
from tests.browser import CHROMIUM, FLAGS, LIMIT_MS

ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "build" / "screenshots"

expect.set_options(timeout=LIMIT_MS)


def made_up_days(dice: random.Random) -> tuple[Day, ...]:
    """Eighty-nine days of a site that is mostly well, so that the picture is not empty."""
    today = int(time.time()) // DAY_SECONDS
    days = []
    for day in range(today - 89, today):
        failed = dice.choice([0] * 24 + [3, 40, 90]) if dice.random() < 0.6 else 0
        days.append(Day(day, 1440 - failed, 0, failed))
    return tuple(days)


class Browsing:
    """The pages on a port of their own, and the browsers that look at them."""

    def __init__(self, browser: Browser, url: str, service: Service) -> None:
        self.url = url
        self.service = service
        self.errors: list[str] = []
        self._browser = browser

    async def page(self, path: str = "/", **options: Any) -> Page:
        """A new page in a new context; what its console says against us is an error."""
        context = await self._browser.new_context(base_url=self.url, **options)
        context.set_default_timeout(LIMIT_MS)
        page = await context.new_page()
        page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))
        await page.goto(path)
        return page


@asynccontextmanager
async def browsing(**env: str) -> AsyncIterator[Browsing]:
    config = load({"UPTIME_ALLOW_PRIVATE": "127.0.0.1", "UPTIME_CACHE_SECONDS": "1", **env})
    server = uvicorn.Server(
        uvicorn.Config(create_app(config), port=0, log_level="warning", lifespan="on", ws="none")
    )
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server._serve())
    try:
        async with asyncio.timeout(60):
            while not server.started:
                assert not serving.done(), "the pages do not start"
                await asyncio.sleep(0.02)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            site = Browsing(browser, f"http://127.0.0.1:{port}", Service(config))
            try:
                yield site
            finally:
                await browser.close()
        assert site.errors == []
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def shot(page: Page, name: str) -> None:
    if not os.environ.get("HOLDFAST_SCREENSHOTS"):
        return
    SHOTS.mkdir(parents=True, exist_ok=True)
    await page.screenshot(path=SHOTS / f"uptime-{name}.png", full_page=True)


def check(id: str, name: str, **members: Any) -> dict[str, Any]:
    given = {"id": id, "name": name, "target": f"http://127.0.0.1:9/{id}", "interval": 60}
    return given | members


async def fill(service: Service) -> None:
    """Four checks with ninety days, a day of response times and some incidents."""
    now = int(time.time())
    plan = {"shop": "ok", "api": "failed", "search": "degraded", "mail": "ok"}
    names = {"shop": "Shop", "api": "API", "search": "Search", "mail": "Mail gateway"}
    for id, last in plan.items():
        await service.add(check(id, names[id]))
        dice = random.Random(id)
        state = State(days=made_up_days(dice))
        rules = Rules(id, names[id], 2, 1)
        for step in range(140, -1, -1):
            ms = int(80 + 40 * dice.random() + (250 if dice.random() < 0.05 else 0))
            verdict = last if step < 2 else "ok"
            outcome = Outcome(verdict, ms, f"it was {verdict}")  # type: ignore[arg-type]
            state = apply(state, now - step * 600, outcome, rules)
        for notice in state.outbox:
            await incidents.put(notice.incident.id, notice.incident)
        await states.put(id, state)
    old = Incident("mail.1-down", "mail", "Mail gateway", "down", now - 9000, now - 8400, "gone")
    await incidents.put(old.id, old)


DESK = {"width": 1200, "height": 900}
MODES: dict[str, dict[str, Any]] = {
    "light": {"viewport": DESK},
    "dark": {"viewport": DESK, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 800}, "has_touch": True},
}
WORDS = {
    "/": "API is down",
    "/s/shop": "Response time",
    "/checks": "Add a check",
    "/checks/new": "Target",
    "/checks/api": "Change API",
    "/checks/api/remove": "deleted for good",
    "/incidents": "Mail gateway",
    "/channels": "oncall@example.org",
}


async def test_every_page_shows_what_it_should(store: Server) -> None:
    """Light, dark and on a phone: the content is there, nothing is wider than the screen."""
    async with browsing(UPTIME_TITLE="Example status") as site:
        await fill(site.service)
        await site.service.set_channel(
            {"id": "oncall", "kind": "email", "target": "oncall@example.org"}
        )
        for mode, options in MODES.items():
            page = await site.page("/", **options)
            for path, words in WORDS.items():
                await page.goto(path)
                await expect(page.locator("main")).to_contain_text(words)
                width = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
                assert width <= 0, f"{path} is {width} px too wide"
                name = path.strip("/").replace("/", "-") or "status"
                await shot(page, f"{name}-{mode}")
            back = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert back == ("rgb(16, 20, 24)" if mode == "dark" else "rgb(246, 247, 249)")
        await page.goto("/")
        await expect(page.locator("section.card")).to_have_count(4)
        await expect(page.locator("#check-api .pill")).to_have_text("Down")
        await expect(page.locator("#check-search .pill")).to_have_text("Degraded")
        await expect(page.locator("#check-shop .days rect")).to_have_count(90)
        await page.goto("/s/shop")
        await expect(page.locator(".chart polyline")).to_have_count(1)


async def test_status_page_renews_itself(store: Server) -> None:
    """Who looks at the page sees a change without touching anything."""
    async with browsing() as site:
        await site.service.add(check("shop", "Shop"))
        page = await site.page("/")
        await expect(page.locator("#check-shop .pill")).to_have_text("No data")
        good = apply(State(), int(time.time()), Outcome("ok", 42), Rules("shop", "Shop", 1, 1))
        await states.put("shop", good)
        await expect(page.locator("#check-shop .pill")).to_have_text("Up")
        await expect(page.locator("h1")).to_have_text("Everything is up")
        await expect(page.locator("#check-shop .ms")).to_have_text("42 ms")


async def test_a_check_is_managed_with_the_keyboard_alone(store: Server) -> None:
    """Log in, add, pause, resume and remove, without a mouse; a mistake is told in words."""
    async with browsing(UPTIME_TOKEN="open sesame") as site:
        page = await site.page("/checks")
        await expect(page.locator("h1")).to_have_text("Log in")
        await page.keyboard.type("open sesame")
        await page.keyboard.press("Enter")
        await expect(page.locator("h1")).to_have_text("Checks")
        await _press(page, "Add a check")
        await expect(page.locator("h1")).to_have_text("Add a check")
        await page.keyboard.type("shop")
        await page.keyboard.press("Tab")
        await page.keyboard.type("My shop")
        await page.keyboard.press("Tab")
        await page.keyboard.press("Tab")
        await page.keyboard.type("http://169.254.169.254/")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("never checked")
        site.errors.clear()  # the console tells of the 422, too
        await shot(page, "refused")
        await page.locator("input[name=target]").focus()
        await page.keyboard.press("Control+A")
        await page.keyboard.type("http://127.0.0.1:9/")
        await page.keyboard.press("Enter")
        await expect(page.locator("tbody tr")).to_contain_text("My shop")
        await _press(page, "Pause My shop")
        await expect(page.locator(".pill")).to_have_text("Paused")
        await _press(page, "Resume My shop")
        await _press(page, "Remove My shop")
        await expect(page.locator("h1")).to_have_text("Remove My shop?")
        await _press(page, "Remove My shop")
        await expect(page.locator("main")).to_contain_text("Nothing is checked yet")
        await _press(page, "Log out")
        await expect(page.get_by_role("link", name="Log in")).to_be_visible()


async def _press(page: Page, name: str) -> None:
    """Go to a link or button by its name, as Tab would, and press Enter."""
    target = page.locator(f"main a, main button, nav button, [aria-label='{name}']")
    found = target.and_(page.get_by_role("link", name=name)).or_(
        target.and_(page.get_by_role("button", name=name))
    )
    await found.first.focus()
    assert await page.evaluate("document.activeElement.matches(':focus-visible')")
    await page.keyboard.press("Enter")


async def test_what_people_wrote_is_not_run(store: Server) -> None:
    """Names and reasons with script in them are words in the browser, too."""
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    async with browsing() as site:
        await site.service.add(check("shop", evil, contains=evil))
        bad = apply(
            State(), int(time.time()), Outcome("failed", 1, evil), Rules("shop", evil, 1, 1)
        )
        await states.put("shop", bad)
        for notice in bad.outbox:
            await incidents.put(notice.incident.id, notice.incident)
        page = await site.page("/")
        for path in ("/", "/s/shop", "/checks", "/checks/shop", "/incidents"):
            await page.goto(path)
            words = "Change" if path == "/checks/shop" else "Down"
            await expect(page.locator("main")).to_contain_text(words)
            assert await page.locator("main img, main script").count() == 0
