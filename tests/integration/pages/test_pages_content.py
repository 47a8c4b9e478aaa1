"""Every page in a real Chromium: what it shows, in light and dark, on a desk and on a phone."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.integration.pages.checks import (
    check_axe,
    check_contrast,
    check_fits,
    check_page,
    wait_live,
    wrong,
)
from tests.integration.pages.conftest import Open, shoot
from tests.integration.pages.world import PROBE, World

PAGES = {
    "overview": ("/", ["Overview", "Throughput", "Next runs", "every-second", "no running worker"]),
    "jobs": ("/jobs", ["Jobs and queues", "charge", "order-paid", "no worker"]),
    "job": (
        "/jobs/default/charge",
        ["charge", "Throughput", "Slowest runs", "Latest runs", "Served by", "Run it"],
    ),
    "runs": ("/runs", ["Runs", "every-second"]),
    "run-done": (
        "/runs/{done}",
        ["charge/order-0", "done", "Result", "receipt", "Payload"],
    ),
    "run-dead": (
        "/runs/{dead}",
        ["dead", "Attempts", "epoch", "given up", "X-Note", "Run it again"],
    ),
    "run-failed": ("/runs/{failed}", ["failed", "the bank does not answer", "Next attempt"]),
    "run-running": ("/runs/{running}", ["running", "40 %", "halfway", "Cancel", "Node"]),
    "run-queued": ("/runs/{queued}", ["queued", "No attempts yet", "X-Note"]),
    "run-delayed": ("/runs/{delayed}", ["delayed", "Delayed until", "Due"]),
    "schedules": ("/schedules", ["every-second", "nightly", "Europe/Paris", "paused", "Run now"]),
    "schedule-day": ("/schedules/day", ["Slots of", "nightly", "every-second", "fired", "Europe"]),
    "schedule": ("/schedules/every-second", ["every 1s", "Latest slots", "Next", "X-Note", "done"]),
    "dead": ("/dead", ["Dead letters", "broken", "cannot be read"]),
    "letter": ("/dead/1", ["Dead letter 1", "Traceback", "Attempts", "X-Note", "Replay"]),
    "cluster": (
        "/cluster",
        ["Cluster", "worker", "scheduler", "coordinator", "Versions", "NATS", "_HISTORY"],
    ),
    "node": ("/cluster/{node}", ["CREATED", "RUNNING", "Liveness", "timeout", "Drain"]),
    "alerts": ("/alerts", ["Alerts", "No rules yet"]),
    "audit": ("/audit", ["Audit", "Who"]),
    "search": ("/search?q=charge", ["Jobs", "Runs", "charge"]),
    "fleet": ("/fleet", ["Fleet", "web1", "2 of 2 online", "mark", "failed", "No settings"]),
    "facts": ("/fleet/facts", ["Facts", "rack", "os", "Most frequent"]),
    "agent": ("/fleet/agents/web1", ["web1", "online", "rack", "a, b", "mark", "note"]),
    "fleet-run": ("/fleet/runs/{command}", ["mark", "2 of 2", "ann", "does not like it", "label"]),
}


def path_of(world: World, name: str) -> str:
    return PAGES[name][0].format(node=world.worker.node, **world.runs)


@pytest.mark.parametrize("name", PAGES)
def test_page_shows_its_things_accessibly(world: World, open_tab: Open, name: str) -> None:
    """Content, landmarks, names, contrast in both themes, nothing inline, a clean console."""
    tab = open_tab()
    answer = tab.goto(world.site.url + path_of(world, name))
    assert answer
    assert answer.status == 200
    for text in PAGES[name][1]:
        expect(tab.locator("main")).to_contain_text(text)
    if name not in ("letter", "fleet-run", "search"):  # they change no more
        wait_live(tab)
    check_page(tab)
    check_fits(tab)
    check_axe(tab)
    shoot(tab, name)
    tab.emulate_media(color_scheme="dark", reduced_motion="reduce")
    check_contrast(tab)
    check_axe(tab)
    shoot(tab, f"{name}-dark")
    tab.set_viewport_size({"width": 390, "height": 844})
    check_fits(tab)
    expect(tab.locator("nav.nav a").last).to_be_in_viewport()
    tab.emulate_media(color_scheme="light", reduced_motion="reduce")
    shoot(tab, f"{name}-phone")


def test_checks_find_what_they_look_for(world: World, open_tab: Open) -> None:
    """A page with faults is not taken for a good one."""
    tab = open_tab()
    tab.goto(f"{world.site.url}/jobs")
    tab.evaluate("""() => {
        const main = document.querySelector("main");
        const faint = document.createElement("p");
        faint.textContent = "hardly to be read";
        faint.style.color = "rgb(200, 200, 200)";
        main.append(faint, document.createElement("button"), document.createElement("table"));
        document.body.append(Object.assign(document.createElement("p"), { id: "jobs" }));
    }""")
    assert [text.split(":")[0] for text in wrong(tab, "faint")] == ["hardly to be read"]
    assert len(wrong(tab, "nameless")) == 3
    assert len(wrong(tab, "inline")) == 1


def test_probe_is_shown_as_text_wherever_others_write(world: World, open_tab: Open) -> None:
    """Payload, result, error, header, progress: the probe stands there, letter by letter."""
    tab = open_tab()
    seen = {
        "run-dead": ["[aria-label=Payload]", ".error-text >> nth=0", "dd:has-text('img')"],
        "run-done": ["[aria-label=Result]"],
        "run-running": ["progress + span"],
        "run-delayed": ["[aria-label=Payload]"],
        "agent": [".facts"],
        "fleet-run": ["tbody .error-text", "pre.inline"],
        "letter": ["textarea", "pre[aria-label=Traceback]"],
    }
    for name, places in seen.items():
        tab.goto(world.site.url + path_of(world, name))
        for place in places:
            found = tab.locator(place).first
            text = found.input_value() if place == "textarea" else found.inner_text()
            assert "<script>window.pwned=1</script>" in text.replace('\\"', '"'), (name, place)
        assert tab.locator("main img, main script").count() == 0
    assert PROBE.startswith('">')


def test_page_of_what_is_not_there_says_so(world: World, open_tab: Open) -> None:
    """Unknown runs, letters, nodes, schedules and addresses are pages too, with a way on."""
    tab = open_tab()
    for path in ("/runs/nope", "/dead/999999", "/cluster/nobody", "/schedules/none", "/nowhere"):
        answer = tab.goto(world.site.url + path)
        assert answer
        assert answer.status == 404, path
        expect(tab.get_by_role("link", name="Go to the overview")).to_be_visible()
    check_page(tab)
    answer = tab.goto(f"{world.site.url}/runs/%3Cscript%3Ewindow.pwned=1%3C%2Fscript%3E")
    assert answer
    assert answer.status in (404, 422)


def test_runs_are_filtered_while_one_types(world: World, open_tab: Open) -> None:
    """The list follows the filters without a button, the address keeps them, nonsense is told."""
    tab = open_tab()
    tab.goto(f"{world.site.url}/runs")
    wait_live(tab)
    tabs = tab.get_by_role("navigation", name="State")
    expect(tabs.get_by_role("link", name="dead")).to_have_text(re.compile(r"dead \d+"))
    tabs.get_by_role("link", name="dead").click()
    expect(tab.locator("#runs tbody tr")).to_have_count(3)
    tab.wait_for_url(re.compile(r"state=dead"))
    tabs.get_by_role("link", name="all", exact=True).click()
    expect(tabs.get_by_role("link", name="all", exact=True)).to_have_attribute(
        "aria-current", "true"
    )
    wait_live(tab)
    tab.get_by_label("Search", exact=True).fill("order-7")
    expect(tab.locator("#runs")).to_contain_text("charge/order-7")
    expect(tab.locator("#runs tbody tr")).to_have_count(2)  # with the shipment that it led to
    tab.get_by_label("Job", exact=True).fill("no such job!")
    expect(tab.locator("#runs")).to_contain_text("is not usable")
    tab.get_by_label("Job", exact=True).fill("charge")
    tab.get_by_label("Search", exact=True).fill("")
    expect(tab.locator("#runs tbody tr")).to_have_count(30)
    tab.reload()
    expect(tab.locator("#runs tbody tr")).to_have_count(30)


def test_schedule_tells_why(world: World, open_tab: Open) -> None:
    """A slot of the strip, a time in the future, a time that is none: each has an answer."""
    tab = open_tab()
    tab.goto(f"{world.site.url}/schedules/every-second")
    tab.locator(".strip a").first.click()
    expect(tab.locator("#why")).to_contain_text("dispatched")
    expect(tab.locator("#why")).to_contain_text("in the term of epoch")
    tab.goto(f"{world.site.url}/schedules/nightly")
    tab.get_by_label("Time", exact=True).fill("2027-01-05T02:30:00Z")
    tab.get_by_role("button", name="Explain").click()
    expect(tab.locator("#why")).to_contain_text("It is due in")
    tab.get_by_label("Time", exact=True).fill("yesterday")
    tab.get_by_role("button", name="Explain").click()
    expect(tab.locator("#why")).to_contain_text("is not a time")


@pytest.mark.parametrize("name", ["runs", "run-dead", "dead", "jobs"])
def test_last_column_fits_on_a_small_laptop(world: World, open_tab: Open, name: str) -> None:
    """At 1024 pixels, and in half a window, no table is wider than its panel: long errors end
    within it."""
    tab = open_tab()
    for width in (1024, 900) if name == "runs" else (1024,):
        tab.set_viewport_size({"width": width, "height": 768})
        tab.goto(world.site.url + path_of(world, name))
        shoot(tab, f"{name}-{width}")
        for table in tab.locator(".scroll").all():
            if table.is_visible():
                assert table.evaluate("e => e.scrollWidth - e.clientWidth") <= 1, (name, width)
