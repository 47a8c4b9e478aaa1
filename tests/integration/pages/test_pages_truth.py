"""Figures and texts on the pages that have to be true however much there is."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page, expect

from holdfast.client import Client
from holdfast.model.run import RunRecord
from holdfast.status.listing import RunFilter, RunPages
from holdfast.status.totals import counted
from tests.integration.pages.conftest import Open, shoot
from tests.integration.pages.world import World
from tests.support import until

CHILDREN = 130
OTHERS = 700
"""More than any page reads one by one."""


async def _family(client: Client, parent: str) -> None:
    """The ends of a run, of what it led to, and of many others since."""
    now = client.broker.server_now()

    def ended(state: str = "done", **members: Any) -> RunRecord:
        times: Any = {"created": now - 1, "started": now - 0.5, "ended": now}
        return RunRecord(state, "default", "charge", **times, **members)

    await client.history.append(parent, ended())
    for n in range(CHILDREN):
        record = ended("dead" if n % 10 == 0 else "done", cause=parent)
        await client.history.append(f"{parent}-child-{n}", record)
    for n in range(OTHERS):
        await client.history.append(f"{parent}-other-{n}", ended())


def test_run_shows_all_it_led_to_however_much_followed(world: World, tab: Page) -> None:
    """The count is exact, by state; the rest of the list is one click away."""

    async def fill() -> None:
        await _family(await world.client(), "parent1")

    world.call(fill())
    ends = world.site.app.state.services.ended_index
    wanted = RunFilter(prefix=f"parent1-other-{OTHERS - 1}")
    tab.goto(f"{world.site.url}/runs/parent1")  # starts the index, which follows every second

    async def followed() -> bool:
        return bool(ends.select(wanted, 1)[0])

    world.call(until(followed, 20, "the last run in the index"))
    tab.reload()
    family = tab.locator("#family")
    expect(family).to_contain_text(f"led to {CHILDREN} runs")
    expect(family.locator("header")).to_contain_text("13 dead")
    expect(family.locator("header")).to_contain_text("117 done")
    shoot(tab, "run-family")
    family.get_by_role("link", name="Show all").click()
    expect(tab.locator("#runs tbody tr")).to_have_count(50)
    tab.goto(f"{world.site.url}/runs/parent1-child-3")
    expect(tab.locator("#family .up")).to_contain_text("parent1")


def test_retries_that_wait_are_not_called_running(world: World, tab: Page) -> None:
    """A run between two attempts is retrying, whatever the server counts as in flight."""

    async def waiting() -> int:  # other tests of this world may have left some
        pages = RunPages(await world.client())
        return len((await pages.page(RunFilter(job="flaky", state="failed"), 10)).runs)

    count = world.call(waiting())
    assert count
    tab.goto(f"{world.site.url}/jobs?q=flaky")
    row = tab.locator("#jobs tbody tr")

    def cell(name: str) -> Any:
        return row.locator(f"td[data-label={name}]")

    expect(cell("Retrying")).to_have_text(str(count))
    expect(cell("Running")).to_have_text("0")
    tab.goto(f"{world.site.url}/jobs?q=hold")
    expect(cell("Running")).to_have_text("1")
    expect(cell("Retrying")).to_have_text("0")


def test_times_and_states_of_a_node_do_not_overlap(world: World, tab: Page) -> None:
    """Each transition has its time on the left and its state on the right of it."""
    tab.goto(f"{world.site.url}/cluster/{world.worker.node}")
    gaps: list[float] = tab.evaluate("""() =>
    [...document.querySelectorAll(".story li")].map((line) => {
        const text = document.createRange();
        text.selectNodeContents(line.querySelector("time"));
        const state = line.querySelector("div").getBoundingClientRect();
        return state.left - text.getBoundingClientRect().right;
    })""")
    assert gaps
    assert min(gaps) >= 0, "a time is printed over its state"


def test_dead_letters_are_named_by_an_error_that_happened(world: World, tab: Page) -> None:
    """Not by the pattern that groups them, in which numbers are blanked."""
    tab.goto(f"{world.site.url}/dead")
    group = tab.locator("#dead summary", has_text="broken")
    expect(group).to_contain_text("page -")
    expect(group).not_to_contain_text("page -N")
    expect(group).to_contain_text("like it")


def test_schedule_is_shown_in_its_own_zone(world: World, tab: Page) -> None:
    """A cron in Paris runs at 03:30 there, in winter and in summer, and UTC is beside it."""
    tab.goto(f"{world.site.url}/schedules/nightly")
    slots = tab.locator("#next .what")
    assert slots.count() > 3
    for text in slots.all_inner_texts():
        assert "03:30:00 CE" in text, text
        assert "UTC" in text
    tab.goto(f"{world.site.url}/schedules?q=nightly")
    expect(tab.locator("#schedules tbody td[data-label=Next]")).to_contain_text("03:30:00 CE")
    title = tab.locator("#schedules tbody td[data-label=Next] time").get_attribute("title")
    assert title
    assert "your time" in title


def test_charts_need_no_memory_of_the_web(world: World, open_tab: Open) -> None:
    """Throughput, lag and trends come from the server: a process that has just started has them."""

    async def known() -> bool:
        found = await counted(await world.client(), 900)
        return found.ends()["done"] >= 30 and any(p.in_flight for p in found.periods)

    world.call(until(known, 40, "counts and a sample of the lag on the server"))
    site = world.another_site()
    tab = open_tab()
    try:
        tab.goto(f"{site.url}/?range=15m")
        expect(tab.locator("svg[aria-label*='by outcome'] rect.fill-done").first).to_be_attached()
        expect(tab.locator(".tile", has_text="Runs ended")).not_to_contain_text("0.0")
        tab.goto(f"{site.url}/jobs?q=charge")
        expect(tab.locator("#jobs svg.spark")).to_be_attached()
        tab.goto(f"{site.url}/jobs/default/hold?range=1h")
        expect(tab.locator("svg[aria-label*='waiting and in flight']")).to_be_attached()
    finally:
        tab.goto("about:blank")
        site.close()


def test_what_cannot_be_done_with_a_state_is_not_offered(world: World, tab: Page) -> None:
    """Nothing leads from a filtered list to a page that refuses the filter."""
    every = {"Cancel …": "verb=cancel", "Run again …": "verb=retry"}
    for state, offered in (("queued", {"Cancel …"}), ("dead", {"Run again …"}), ("done", set())):
        tab.goto(f"{world.site.url}/runs?state={state}")
        for text, verb in every.items():
            links = tab.locator(f'#runs a[href*="{verb}"]')
            expect(links).to_have_count(1 if text in offered else 0)
    tab.goto(f"{world.site.url}/runs?job=charge")
    expect(tab.locator('#runs a[href*="/do/runs/bulk"]')).to_have_count(2)


def test_only_what_is_wrong_is_marked(world: World, tab: Page) -> None:
    """A node that is gone does not colour the number of waiting runs."""
    tab.goto(world.site.url)
    expect(tab.locator(".verdict")).to_have_attribute("data-level", "bad")
    waiting = tab.locator(".tile", has_text="Waiting").first
    expect(waiting).not_to_have_class("tile bad")
