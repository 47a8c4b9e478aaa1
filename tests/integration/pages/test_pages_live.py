"""Pages that keep up, and pages that act: with scripts and without, by mouse and by keyboard."""

from __future__ import annotations

import json
import re
from typing import Any

from playwright.sync_api import Page, expect

from holdfast import Worker
from holdfast.config import WorkerConfig
from holdfast.status.dead import DeadLetters
from holdfast.status.jobs import Jobs
from holdfast.status.totals import counted
from tests.integration.pages.checks import check_page, load_until, told, wait_live
from tests.integration.pages.conftest import Open, shoot
from tests.integration.pages.world import World
from tests.support import until


def stays(tab: Page) -> None:
    """Mark a page, to know later that it was never loaded anew."""
    tab.evaluate("window.mark = 1")


def same(tab: Page) -> bool:
    return bool(tab.evaluate("window.mark === 1"))


def send(world: World, job: str, *args: Any, **options: Any) -> str:
    async def enqueue() -> str:
        return (await world.app.jobs[job].enqueue(*args, **options)).id

    return world.call(enqueue())


def state_of(world: World, run: str) -> str:
    async def read() -> str:
        record = await (await world.client()).read(run)
        return record.state if record else "none"

    return world.call(read())


# ---- keeping up


def test_new_run_appears_without_a_reload(world: World, tab: Page) -> None:
    """What is sent elsewhere shows up in an open page, and the page stays the same page."""
    tab.goto(f"{world.site.url}/runs?job=charge")
    wait_live(tab)
    stays(tab)
    run = send(world, "charge", 900, key="live-900")
    expect(tab.locator("#runs")).to_contain_text(run)
    expect(tab.locator("#runs tbody tr", has_text=run)).to_contain_text("done")
    assert same(tab)


def test_run_page_follows_the_run_to_its_end(world: World, tab: Page) -> None:
    """Running, then cancelled by somebody else: the open page shows it."""
    run = send(world, "hold", 7, key="follow")
    tab.goto(f"{world.site.url}/runs/{run}")
    expect(tab.locator("#run .head .state")).to_have_text("running")
    wait_live(tab)
    stays(tab)

    async def cancel() -> bool:
        return await (await world.client()).cancel(run, "default", "hold")

    assert world.call(cancel())
    expect(tab.locator("#run .head .state")).to_have_text("cancelled")
    assert same(tab)


def test_overview_counts_what_ends(world: World, tab: Page) -> None:
    """The charts and tiles move with the work."""
    tab.goto(f"{world.site.url}/")
    wait_live(tab)
    stays(tab)

    async def done() -> int:
        return (await counted(await world.client(), 900)).ends()["done"]

    before = world.call(done())
    for n in range(5):
        send(world, "charge", n, key=f"count-{n}")

    async def grown() -> bool:
        return await done() >= before + 10  # each of them leads to a shipment

    world.call(until(grown, 20, "ten more runs counted"))
    expect(tab.locator(".chart .fill-done").first).to_be_visible()
    expect(tab.locator(".chart title", has_text=re.compile(r"\d+ done")).first).to_be_attached()
    assert same(tab)


def test_page_that_was_hidden_catches_up(world: World, tab: Page) -> None:
    """The connection is given up while nobody looks, and what was missed is fetched after that."""
    tab.goto(f"{world.site.url}/runs?job=charge")
    wait_live(tab)
    stays(tab)
    hide = """(hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    feed = world.site.app.state.feed
    tab.evaluate(hide, True)

    async def left() -> bool:
        return bool(feed.streams == 0)

    world.call(until(left, 30, "no stream open"))
    run = send(world, "charge", 901, key="hidden-901")
    tab.evaluate(hide, False)
    expect(tab.locator("#runs")).to_contain_text(run)
    wait_live(tab)
    assert same(tab)


def test_refresh_keeps_what_a_person_has_chosen(world: World, tab: Page) -> None:
    """Ticked boxes, opened parts and the focus survive a refresh."""
    tab.goto(f"{world.site.url}/dead?job=broken")
    wait_live(tab)
    tab.locator("details").first.evaluate("d => { d.open = true }")
    box = tab.locator("tbody input[type=checkbox]").last
    value = box.get_attribute("value")
    box.check()
    send(world, "broken", -77, key="one-more")
    expect(tab.locator("#dead")).to_contain_text("broken/one-more")
    expect(tab.locator(f"tbody input[value='{value}']")).to_be_checked()
    expect(tab.locator("[data-chosen]").first).to_have_text("1 selected")


# ---- acting


def test_cancel_asks_first_and_says_what_happens(world: World, tab: Page) -> None:
    """A dialog with the consequences; Escape and "Back" change nothing; then it is done."""
    run = send(world, "hold", 2, key="cancel-me")
    tab.goto(f"{world.site.url}/runs/{run}")
    expect(tab.locator("#run .head .state")).to_have_text("running")
    tab.get_by_role("button", name="Cancel").click()
    dialog = tab.get_by_role("dialog")
    expect(dialog).to_contain_text("Its handler is interrupted")
    shoot(tab, "dialog")
    tab.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    tab.get_by_role("button", name="Cancel").click()
    dialog.get_by_role("button", name="Back").click()
    expect(dialog).to_have_count(0)
    assert state_of(world, run) == "running"
    tab.get_by_role("button", name="Cancel").click()
    dialog.get_by_role("button", name="Cancel the run").click()
    told(tab, "The run is cancelled")
    assert state_of(world, run) == "cancelled"
    tab.reload()
    expect(tab.locator(".flash")).to_have_count(0)


def test_failed_run_starts_again_now(world: World, tab: Page) -> None:
    """A run that waits for its next attempt does not wait any more."""
    run = send(world, "flaky", 5, key="again")

    async def failed() -> bool:
        record = await (await world.client()).read(run)
        return bool(record and record.state == "failed")

    world.call(until(failed, 20, "a failed attempt"))
    tab.goto(f"{world.site.url}/runs/{run}")
    tab.get_by_role("button", name="Run it again").click()
    expect(tab.get_by_role("dialog")).to_contain_text("Its next attempt starts now")
    tab.get_by_role("dialog").get_by_role("button", name="Run it again").click()
    told(tab, "starts now")
    expect(tab.locator("#run .summary")).to_contain_text("2 · 0")


def test_job_is_paused_and_resumed_without_scripts(world: World, open_tab: Open) -> None:
    """Every question has a page of its own: nothing needs a script."""
    tab = open_tab(java_script_enabled=False)
    row = tab.locator("tbody tr", has_text="ship")
    pause = row.get_by_role("button", name="Pause")
    load_until(tab, f"{world.site.url}/jobs", pause)
    pause.click()
    expect(tab.get_by_role("heading", name="Pause ship?")).to_be_visible()
    expect(tab.locator("main")).to_contain_text("nothing is lost")
    tab.get_by_role("button", name="Pause").click()
    told(tab, "ship is paused")
    expect(row).to_contain_text("paused")

    async def paused() -> bool:
        return (await Jobs(await world.client()).list("ship"))[0].paused

    assert world.call(paused())
    row.get_by_role("button", name="Resume").click()
    tab.get_by_role("button", name="Resume").click()
    told(tab, "ship is resumed")
    assert not world.call(paused())


def test_waiting_runs_are_purged(world: World, tab: Page) -> None:
    """Purging says how many runs it will remove, and removes them."""
    for n in range(3):
        send(world, "unserved", n, key=f"purge-{n}")
    tab.goto(f"{world.site.url}/jobs?q=unserved")
    tab.get_by_role("button", name="Purge").click()
    expect(tab.get_by_role("dialog")).to_contain_text("4 runs waiting")
    tab.get_by_role("dialog").get_by_role("button", name="Remove for good").click()
    told(tab, "4 runs of unserved removed")
    world.runs["queued"] = send(world, "unserved", 1, key="u2")


def test_schedule_is_paused_resumed_and_run_now(world: World, tab: Page) -> None:
    """The switches of a schedule, from its own page."""
    tab.goto(f"{world.site.url}/schedules/nightly")
    tab.get_by_role("button", name="Pause").click()
    expect(tab.get_by_role("dialog")).to_contain_text("stay missed")
    tab.get_by_role("dialog").get_by_role("button", name="Pause it").click()
    told(tab, "nightly is paused")
    expect(tab.locator(".head .state")).to_have_text("paused")
    tab.get_by_role("button", name="Resume").click()
    expect(tab.get_by_role("dialog")).to_contain_text("its next slot is")
    tab.get_by_role("dialog").get_by_role("button", name="Resume it").click()
    told(tab, "nightly is resumed")
    expect(tab.locator(".head .state")).to_have_text("active")
    tab.get_by_role("button", name="Run now").click()
    tab.get_by_role("dialog").get_by_role("button", name="Send a run").click()
    told(tab, "A run of nightly was sent")
    expect(tab.locator("#run .head .state")).to_have_text("done")


def test_dead_letters_are_replayed_edited_and_dropped(world: World, tab: Page) -> None:
    """Two of a group at once; one with another payload; one for good."""

    async def letters() -> list[Any]:
        found = await DeadLetters(await world.client()).list(limit=100)
        return [one for one in found if one.run.startswith("broken/act")]

    runs = [send(world, "broken", -n, key=f"act-{n}") for n in (11, 12, 13, 14)]

    async def all_dead() -> bool:
        return len(await letters()) == 4

    world.call(until(all_dead, 20, "four dead letters"))
    ids = {one.run: one.id for one in world.call(letters())}
    tab.goto(f"{world.site.url}/dead?job=broken")
    tab.locator("details").first.evaluate("d => { d.open = true }")
    expect(tab.get_by_role("button", name="Replay selected").first).to_be_disabled()
    for run in runs[:2]:
        tab.locator(f"tbody input[value='{ids[run]}']").check()
    tab.get_by_role("button", name="Replay selected").first.click()
    expect(tab.get_by_role("dialog")).to_contain_text("Replay 2 dead letters?")
    expect(tab.get_by_role("dialog")).to_contain_text(runs[0])
    tab.get_by_role("dialog").get_by_role("button", name="Send again").click()
    told(tab, "2 dead letters sent again")

    tab.goto(f"{world.site.url}/dead/{ids[runs[2]]}")
    tab.get_by_label("Edit the payload").fill(json.dumps({"n": 5, "note": "mended"}))
    tab.get_by_role("button", name="Replay with this payload").click()
    expect(tab.locator("main")).to_contain_text("mended")
    tab.get_by_role("button", name="Send again").click()
    told(tab, "1 dead letter sent again")

    async def mended() -> bool:
        record = await (await world.client()).read(runs[2])
        return bool(record and record.state == "done" and bytes(record.result) == b"5")

    world.call(until(mended, 20, "the run with the edited payload done"))
    tab.goto(f"{world.site.url}/dead/{ids[runs[3]]}")
    tab.get_by_role("button", name="Drop").click()
    expect(tab.get_by_role("dialog")).to_contain_text("nothing can bring the letters back")
    tab.get_by_role("dialog").get_by_role("button", name="Remove for good").click()
    told(tab, "1 dead letter dropped")

    async def left() -> set[str]:
        return {one.run for one in await letters()}

    assert runs[3] not in world.call(left())


def test_node_is_drained(world: World, tab: Page) -> None:
    """A worker that is drained from its page ends, and its page tells the story."""

    async def start() -> Any:
        import asyncio

        worker = Worker(world.app, WorkerConfig(group="default"))
        task = asyncio.create_task(worker.run())
        await until(lambda: worker.pulling, 20, "a second worker")
        return worker, task

    worker, task = world.call(start())
    tab.goto(f"{world.site.url}/cluster/{worker.node}")
    wait_live(tab)
    tab.get_by_role("button", name="Drain").click()
    expect(tab.get_by_role("dialog")).to_contain_text("as after SIGTERM")
    tab.get_by_role("dialog").get_by_role("button", name="Drain it").click()
    told(tab, "is draining")
    expect(tab.locator(".story")).to_contain_text("TERMINATED_GRACEFULLY")
    shoot(tab, "node-drained")

    async def ended() -> bool:
        await task
        return True

    assert world.call(ended())


# ---- the keyboard


def test_everything_is_reached_by_keyboard(world: World, tab: Page) -> None:
    """Skip link, pages by letters, rows by j and k, the filter by a slash."""
    tab.goto(f"{world.site.url}/")
    wait_live(tab)
    tab.keyboard.press("Tab")
    expect(tab.locator(".skip")).to_be_focused()
    tab.keyboard.press("Enter")
    expect(tab.locator("main")).to_be_focused()
    for key, path in (("j", "/jobs"), ("s", "/schedules"), ("c", "/cluster"), ("r", "/runs")):
        tab.keyboard.press("g")
        tab.keyboard.press(key)
        tab.wait_for_url(f"{world.site.url}{path}")
        tab.wait_for_load_state()
    tab.goto(f"{world.site.url}/runs?state=dead")
    wait_live(tab)
    tab.keyboard.press("j")
    tab.keyboard.press("j")
    tab.keyboard.press("k")
    first = tab.locator("#runs tbody a[data-main]").first
    expect(first).to_be_focused()
    assert "outline" in tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") or (
        tab.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "2px"
    )
    tab.keyboard.press("Enter")
    tab.wait_for_url(re.compile(r"/runs/"))
    tab.goto(f"{world.site.url}/runs")
    tab.wait_for_load_state()
    tab.keyboard.press("f")
    expect(tab.get_by_label("Search", exact=True)).to_be_focused()
    tab.keyboard.type("gj?")
    expect(tab.get_by_label("Search", exact=True)).to_have_value("gj?")


def test_shortcuts_are_explained_and_can_be_switched_off(world: World, tab: Page) -> None:
    """The help opens and closes by keyboard; single keys do nothing once they are off."""
    tab.goto(f"{world.site.url}/jobs")
    wait_live(tab)
    tab.keyboard.press("?")
    help = tab.get_by_role("dialog")
    expect(help).to_contain_text("Keyboard shortcuts")
    help.get_by_label("Enable single-key shortcuts").uncheck()
    tab.keyboard.press("Escape")
    expect(help).to_be_hidden()
    tab.keyboard.press("g")
    tab.keyboard.press("r")
    tab.keyboard.press("j")
    assert tab.url.endswith("/jobs")
    assert tab.locator("a[data-main]:focus").count() == 0


def test_theme_is_chosen_and_kept(world: World, open_tab: Open) -> None:
    """A click changes it at once, and the next page has it from the server."""
    tab = open_tab(phone=True)
    tab.goto(f"{world.site.url}/schedules")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(ground)
    tab.get_by_role("button", name="Switch between light and dark").click()
    dark = tab.evaluate(ground)
    assert dark != light
    tab.locator("nav.nav a", has_text="Cluster").tap()
    tab.wait_for_url(re.compile("/cluster"))
    assert tab.locator("html").get_attribute("data-theme") == "dark"
    assert tab.evaluate(ground) == dark
    check_page(tab)
