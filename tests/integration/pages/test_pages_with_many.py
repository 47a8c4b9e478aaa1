"""Finding runs and acting on many: tabs, searches, bulk actions, the audit, one search for all."""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from holdfast.clock import rfc3339
from holdfast.durations import instant
from holdfast.names import H_MSG_ID
from holdfast.status.jobs import Jobs
from holdfast.status.listing import LOOK, RunFilter, RunPages
from holdfast.web import bulks
from holdfast.web.auth import User
from holdfast.web.pages import bulk
from holdfast.web.services import Access
from tests.integration.pages.checks import check_fits, check_page, told, wait_live
from tests.integration.pages.conftest import Open, shoot
from tests.integration.pages.world import World
from tests.support import until


def send(world: World, job: str, count: int, prefix: str, **headers: str) -> None:
    """Runs that nobody serves, so that they wait until they are cancelled."""

    async def work() -> None:
        for n in range(count):
            await world.app.jobs[job].enqueue(n, key=f"{prefix}-{n}", headers=headers)

    world.call(work())


async def latest(world: World, job: str) -> float:
    """When the newest run of a job was sent."""
    page = await RunPages(await world.client()).page(RunFilter(job=job, group="other"), 1)
    return page.runs[0].updated


def tidy_up(world: World) -> None:
    """What waits is gone, but for one run, as other tests expect it."""

    async def work() -> None:
        await Jobs(await world.client()).purge("unserved")

    world.call(work())
    send(world, "unserved", 1, secrets.token_hex(4))  # a key that the server does not know yet


def wait_bulk(world: World, tab: Page, state: str) -> None:
    """Wait until the action of the page is in a state, and show that; also without scripts."""
    id = tab.url.rsplit("/", 1)[1]

    async def over() -> bool:
        by = world.site.app.state.services.access(User("local", "admin", "local"))
        record = await world.site.app.state.bulks.find(by, id)
        return str(record.state(by.client.broker.server_now())) == state

    world.call(until(over, 30, f"an action that is {state}"))
    tab.reload()
    expect(tab.locator(".head .state")).to_have_text(state)


def test_runs_are_found_by_what_was_sent(world: World, tab: Page) -> None:
    """By a header or a member of the payload: of waiting, failed and ended runs."""
    send(world, "unserved", 3, "tenant", **{"X-Tenant": "acme"})
    try:
        tab.goto(f"{world.site.url}/runs?q=X-Tenant%3Dacme")
        expect(tab.locator("#runs tbody tr")).to_have_count(3)
        expect(tab.locator("#runs")).to_contain_text("no worker is running")
        tab.goto(f"{world.site.url}/runs?q=order%3D7")
        expect(tab.locator("#runs tbody tr")).to_have_count(1)
        expect(tab.locator("#runs tbody tr")).to_contain_text("ship")
        tab.goto(f"{world.site.url}/runs?q=%3D7&job=charge")
        expect(tab.locator("#runs")).to_contain_text("charge/order-7")
        tab.goto(f"{world.site.url}/runs?q=n%3D-2")
        expect(tab.locator("#runs tbody tr")).to_have_count(1)
        expect(tab.locator("#runs tbody tr")).to_contain_text("dead")
        tab.goto(f"{world.site.url}/runs?q=bank+does+not+answer")
        expect(tab.locator("#runs")).to_contain_text("flaky/f")
        tab.goto(f"{world.site.url}/runs?since=24h&until=2020-01-01T00:00:00Z")
        expect(tab.locator("#runs")).to_contain_text("No matching runs")
        tab.goto(f"{world.site.url}/runs?since=yesterday")
        expect(tab.locator("#runs")).to_contain_text("is not a time")
        tab.goto(f"{world.site.url}/runs?state=running")
        expect(tab.locator("#runs progress")).to_have_attribute("value", "0.4")
        check_page(tab)
    finally:
        tidy_up(world)


def test_all_matching_runs_are_cancelled_after_a_count(world: World, open_tab: Open) -> None:
    """The question counts, a page shows progress, the audit names every run; without scripts."""
    send(world, "unserved", 30, "bulk", **{"X-Customer": "7"})
    tab = open_tab(java_script_enabled=False)
    tab.goto(f"{world.site.url}/runs?q=X-Customer%3D7")
    tab.get_by_role("button", name="Cancel …").click()
    expect(tab.locator("h1")).to_have_text("Cancel 30 runs?")
    expect(tab.locator("main")).to_contain_text("30 queued")
    tab.get_by_role("button", name="Cancel them").click()

    wait_bulk(world, tab, "complete")
    expect(tab.locator(".lead")).to_contain_text("30 runs done, 0 refused.")
    tab.goto(f"{world.site.url}/audit?q=bulk-")
    expect(tab.locator("#audit tbody tr")).to_have_count(30)
    expect(tab.locator("#audit tbody tr").first).to_contain_text("runs cancel")
    tab.goto(f"{world.site.url}/do/runs/bulk?verb=cancel")
    expect(tab.locator("main")).to_contain_text("select runs, or filter the list first")


def test_bulk_action_takes_what_was_counted(world: World, open_tab: Open) -> None:
    """An end in time that the user chose is kept, and so is a beginning that moves with the time;
    what was sent after the question is left alone."""
    send(world, "unserved", 3, "early", **{"X-Customer": "8"})
    between = rfc3339(world.call(latest(world, "unserved")) + 0.001)
    # What a process knows of the server's time is some milliseconds off, more when it was busy.
    world.call(until(lambda: world.now() > instant(between, "") + 0.5, what="a later time"))
    send(world, "unserved", 2, "late", **{"X-Customer": "8"})
    tab = open_tab(java_script_enabled=False)
    try:
        for query, count in ((f"until={between}", 3), ("since=1h", 2)):
            tab.goto(f"{world.site.url}/do/runs/bulk?verb=cancel&q=X-Customer%3D8&{query}")
            expect(tab.locator("h1")).to_have_text(f"Cancel {count} runs?")
            if count == 2:
                send(world, "unserved", 4, "later", **{"X-Customer": "8"})
            tab.get_by_role("button", name="Cancel them").click()
            wait_bulk(world, tab, "complete")
            expect(tab.locator(".lead")).to_contain_text(f"{count} runs done, 0 refused.")
        tab.goto(f"{world.site.url}/runs?q=X-Customer%3D8&state=queued")
        expect(tab.locator("#runs tbody tr")).to_have_count(4)
    finally:
        tidy_up(world)


def test_bulk_action_reaches_what_counting_did_not(
    world: World, open_tab: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If counting takes too long the question says so, and the action goes on to the oldest; at its
    limit it pauses, and is continued from there."""
    monkeypatch.setattr(bulk, "COUNT_SECONDS", -1.0)
    monkeypatch.setattr(bulks, "MOST", 2)
    monkeypatch.setattr(bulks, "PAGE", 1)
    send(world, "unserved", 3, "oldest", **{"X-Customer": "9"})

    async def more() -> None:
        broker = (await world.client()).broker
        for n in range(LOOK + 100):
            subject = broker.names.job("other", "unserved")
            await broker.publish(subject, b"1", {H_MSG_ID: f"many-{n}"})
        await broker.flush()

    world.call(more())
    tab = open_tab(java_script_enabled=False)
    try:
        tab.goto(f"{world.site.url}/do/runs/bulk?verb=cancel&q=X-Customer%3D9")
        expect(tab.locator("h1")).to_have_text("Cancel all runs that match?")
        expect(tab.locator("main")).to_contain_text("Older ones that match are included, too")
        tab.get_by_role("button", name="Cancel them").click()
        wait_bulk(world, tab, "paused")
        expect(tab.locator(".lead")).to_contain_text("2 runs done, 0 refused, more are left")
        tab.get_by_role("button", name="Continue").click()
        wait_bulk(world, tab, "complete")
        expect(tab.locator(".lead")).to_contain_text("3 runs done, 0 refused.")
    finally:
        tidy_up(world)


def test_bulk_action_is_continued_by_another_process(
    world: World, open_tab: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process shows its progress; when the one that works on it stops, it is interrupted, not
    complete, and another one does the rest. A run that fails unexpectedly stops nothing."""
    send(world, "unserved", 30, "moved", **{"X-Customer": "10"})
    cancel = bulks._ACTS["cancel"]

    async def some(by: Access, run: str) -> str:
        if run.endswith("-29"):
            raise KeyError("a bug")
        if run.endswith(("-7", "-8")):
            await asyncio.Event().wait()
        return await cancel(by, run)

    monkeypatch.setitem(bulks._ACTS, "cancel", some)
    monkeypatch.setattr(bulks, "SAVE_SECONDS", 0.0)
    site = world.another_site()
    tab = open_tab(java_script_enabled=False)
    try:
        tab.goto(f"{site.url}/do/runs/bulk?verb=cancel&q=X-Customer%3D10")
        tab.get_by_role("button", name="Cancel them").click()
        tab.goto(f"{world.site.url}/bulk/{tab.url.rsplit('/', 1)[1]}")
        wait_bulk(world, tab, "running")
    finally:
        site.close()
    monkeypatch.setitem(bulks._ACTS, "cancel", cancel)
    wait_bulk(world, tab, "interrupted")
    tab.get_by_role("button", name="Continue").click()
    wait_bulk(world, tab, "complete")
    expect(tab.locator("main")).to_contain_text("unexpected error: KeyError")
    tab.goto(f"{world.site.url}/runs?q=X-Customer%3D10&state=queued")
    expect(tab.locator("#runs")).to_contain_text("No matching runs")
    tidy_up(world)


def test_filters_work_on_older_pages(world: World, tab: Page) -> None:
    """After "Older" the list no longer follows what happens, but it follows its filters."""
    send(world, "charge", 60, "page")
    tab.goto(f"{world.site.url}/runs")
    wait_live(tab)
    tab.get_by_role("link", name="Older").click()
    tab.wait_for_url(re.compile("before="))
    tab.get_by_label("Search", exact=True).fill("flaky/f")
    expect(tab.locator("#runs tbody tr")).to_have_count(1)
    expect(tab.locator("#runs tbody tr")).to_contain_text("flaky")
    wait_live(tab)
    tab.goto(f"{world.site.url}/audit?before=1")
    tab.get_by_label("Who").fill("nobody")
    expect(tab.locator("#audit")).to_contain_text("No matching actions")


def test_selected_runs_are_run_again(world: World, tab: Page) -> None:
    """What cannot be sent again is refused by name, the others are done."""
    tab.goto(f"{world.site.url}/runs?job=broken&state=dead")
    wait_live(tab)
    count = tab.locator("#runs tbody tr").count()
    tab.get_by_label("Select all").check()
    expect(tab.locator("[data-chosen]")).to_have_text(f"{count} selected")
    shoot(tab, "runs-selected")
    tab.get_by_role("button", name="Run again", exact=True).click()
    dialog = tab.get_by_role("dialog")
    expect(dialog).to_contain_text(f"Retry {count} runs?")
    dialog.get_by_role("button", name="Run them again").click()
    told(tab, f"{count} runs to retry")
    expect(tab.locator(".lead")).to_contain_text(f"{count} runs done, 0 refused")
    check_page(tab)
    shoot(tab, "bulk")


def test_audit_says_who_did_what(world: World, tab: Page) -> None:
    """Newest first, and filtered by action and by run."""
    tab.goto(f"{world.site.url}/audit?q=resume")
    before = tab.locator("#audit tbody tr").count()
    for verb in ("pause", "resume"):
        tab.goto(f"{world.site.url}/do/schedules/{verb}?name=nightly")
        tab.get_by_role("button", name=f"{verb.capitalize()} it").click()
        told(tab, f"nightly is {verb}d")
    tab.goto(f"{world.site.url}/audit?q=resume")
    expect(tab.locator("#audit tbody tr")).to_have_count(before + 1)
    expect(tab.locator("#audit tbody tr").first).to_contain_text("local")
    check_page(tab)
    check_fits(tab)
    shoot(tab, "audit")


def test_search_finds_everything_from_everywhere(world: World, tab: Page) -> None:
    """`/` from any page; runs by key, jobs, schedules, nodes and agents by part of their names."""
    tab.goto(f"{world.site.url}/cluster")
    wait_live(tab)
    tab.keyboard.press("/")
    box: Any = tab.get_by_role("searchbox", name="Search everything")
    expect(box).to_be_focused()
    box.fill("order-7")
    tab.keyboard.press("Enter")
    tab.wait_for_url(re.compile(r"/search\?q=order-7"))
    expect(tab.locator("main")).to_contain_text("charge/order-7")
    for text, link in {
        "charg": "charge",
        "nightl": "nightly",
        "web1": "web1",
        world.worker.node[:-1]: world.worker.node,
        world.runs["failed"]: world.runs["failed"],
    }.items():
        tab.goto(f"{world.site.url}/search?q={text}")
        expect(tab.locator("main").get_by_role("link", name=link, exact=True).first).to_be_visible()
    check_page(tab)
    tab.goto(f"{world.site.url}/search?q=no+such+thing+anywhere")
    expect(tab.locator("main")).to_contain_text("Nothing found")
