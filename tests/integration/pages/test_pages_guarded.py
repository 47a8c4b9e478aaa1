"""Who may see and do what, pages under another app, an empty namespace, and records that lie."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect

from holdfast.config import ConnectionConfig, WebConfig
from holdfast.model import node as nodes
from holdfast.model import schedule as schedules
from holdfast.model.liveness import Liveness
from holdfast.model.node import NodeRecord, Transition
from holdfast.model.schedule import Schedule
from holdfast.names import H_MSG_ID, kv_subject
from holdfast.web import create_app, mount
from holdfast.web.auth import make_token
from tests.integration.pages.checks import check_page, told, wait_live
from tests.integration.pages.conftest import Open, shoot
from tests.integration.pages.world import PROBE, WebServer, World

ACTIONS = re.compile("Pause|Resume|Purge|Cancel|Replay|Drop|Drain|Run now|Remove|Run it again|New")


@pytest.fixture
def site(world: World) -> Iterator[Any]:
    """Makes further sites in the same world."""
    made = []

    def make(app: Any, feed_of: Any = None) -> WebServer:
        made.append(WebServer(world.thread, app))
        return made[-1]

    yield make
    for one in made:
        one.close()


def log_in(tab: Page, url: str, token: str) -> None:
    tab.goto(url)
    tab.get_by_label("Token").fill(token)
    tab.get_by_role("button", name="Log in").click()


def test_viewer_sees_no_secrets_and_no_switches(world: World, site: Any, open_tab: Open) -> None:
    """After a login with a viewer's token: everything can be read, nothing done, secrets masked."""
    token, line = make_token("eve", "viewer")
    web = site(create_app(connection=world.connection(), config=WebConfig(tokens=line)))
    tab = open_tab()
    tab.goto(f"{web.url}/runs")
    check_page_of_login(tab)
    log_in(tab, f"{web.url}/runs", "hft_wrong")
    expect(tab.get_by_role("alert")).to_contain_text("Unknown token")
    log_in(tab, f"{web.url}/login", token)
    expect(tab.locator(".foot")).to_contain_text("eve")
    wait_live(tab)
    for path in ("/jobs", f"/runs/{world.runs['dead']}", "/schedules", "/dead/1", "/cluster"):
        tab.goto(web.url + path)
        expect(tab.locator("h1")).to_be_visible()
        assert tab.get_by_role("button", name=ACTIONS).count() == 0, path
        assert tab.locator("a[data-confirm], form[method=post]:not([action$=logout])").count() == 0
        assert "hunter2" not in tab.content(), path
    tab.goto(f"{web.url}/runs/{world.runs['dead']}")
    expect(tab.locator("main")).to_contain_text("X-Password")
    answer = tab.goto(f"{web.url}/do/jobs/pause?job=charge&group=default")
    assert answer
    assert answer.status == 403
    expect(tab.locator("main")).to_contain_text("has the role viewer")
    tab.get_by_role("button", name="Log out").click()
    expect(tab.get_by_label("Token")).to_be_visible()


def check_page_of_login(tab: Page) -> None:
    expect(tab.get_by_role("heading", name="Log in")).to_be_visible()
    shoot(tab, "login")


def test_operator_acts_and_is_named_in_the_log(world: World, site: Any, open_tab: Open) -> None:
    """What an operator does carries a name; what only an admin may do is not offered."""
    token, line = make_token("olga", "operator")
    web = site(create_app(connection=world.connection(), config=WebConfig(tokens=line)))

    async def send() -> str:
        return (await world.app.jobs["hold"].enqueue(3, key="olga")).id

    run = world.call(send())
    tab = open_tab()
    log_in(tab, f"{web.url}/login", token)
    tab.goto(f"{web.url}/runs/{run}")
    tab.get_by_role("button", name="Cancel").click()
    tab.get_by_role("dialog").get_by_role("button", name="Cancel the run").click()
    told(tab, "The run is cancelled")
    expect(tab.locator(".story")).to_contain_text("cancel by olga")
    tab.goto(f"{web.url}/dead/1")
    assert tab.get_by_role("button", name="Drop").count() == 0
    assert tab.get_by_role("button", name="Replay", exact=True).count() == 1


def test_pages_work_under_another_app(world: World, site: Any, open_tab: Open) -> None:
    """Mounted at a path: links, files, questions, live updates, all below it."""
    parent = FastAPI()
    web = create_app(connection=world.connection(), config=WebConfig(), open_to_all=True)
    mount(parent, "/ops", web)
    parent.state.feed = web.state.feed
    there = site(parent)
    tab = open_tab()
    tab.goto(f"{there.url}/ops/")
    wait_live(tab)
    check_page(tab)
    tab.locator("nav.nav a", has_text="Jobs").click()
    tab.wait_for_url(f"{there.url}/ops/jobs")
    wait_live(tab)
    row = tab.locator("tbody tr", has_text="ship")
    row.get_by_role("button", name="Pause").click()
    tab.get_by_role("dialog").get_by_role("button", name="Pause").click()
    told(tab, "ship is paused")
    row.get_by_role("button", name="Resume").click()
    tab.get_by_role("dialog").get_by_role("button", name="Resume").click()
    told(tab, "ship is resumed")
    tab.goto(f"{there.url}/ops/schedules")
    tab.locator(".strip a").first.click()
    tab.wait_for_url(re.compile(r"/ops/schedules/every-second\?at="))
    assert tab.locator("a[href^='/']:not([href^='/ops'])").count() == 0


def test_empty_pages_say_what_to_do_next(world: World, site: Any, open_tab: Open) -> None:
    """A namespace in which nothing ever happened: each page names a command that changes that."""
    connection = ConnectionConfig(nats_url=world.url, namespace=f"{world.namespace}e")
    web = site(create_app(connection=connection, config=WebConfig(), open_to_all=True))
    tab = open_tab()
    hints = {
        "/": "No problems",
        "/jobs": "holdfast dev APP",
        "/runs": "holdfast enqueue",
        "/schedules": "@app.cron",
        "/dead": "No dead letters",
        "/cluster": "web",
        "/fleet": "holdfast agent",
    }
    for path, hint in hints.items():
        tab.goto(web.url + path)
        expect(tab.locator("main")).to_contain_text(hint)
        wait_live(tab)
        check_page(tab)
        shoot(tab, f"empty-{path.strip('/') or 'overview'}")


def test_records_that_lie_are_shown_as_text(world: World, open_tab: Open) -> None:
    """Names and states that no Holdfast would write, put there by hand: no page believes them."""

    async def plant() -> None:
        client = await world.client()
        broker, names = client.broker, client.broker.names
        evil = NodeRecord(
            "evil", "worker", "other", "ERROR", PROBE, 1.0, PROBE, PROBE, 1, PROBE, 1.0,
            liveness=Liveness(), jobs=(PROBE,), metrics={PROBE: 1.0}, trouble=PROBE,
        )  # fmt: skip
        await broker.store(kv_subject(names.nodes, "evil"), nodes.encode(evil))
        await broker.store(kv_subject(names.nodes, "junk"), PROBE.encode())
        misnamed = msgspec.structs.replace(evil, id=PROBE, role=PROBE, group=PROBE)
        await broker.store(kv_subject(names.nodes, "misnamed"), nodes.encode(misnamed))
        await broker.store(kv_subject(names.schedules, "schedule.junk"), PROBE.encode())
        await broker.store(kv_subject(names.runs, "junk"), PROBE.encode())
        await broker.store(kv_subject(names.slots, "slot.evil.20261116T000000Z"), PROBE.encode())
        await broker.store(names.log("node", "junk"), PROBE.encode())
        step = Transition("evil", PROBE, PROBE, PROBE, "ERROR", PROBE, PROBE, broker.server_now())
        await broker.store(names.log("node", "evil"), nodes.encode(step))
        schedule = Schedule(
            "evil", "evil", "other", cron="0 0 1 1 *", app=PROBE, release=PROBE,
            catch_up=PROBE, overlap=PROBE, source=PROBE, headers={"X-Probe": PROBE},
            payload=msgspec.Raw(msgspec.json.encode({PROBE: PROBE})),
        )  # fmt: skip
        await broker.store(kv_subject(names.schedules, "schedule.evil"), schedules.encode(schedule))
        letter = {
            "Hf-Run": "evil/=e1", H_MSG_ID: "x1", "Hf-Reason": PROBE, "Hf-Error": PROBE,
            "Hf-Traceback": PROBE, "Hf-Subject": PROBE, "Hf-Object": "",
            PROBE.replace(":", ""): PROBE,
        }  # fmt: skip
        await broker.store(names.dead_letter("default", "evil"), PROBE.encode(), letter)
        bad = {H_MSG_ID: PROBE, "X-Probe": PROBE}
        await broker.store(names.job("other", "evil"), PROBE.encode(), bad)

    async def clear() -> None:
        client = await world.client()
        names = client.broker.names
        planted = [(names.nodes, key) for key in ("evil", "junk", "misnamed")]
        planted += [(names.schedules, f"schedule.{key}") for key in ("evil", "junk")]
        planted += [(names.runs, "junk"), (names.slots, "slot.evil.20261116T000000Z")]
        for bucket, key in planted:
            request = {"filter": kv_subject(bucket, key)}
            await client.broker.api(f"STREAM.PURGE.KV_{bucket}", request)
        await client.topology.purge(names.jobs, names.job("other", "evil"))

    world.call(plant())
    try:
        tab = open_tab()
        visited = ["/", "/jobs", "/runs?group=other", "/schedules", "/schedules/evil", "/dead"]
        visited += ["/dead?job=evil", "/cluster", "/cluster/evil", f"/runs?prefix={PROBE}"]
        visited += [f"/jobs?q={PROBE}", f"/schedules/evil?at={PROBE}", f"/cluster?q={PROBE}"]
        visited += [f"/dead?error={PROBE}", f"/fleet?target={PROBE}", f"/runs?node={PROBE}"]
        for path in visited:
            answer = tab.goto(world.site.url + path)
            assert answer
            assert answer.status == 200, path
            assert tab.locator("main img, main script, main style").count() == 0, path
        tab.goto(f"{world.site.url}/runs?job=evil")
        tab.locator("#runs tbody a[data-main]").first.click()
        expect(tab.locator("main")).to_contain_text("onerror")
        tab.goto(f"{world.site.url}/dead?job=evil")
        tab.locator("a[data-main]").first.click()
        expect(tab.locator("h1")).to_contain_text("Dead letter")
        check_page(tab)
        tab.goto(f"{world.site.url}/cluster/evil")
        check_page(tab)
    finally:
        world.call(clear())


def test_command_is_sent_to_agents_after_a_question(world: World, tab: Page) -> None:
    """The question names the agents that are meant; the run's page shows what they returned."""
    tab.goto(f"{world.site.url}/fleet")
    wait_live(tab)
    tab.locator("form", has=tab.get_by_label("Function")).get_by_label("Target").fill("web1")
    tab.get_by_label("Function").fill("mark")
    tab.get_by_label("Arguments").fill("'two words'")
    tab.get_by_role("button", name="Send …").click()
    expect(tab.locator("main")).to_contain_text("runs on 1 agent")
    expect(tab.locator("main pre")).to_contain_text("web1")
    tab.get_by_role("button", name="Send the command").click()
    told(tab, "sent to 1 agent")
    expect(tab.locator(".head .state")).to_have_text("complete")
    expect(tab.locator("pre.inline")).to_contain_text("two words")
    tab.goto(f"{world.site.url}/fleet")
    tab.get_by_role("searchbox", name="Target").fill("web2")
    expect(tab.locator("#agents tbody tr")).to_have_count(1)
    tab.get_by_role("searchbox", name="Target").fill("(web2")
    expect(tab.locator("#agents")).to_contain_text("Invalid target")
