"""What a person takes away or adds by hand: schedules, agents, fan-out runs; and what is hinted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from holdfast.client.run import make_request
from holdfast.client.schedules import Schedules
from holdfast.config import WebConfig
from holdfast.errors import NotFound
from holdfast.model.job import JobSpec
from holdfast.model.schedule import Schedule, define
from holdfast.status.fleet import Agents, FleetStatus
from holdfast.status.jobs import Jobs
from holdfast.status.totals import counted
from holdfast.web import create_app
from tests.integration.pages.checks import check_contrast, check_fits, check_page, told, wait_live
from tests.integration.pages.conftest import Open, shoot
from tests.integration.pages.world import WebServer, World
from tests.support import until


def schedules(world: World) -> dict[str, Schedule]:
    async def read() -> dict[str, Schedule]:
        return {one.name: one for one in await Schedules(await world.client()).list()}

    return world.call(read())


@pytest.fixture
def no_more(world: World) -> Iterator[list[str]]:
    """Names of schedules that are removed after the test."""
    names: list[str] = []
    yield names

    async def remove() -> None:
        for name in names:
            await Schedules(await world.client()).remove(name)

    world.call(remove())


def look_everywhere(tab: Page, name: str) -> None:
    """A page in light and dark and on a phone; a picture of each is kept."""
    check_page(tab)
    check_fits(tab)
    shoot(tab, name)
    tab.emulate_media(color_scheme="dark", reduced_motion="reduce")
    check_contrast(tab)
    shoot(tab, f"{name}-dark")
    tab.emulate_media(color_scheme="light", reduced_motion="reduce")
    tab.set_viewport_size({"width": 390, "height": 844})
    check_fits(tab)
    shoot(tab, f"{name}-phone")
    tab.set_viewport_size({"width": 1280, "height": 860})


# ---- taking away


def test_schedule_is_removed_after_a_question(world: World, tab: Page) -> None:
    """ "Cancel" changes nothing; then it is gone from the list, and its page says so."""

    async def add() -> None:
        await Schedules(await world.client()).add(define("short-lived", "tidy", every="1h"))

    world.call(add())
    tab.goto(f"{world.site.url}/schedules/short-lived")
    wait_live(tab)
    tab.get_by_role("button", name="Remove").click()
    dialog = tab.get_by_role("dialog")
    expect(dialog).to_contain_text("It stops firing")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_have_count(0)
    assert "short-lived" in schedules(world)
    tab.get_by_role("button", name="Remove").click()
    dialog.get_by_role("button", name="Remove it").click()
    told(tab, "short-lived is removed")
    expect(tab.locator("#schedules")).not_to_contain_text("short-lived")
    assert "short-lived" not in schedules(world)
    answer = tab.goto(f"{world.site.url}/schedules/short-lived")
    assert answer
    assert answer.status == 404


def test_agent_that_left_is_forgotten(world: World, tab: Page) -> None:
    """An agent that is online cannot be forgotten; one that left can, and no target means it."""
    tab.goto(f"{world.site.url}/fleet/agents/web1")
    wait_live(tab)
    assert tab.get_by_role("button", name="Forget").count() == 0
    world.call(world.agent_that_left("old1"))
    tab.goto(f"{world.site.url}/fleet?target=old*")
    tab.locator("#agents a[data-main]", has_text="old1").click()
    tab.wait_for_url(f"{world.site.url}/fleet/agents/old1")
    wait_live(tab)
    expect(tab.locator(".head .state")).to_have_text("offline")
    tab.get_by_role("button", name="Forget").click()
    dialog = tab.get_by_role("dialog")
    expect(dialog).to_contain_text("Targets no longer match it")
    dialog.get_by_role("button", name="Forget it").click()
    told(tab, "old1 is forgotten")
    expect(tab.locator("#agents")).not_to_contain_text("old1")
    expect(tab.locator("#agents-glance")).not_to_contain_text("old1")

    async def read() -> None:
        await Agents(await world.client()).show("old1")

    with pytest.raises(NotFound):
        world.call(read())


def test_fan_out_run_is_cancelled(world: World, tab: Page) -> None:
    """Sent from the page and cancelled on its own: the agents stop, and the page says by whom."""
    tab.goto(f"{world.site.url}/fleet")
    wait_live(tab)
    tab.locator("form", has=tab.get_by_label("Function")).get_by_label("Target").fill("web*")
    tab.get_by_label("Function").fill("hold")
    tab.get_by_role("button", name="Send …").click()
    tab.get_by_role("button", name="Send the command").click()
    told(tab, "sent to 2 agents")
    expect(tab.locator(".head .state")).to_have_text("running")
    run = tab.url.rsplit("/", 1)[1]
    tab.get_by_role("button", name="Cancel").click()
    dialog = tab.get_by_role("dialog")
    expect(dialog).to_contain_text("2 agents of 2 have not answered yet")
    dialog.get_by_role("button", name="Cancel it").click()
    told(tab, "The run is cancelled: agents that are running it stop")
    expect(tab.locator(".head .state")).to_have_text("cancelled")
    expect(tab.locator(".summary")).to_contain_text("local")
    expect(tab.get_by_role("button", name="Cancel")).to_have_count(0)
    expect(tab.locator("tbody tr", has_text="cancelled")).to_have_count(2)

    async def status() -> str:
        return (await FleetStatus(await world.client()).show(run))[0].status

    assert world.call(status()) == "cancelled"


# ---- adding


def fill(tab: Page, **fields: str) -> None:
    labels = {"zone": "Time zone", "payload": "Payload (JSON)"}
    for name, value in fields.items():
        if name == "runs":
            tab.get_by_label("When it runs").select_option(label=value)
        else:
            label = labels.get(name, name.capitalize())
            tab.get_by_label(label, exact=name != "payload").fill(value)


def test_schedule_is_added_by_cron_in_a_time_zone(
    world: World, tab: Page, no_more: list[str]
) -> None:
    """The form keeps what was typed, says what is wrong beside each field, and shows the times."""
    tab.goto(f"{world.site.url}/schedules")
    wait_live(tab)
    tab.get_by_role("button", name="New schedule").click()
    expect(tab.get_by_role("heading", name="New schedule")).to_be_visible()
    look_everywhere(tab, "new-schedule")
    fill(tab, name="nightly", job="tidy", runs="by cron", rule="30 25 * * *", payload="{oops")
    fill(tab, zone="Europe/Pariss")
    tab.get_by_role("button", name="Preview run times").click()
    expect(tab.locator("#wrong-name")).to_contain_text("A schedule with this name exists")
    expect(tab.locator("#wrong-tz")).to_contain_text("Europe/Pariss")
    expect(tab.locator("#wrong-payload")).to_contain_text("The payload must be JSON")
    expect(tab.locator("#wrong-job, #wrong-group")).to_have_count(0)
    expect(tab.get_by_label("Payload (JSON)")).to_have_value("{oops")
    fill(tab, zone="Europe/Paris")
    tab.get_by_role("button", name="Preview run times").click()
    expect(tab.locator("#wrong-rule")).to_contain_text("30 25")
    expect(tab.get_by_label("Rule")).to_have_attribute("aria-describedby", "wrong-rule")
    look_everywhere(tab, "new-schedule-wrong")
    fill(tab, name="by-hand", rule="30 3 * * *", payload='{"what": "orders"}')
    tab.get_by_role("button", name="Preview run times").click()
    expect(tab.get_by_role("heading", name="Add by-hand?")).to_be_visible()
    times = tab.locator("main pre").inner_text().strip().splitlines()
    assert len(times) == 5
    assert all(" 03:30:00 CE" in line and line.endswith(" UTC)") for line in times), times
    look_everywhere(tab, "new-schedule-times")
    assert "by-hand" not in schedules(world)
    no_more.append("by-hand")
    tab.get_by_role("button", name="Add it").click()
    told(tab, "by-hand is added")
    added = schedules(world)["by-hand"]
    assert (added.cron, added.tz, added.job) == ("30 3 * * *", "Europe/Paris", "tidy")
    assert bytes(added.payload) == b'{"what": "orders"}'


def test_schedule_is_added_for_one_time_and_for_an_interval_without_scripts(
    world: World, open_tab: Open, no_more: list[str]
) -> None:
    """A time without an offset is meant in the time zone; one that has passed is refused."""
    tab = open_tab(java_script_enabled=False)
    tab.goto(f"{world.site.url}/do/schedules/add")
    fill(tab, name="once", job="tidi", runs="once", rule="2020-01-31 09:00", zone="Asia/Tokyo")
    tab.get_by_role("button", name="Preview run times").click()
    expect(tab.locator("#wrong-rule")).to_contain_text("This time has passed")
    fill(tab, rule="2060-01-31 09:00")
    tab.get_by_role("button", name="Preview run times").click()
    expect(tab.locator("main pre")).to_contain_text("2060-01-31 09:00:00 JST")
    expect(tab.locator("main pre")).to_contain_text("2060-01-31 00:00:00 UTC")
    expect(tab.locator("main")).to_contain_text("No worker has ever served job tidi")
    no_more.append("once")
    tab.get_by_role("button", name="Add it").click()
    expect(tab.locator(".flash")).to_contain_text("once is added")
    tab.goto(f"{world.site.url}/do/schedules/add")
    fill(tab, name="often", job="tidy", runs="at an interval", rule="soon")
    tab.get_by_role("button", name="Preview run times").click()
    expect(tab.locator("#wrong-rule")).to_be_visible()
    fill(tab, rule="90m")
    tab.get_by_role("button", name="Preview run times").click()
    expect(tab.locator("main")).to_contain_text("every 1h30m")
    no_more.append("often")
    tab.get_by_role("button", name="Add it").click()
    expect(tab.locator(".flash")).to_contain_text("often is added")
    found = schedules(world)
    assert found["often"].every == 5400
    assert found["once"].rule == "at 2060-01-31T00:00:00.000Z"


# ---- one job


def test_job_is_run_from_its_page(world: World, tab: Page) -> None:
    """The form starts from the job's parameters, says what is wrong, and shows the run it sent."""
    tab.goto(f"{world.site.url}/jobs")
    tab.get_by_role("link", name="tidy", exact=True).click()
    expect(tab.locator("main")).to_contain_text("effectively_once")
    tab.get_by_label("what (optional)").fill("shelves")
    check_page(tab)
    tab.get_by_role("button", name="Run it", exact=True).click()
    told(tab, "was sent")
    expect(tab.locator("pre[aria-label=Payload]")).to_have_text('"shelves"')


def test_job_is_run_with_a_payload_as_json(world: World, tab: Page) -> None:
    """Whoever prefers JSON writes it; what is wrong with it is told beside it."""
    tab.goto(f"{world.site.url}/jobs/default/tidy")
    tab.get_by_text("With a payload as JSON").click()
    payload = tab.get_by_label("Payload (JSON): what")
    expect(payload).to_have_value("")  # its parameter has a default
    payload.fill('{"what": ')
    send = tab.get_by_role("button", name="Run it with this payload")
    send.click()
    expect(tab.get_by_role("alert")).to_contain_text("the payload must be JSON")
    payload.fill("5")
    send.click()
    expect(tab.get_by_role("alert")).to_contain_text("what: expected string")
    expect(payload).to_have_value("5")
    check_page(tab)
    payload.fill('"boxes"')
    send.click()
    told(tab, "was sent")
    expect(tab.locator("pre[aria-label=Payload]")).to_have_text('"boxes"')


def test_history_of_a_job_outlives_the_web(world: World, open_tab: Open) -> None:
    """Another web process, just started, shows the same charts, from what the server counted."""

    async def all_counted() -> bool:
        found = await counted(await world.client(), 3600, "charge")
        return found.ends()["done"] >= 30

    world.call(until(all_counted, what="30 runs in the history"))
    web: Any = create_app(connection=world.connection(), config=WebConfig(), open_to_all=True)
    site = WebServer(world.thread, web)
    tab = open_tab()
    try:
        for range in ("1h", "24h", "7d", "30d"):
            tab.goto(f"{site.url}/jobs/default/charge?range={range}")
            ended = tab.locator(".tile", has_text="Runs ended").locator(".value")
            assert int(ended.inner_text()) >= 30
            done = tab.locator("svg[aria-label*='by outcome'] rect.fill-done")
            expect(done.first).to_be_attached()
            expect(tab.locator("svg[aria-label*='took'] polyline.p99").first).to_be_attached()
            tab.goto(f"{site.url}/?range={range}")
            expect(done.first).to_be_attached()
        tab.goto(f"{site.url}/jobs/default/nosuch")
        expect(tab.locator("main")).to_contain_text("no worker has served it")
    finally:
        tab.goto("about:blank")
        site.close()


# ---- hints


def test_run_that_nobody_serves_is_told(world: World, tab: Page) -> None:
    """Its own page, the jobs and the overview say that no worker has ever served its job."""

    async def send() -> str:
        request = make_request(JobSpec("chrage"), b'{"order": 1}', key="typo")
        return (await (await world.client()).enqueue(request)).run

    async def purge() -> None:
        await Jobs(await world.client()).purge("chrage")

    run = world.call(send())
    try:
        tab.goto(f"{world.site.url}/runs/{run}")
        expect(tab.locator(".head .lead")).to_contain_text("no worker has ever served job chrage")
        shoot(tab, "run-unserved")
        tab.goto(f"{world.site.url}/jobs?q=chrage")
        expect(tab.locator("tbody tr")).to_contain_text("never served")
        shoot(tab, "job-unserved")
        tab.goto(f"{world.site.url}/")
        expect(tab.locator(".verdict")).to_contain_text("no worker has ever served it")
    finally:
        world.call(purge())


def test_ended_run_is_edited_and_copied(world: World, tab: Page) -> None:
    """Its payload starts another run, on the page or elsewhere; a viewer is offered neither."""

    async def send() -> str:
        run = await world.app.jobs["tidy"].enqueue("the attic")
        await run.result(60)
        return run.id

    run = world.call(send())
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.goto(f"{world.site.url}/runs/{run}")
    wait_live(tab)
    tab.locator("#copy-run summary").click()
    expect(tab.get_by_label("Command line")).to_have_text("holdfast enqueue tidy '\"the attic\"'")
    expect(tab.get_by_label("curl")).to_contain_text(f"{world.site.url}/api/v1/runs")
    tab.locator("#copy-run button").first.click()
    expect(tab.locator("#copy-run button").first).to_have_text("Copied")
    assert tab.evaluate("navigator.clipboard.readText()").startswith("holdfast enqueue tidy")
    tab.locator("#edit-run summary").click()
    look_everywhere(tab, "run-edit")
    tab.locator("#edit-run textarea").fill("5")
    tab.get_by_role("button", name="Run with this payload").click()
    expect(tab.get_by_role("alert")).to_contain_text("what: expected string, not an integer")
    expect(tab.locator("#edit-run textarea")).to_have_value("5")
    tab.locator("#edit-run textarea").fill('"the cellar"')
    tab.get_by_role("button", name="Run with this payload").click()
    expect(tab.locator("main")).to_contain_text("Run it with this payload?")
    tab.get_by_role("button", name="Run it again").click()
    told(tab, "The edited payload was sent, as run")


def test_facts_lead_to_the_agents_that_have_them(world: World, tab: Page) -> None:
    """Each value says how many agents have it, and opens them; the filter finds values, too."""
    tab.goto(f"{world.site.url}/fleet/facts?q=rack")
    row = tab.locator("tr", has=tab.get_by_role("rowheader", name="rack"))
    link = row.get_by_role("link").first
    value = link.inner_text()
    link.click()
    expect(tab).to_have_url(re.compile("target=G%40rack"))
    expect(tab.locator("#agents tbody tr").first).to_be_visible()
    tab.goto(f"{world.site.url}/fleet/facts?q={value}")
    expect(tab.locator("#facts")).to_contain_text("rack")
    tab.goto(f"{world.site.url}/fleet/facts?q=nothing-like-it")
    expect(tab.locator("#facts")).to_contain_text("No fact matches")
