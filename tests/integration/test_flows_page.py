"""Pages and API of flows: what a flow has done, what it waits for, and the event it needs."""

from __future__ import annotations

from typing import Any

from holdfast import Flow, Holdfast
from holdfast.server import Server
from tests.integration.support import until, working
from tests.integration.test_flows import is_parked
from tests.integration.test_web_security import form_token, log_in
from tests.integration.web_support import TOKENS, site


def approving(app: Holdfast) -> Any:
    """A flow with a fan-out that waits for an event."""

    @app.job
    async def pack(n: int) -> int:
        return n

    @app.flow
    async def approve(ctx: Flow) -> str:
        await ctx.step(len, "x", name="prepare")
        await ctx.gather(pack.request(n) for n in range(1_200))
        found = await ctx.event("approved", key="o 1&2")
        return f"{found.data['ok']} by {found.by}" if found else ""

    return approve


async def test_page_of_a_flow_shows_its_timeline_and_sends_its_event(
    app: Holdfast, nats: Server, namespace: str
) -> None:
    """A fan-out is one line; the event is sent from the page, and the flow knows by whom."""
    approve = approving(app)
    async with (
        app,
        working(app),
        site(nats, namespace, with_pages=True) as there,
        there.browser() as browser,
    ):
        await log_in(browser, TOKENS["operator"][0])
        browser.headers["accept"] = "text/html"
        run = await approve.options(key="o1").enqueue()

        async def waits() -> bool:
            answer = await there.viewer.get(f"/flows/{run.id.replace('/', '~')}")
            return answer.status_code == 200 and "key o 1" in answer.text

        await until(waits)
        assert run.id in (await browser.get("/flows")).text

        async def offers() -> bool:  # a wake that came too early may have called it just now
            return 'name="key" value="o 1&amp;2"' in (await browser.get(f"/flows/{run.id}")).text

        await until(offers)
        shown = (await browser.get(f"/flows/{run.id}")).text
        assert shown.count("× pack") == 1
        assert "1\u202f200 × pack" in shown
        assert "prepare" in shown
        query = f"/do/flows/signal?event=approved&key=o 1%262&run={run.id}&data="
        asked = await browser.get(query + '{"ok": true}')
        assert "Send event approved?" in asked.text
        fields = {"event": "approved", "key": "o 1&2", "run": run.id, "data": '{"ok": tru'}
        fields["csrf"] = await form_token(browser, query + "null")
        wrong = await browser.post("/do/flows/signal", data=fields)
        assert wrong.status_code in (303, 422)
        assert await is_parked(run)
        sent = await browser.post("/do/flows/signal", data=fields | {"data": '{"ok": true}'})
        assert sent.status_code == 303
        result = await run.result(timeout=20)
        assert result.startswith("True by ")
        assert result != "True by "
        assert f"by {result.partition(' by ')[2]}" in (await browser.get(f"/flows/{run.id}")).text
        assert (await browser.get("/flows/none")).status_code == 404


async def test_viewer_sees_a_flow_and_cannot_act(
    app: Holdfast, nats: Server, namespace: str
) -> None:
    """No form on the page, and refusals behind it."""
    approve = approving(app)
    async with (
        app,
        working(app),
        site(nats, namespace, with_pages=True) as there,
        there.browser() as browser,
    ):
        await log_in(browser, TOKENS["viewer"][0])
        browser.headers["accept"] = "text/html"
        run = await approve.enqueue()
        await until(lambda: is_parked(run))
        assert "Send the event" not in (await browser.get(f"/flows/{run.id}")).text
        query = f"/do/flows/signal?event=approved&key=k&run={run.id}&data=null"
        assert (await browser.get(query)).status_code == 403
        wanted = {"event": "approved", "key": "k", "data": None}
        assert (await there.viewer.post("/flows/signal", json=wanted)).status_code == 403
