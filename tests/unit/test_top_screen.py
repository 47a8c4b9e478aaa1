"""What `holdfast top` draws fits the terminal, whatever its size and whatever the names are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from holdfast import visible
from holdfast.cli.top_screen import Header, screen, shares, spark
from holdfast.status.glance import Failure, Glance
from holdfast.status.jobs import JobInfo
from holdfast.status.nodes import NodeInfo

names = st.text(max_size=60)
jobs = st.builds(
    JobInfo,
    group=names,
    job=names,
    waiting=st.integers(0, 10**7),
    paused=st.booleans(),
    oldest_seconds=st.none() | st.floats(0, 1e7),
)
failures = st.builds(
    Failure,
    at=st.floats(0, 2e9),
    run=names,
    job=names,
    state=st.sampled_from(["dead", "failed"]),
    error=names,
)


def node(name: str) -> NodeInfo:
    fields = {"id": name, "role": "worker", "group": "g", "state": "ERROR", "reason": name}
    rest = {"host": "h", "pid": 1, "version": "", "started": 0.0, "uptime_seconds": 9.0}
    return NodeInfo(**fields, **rest, running=1, settings="", jobs=(), metrics={})  # type: ignore[arg-type]


looks = st.builds(
    Glance,
    at=st.floats(0, 2e9),
    queued=st.integers(0, 10**9),
    in_flight=st.integers(0, 10**4),
    delayed=st.integers(0, 10**4),
    dead_letters=st.integers(0, 10**4),
    ended=st.dictionaries(st.sampled_from(["done", "dead"]), st.integers(0, 10**9)),
    minutes=st.lists(st.integers(0, 10**6), min_size=60, max_size=60),
    history=st.integers(0, 10**9),
    jobs=st.lists(jobs, max_size=30),
    nodes=st.lists(st.builds(node, names), max_size=10),
    failures=st.lists(failures, max_size=20),
)
headers = st.builds(Header, where=names, rate=st.none() | st.floats(0, 1e6), problem=names)


@given(looks, headers, st.integers(1, 250), st.integers(1, 60))
def test_screen_fits_and_controls_nothing(
    look: Glance, header: Header, width: int, height: int
) -> None:
    """No line is wider, no screen higher, and no name moves the cursor."""
    lines = screen(look, header, width, height)
    assert len(lines) <= height
    assert all(cell_len(line.plain) <= width for line in lines)
    assert all(visible.one_line(line.plain) == line.plain for line in lines)


@given(st.integers(-5, 80), st.lists(st.integers(1, 40), min_size=3, max_size=3))
def test_sections_share_the_lines(lines: int, wanted: list[int]) -> None:
    """The first sections are kept, none gets more than it wants, and together they fit."""
    found = shares(lines, wanted)
    assert all(share <= want for share, want in zip(found, wanted, strict=True))
    assert sum(share + 2 for share in found if share) <= max(lines, 0)
    assert [bool(share) for share in found] == sorted((bool(s) for s in found), reverse=True)


def test_spark_shows_every_minute_with_a_run() -> None:
    """One run beside a thousand is a bar; none is blank."""
    assert spark([0, 1, 500, 1000]) == " ▁▄█"
    assert spark([0, 0]) == "  "
