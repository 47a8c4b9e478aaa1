"""Making streams, where the server's answer cannot be had on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.broker.streams import Topology
from holdfast.broker.time import ServerTime
from holdfast.broker.upkeep import GIVE_UP_SECONDS, Upkeep
from holdfast.broker.wire import ApiError, api_error
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.errors import BrokerError, NotFound, Unavailable
from holdfast.names import Names
from holdfast.testing import FakeClock

STARTING = "no suitable peers for placement, peer offline"


class YoungCluster:
    """Refuses as a cluster does in the moments in which its servers learn of each other."""

    config = ConnectionConfig(replicas=3)
    names = Names("hf")

    def server_now(self) -> float:
        return 1.5

    def __init__(self, words: str, refusals: int, code: int = 400) -> None:
        self.code = code
        self.clock = FakeClock()
        self.time = ServerTime(self.clock)
        self.clock.sleep = self.pass_time  # type: ignore[method-assign]
        self.left = refusals
        self.words = words
        self.made: list[str] = []

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    async def api(self, subject: str, body: Any = None, timeout: float = 0) -> dict[str, Any]:
        if subject.startswith("STREAM.INFO."):
            raise NotFound("stream not found (10059)")
        if self.left:
            self.left -= 1
            raise api_error(ApiError(self.code, 10059 if self.code == 404 else 10005, self.words))
        self.made.append(body["name"])
        self.first = body.get("first_seq")
        return {}


async def test_server_that_is_not_known_yet_is_waited_for() -> None:
    """Seen once at the start of a cluster: the next try is the right answer, not an error."""
    broker: Any = YoungCluster(STARTING, refusals=3)
    await Topology(broker, RecordConfig()).ensure_buckets("nodes")
    assert broker.made == ["KV_hf_nodes"]
    assert broker.first == 1_500_000, "sequences begin at the server's time, so that they only grow"


async def test_leader_that_knows_nothing_yet_is_waited_for() -> None:
    """Right after its election it finds no stream, not even the one that it is to make."""
    broker: Any = YoungCluster("stream not found", refusals=3, code=404)
    await Topology(broker, RecordConfig()).ensure_buckets("nodes")
    assert broker.made == ["KV_hf_nodes"]


async def test_server_that_does_not_come_is_told() -> None:
    """The wait ends, with the server's own words."""
    broker: Any = YoungCluster(STARTING, refusals=10_000)
    with pytest.raises(Unavailable, match=f"cannot create KV_hf_nodes: {STARTING}"):
        await Topology(broker, RecordConfig()).ensure_buckets("nodes")


async def test_placement_that_can_never_be_is_told_at_once() -> None:
    """More copies than servers do not get better by waiting."""
    broker: Any = YoungCluster("no suitable peers for placement", refusals=1)
    with pytest.raises(BrokerError, match="cannot create KV_hf_nodes"):
        await Topology(broker, RecordConfig()).ensure_buckets("nodes")
    assert not broker.made


class Without(YoungCluster):
    """A server on which one bucket was deleted and cannot be made again."""

    connected = True

    def __init__(self, missing: str, why: str) -> None:
        super().__init__(why, refusals=10_000)
        self.missing = missing

    def on_missing(self, callback: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    async def api(self, subject: str, body: Any = None, timeout: float = 0) -> dict[str, Any]:
        if subject == f"STREAM.INFO.{self.missing}":
            raise NotFound("stream not found (10059)")
        if subject.startswith("STREAM.INFO."):
            return {"created": "2026-01-01T00:00:00Z", "config": {}}
        return await super().api(subject, body, timeout)


async def test_bucket_that_cannot_be_made_again_ends_the_role() -> None:
    """First it is a problem, for which the role is not ready; after a minute it is the end."""
    broker: Any = Without("KV_hf_runs", "subjects overlap with an existing stream")
    upkeep = Upkeep(Topology(broker, RecordConfig()))
    await upkeep._round()
    assert upkeep.problems[0].startswith("KV_hf_runs is missing: cannot create KV_hf_runs: subj")
    broker.clock.advance(GIVE_UP_SECONDS + 1)
    with pytest.raises(Unavailable, match="KV_hf_runs could not be brought back"):
        await upkeep._round()


async def test_bucket_that_is_another_one_is_told() -> None:
    """Who had records in it hears that they are gone, once."""
    told: list[str] = []
    broker: Any = Without("", "")
    upkeep = Upkeep(Topology(broker, RecordConfig()), on_made=told.append)
    await upkeep._round()
    assert told == []
    upkeep._created["KV_hf_runs"] = "before"
    await upkeep._round()
    await upkeep._round()
    assert told == ["KV_hf_runs"]
