"""The thresholds of `holdfast doctor`, what may be fixed, and what is tried on a server."""

from __future__ import annotations

from typing import Any, cast

import pytest

from holdfast.broker.streams import Difference, stream_configs
from holdfast.config import RecordConfig
from holdfast.durations import NANO
from holdfast.names import Names
from holdfast.status import checks
from holdfast.status.checks import changes, is_grave, is_safe
from holdfast.status.probes import Jetstream, Site, derived_urls, probes

MIB = 1024 * 1024


class Stub:
    """As much of a broker and of a client as a check looks at."""

    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)

    @property
    def topology(self) -> Stub:
        return self

    async def measure_clock(self) -> float:
        return float(self.__dict__["offset"])


def site(**facts: Any) -> Site:
    stub = cast(Any, Stub(names=Names(), cluster_name="", **facts))
    return Site(stub, stub, RecordConfig())


@pytest.mark.parametrize(
    ("offset", "level"),
    [(0.0, "ok"), (-0.2, "ok"), (0.3, "warn"), (-0.9, "warn"), (1.1, "fail"), (-60, "fail")],
)
async def test_doctor_judges_the_clock(offset: float, level: str) -> None:
    """A quarter of a second is worth a warning, a whole one stops schedulers."""
    (finding,) = await checks.clock(site(offset=offset))
    assert finding.level == level


@pytest.mark.parametrize(
    ("size", "level"),
    [(32_768, "fail"), (MIB // 2, "warn"), (MIB, "ok"), (8 * MIB, "ok"), (64 * MIB, "warn")],
)
async def test_doctor_judges_max_payload(size: int, level: str) -> None:
    """A dead letter has to fit; huge messages slow everybody down."""
    (finding,) = await checks.payload(site(max_message_bytes=size))
    assert finding.level == level


@pytest.mark.parametrize(("used", "level"), [(0, "ok"), (79, "ok"), (80, "warn"), (96, "fail")])
async def test_doctor_judges_how_full_the_store_is(used: int, level: str) -> None:
    """The account's limit and the server's own are both looked at."""
    where = site()
    where.account = {"storage": used, "limits": {"max_storage": 100}}
    where.monitors = [Jetstream("http://a:8222", True, 0, used * 10, 1000, 1)]
    assert [f.level for f in await checks.storage(where)] == [level, level]


@pytest.mark.parametrize(
    ("key", "actual", "wanted", "safe", "grave"),
    [
        ("subjects", ["a"], ["a", "b"], True, True),
        ("allow_msg_ttl", None, True, True, True),
        ("retention", "limits", "workqueue", False, True),
        ("storage", "memory", "file", False, True),
        ("max_age", 5 * NANO, 9 * NANO, True, False),
        ("max_age", 9 * NANO, 5 * NANO, False, False),
        ("max_age", 0, 5 * NANO, False, False),
        ("max_bytes", 5, 9, True, False),
        ("max_bytes", 9, 5, False, False),
        ("max_bytes", -1, 5, False, False),
        ("num_replicas", 1, 3, True, False),
        ("num_replicas", 3, 1, False, False),
        ("", None, None, False, True),
    ],
)
def test_fixes_lose_nothing(key: str, actual: Any, wanted: Any, safe: bool, grave: bool) -> None:
    """Only what adds is put right; what would remove messages or copies is left to a person."""
    difference = Difference("HF_JOBS", key, actual, wanted)
    assert (is_safe(difference), is_grave(difference)) == (safe, grave)


def test_fixes_keep_subjects_that_somebody_added() -> None:
    """Missing subjects join those that are there."""
    found = changes([Difference("HF_JOBS", "subjects", ["mine", "a"], ["a", "b"])])
    assert found == {"HF_JOBS": {"subjects": ["mine", "a", "b"]}}


def test_probes_try_every_subject_of_every_stream() -> None:
    """A stream that is added later is tried without anybody remembering it."""
    tried = probes(Names("ns"), RecordConfig(), "_INBOX.x")
    families = {probe.family for probe in tried if probe.verb == "publish"}
    for config in stream_configs(Names("ns"), RecordConfig(), 1):
        assert set(config["subjects"]) <= families
        subjects = {probe.subject for probe in tried}
        assert f"$JS.API.STREAM.INFO.{config['name']}" in subjects
    by_subject = [probe.subject for probe in tried]
    assert len(by_subject) == len(set(by_subject)), "the server's word names only the subject"


def test_monitors_are_looked_for_where_they_usually_are() -> None:
    """8222 for 4222, and as far apart for every other port."""
    found = derived_urls(["nats://a", "nats://u:p@b:4223", "tls://[::1]:4222"])
    assert found == ["http://a:8222", "http://b:8223", "http://[::1]:8222"]
