"""The pages of limits: who holds a place, who waits, and changing it from there."""

from __future__ import annotations

import asyncio

from holdfast import Holdfast, Limit
from holdfast.server import Server
from holdfast.status.limits import Limits
from tests.integration.support import until, working
from tests.integration.test_limits import line
from tests.integration.test_web_security import form_token, log_in
from tests.integration.web_support import TOKENS, site


async def test_page_shows_holders_and_waiters_and_changes_the_limit(
    app: Holdfast, nats: Server, namespace: str
) -> None:
    """An operator sees both, raises the limit after a confirmation, and goes back to the code's."""
    gate, began = asyncio.Event(), []

    @app.job(limits=[Limit(running=1, per="customer")])
    async def charge(customer: str, number: int) -> None:
        began.append(number)
        await gate.wait()

    async with (
        app,
        working(app),
        site(nats, namespace, with_pages=True) as there,
        there.browser() as browser,
    ):
        await log_in(browser, TOKENS["operator"][0])
        browser.headers["accept"] = "text/html"
        runs = [await charge.enqueue("acme & sons", n) for n in range(3)]
        await until(lambda: len(began) == 1)

        async def two_wait() -> bool:
            return await line(app) == 2

        await until(two_wait)
        listed = (await browser.get("/limits")).text
        assert "charge" in listed
        assert "1 at a time" in listed
        shown = (await browser.get("/limits/charge")).text
        assert "acme &amp; sons" in shown
        assert all(run.id in shown for run in runs)
        assert "2 in all, the longest waiting first" in shown
        asked = await browser.get("/do/limits/set?name=charge&value=2")
        assert "Change limit charge to 2 running?" in asked.text
        csrf = await form_token(browser, "/do/limits/set?name=charge&value=2")
        fields = {"csrf": csrf, "name": "charge", "value": "2"}
        assert (await browser.post("/do/limits/set", data=fields)).status_code == 303
        await until(lambda: len(began) == 2)
        assert "set by an operator" in (await browser.get("/limits")).text
        for value in ("100/s", "0", "many", "1/s burst x"):
            answer = await browser.post("/do/limits/set", data=fields | {"value": value})
            assert answer.status_code in (303, 400, 422), value
        await browser.post("/do/limits/set", data=fields | {"value": "code"})
        await browser.post("/do/limits/pause", data=fields)
        limits = Limits(there.client)
        info = (await limits.show("charge")).info
        assert (info.running, info.paused, info.set_by_operator) == (1, True, False)
        await browser.post("/do/limits/resume", data=fields)
        gate.set()
        await until(lambda: len(began) == 3)
        assert (await browser.get("/limits/none")).status_code == 404
        await limits.gates.close()


async def test_viewer_sees_and_cannot_change(app: Holdfast, nats: Server, namespace: str) -> None:
    """Reading needs no more than a viewer; without a limit the page says how to get one."""
    async with (
        app,
        site(nats, namespace, with_pages=True) as there,
        there.browser() as browser,
    ):
        await log_in(browser, TOKENS["viewer"][0])
        browser.headers["accept"] = "text/html"
        assert "No limits yet" in (await browser.get("/limits")).text
        csrf = await form_token(browser, "/limits")
        answer = await browser.post("/do/limits/pause", data={"csrf": csrf, "name": "charge"})
        assert answer.status_code == 403
