"""What a connection asks a server before it trusts it: JetStream's answer, and how long to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast import errors
from holdfast.broker.connecting import check_jetstream
from holdfast.testing.clock import FakeClock

SILENT = errors.Unavailable("nobody answers on $JS.API.INFO")
ELECTING = errors.Unavailable("JetStream system temporarily unavailable (10008)")
INFO: dict[str, Any] = {"api": {"level": 3}}


async def asked(answers: Sequence[Exception | dict[str, Any]]) -> tuple[int, float]:
    """The level that was found, and after how many seconds; the last answer is repeated."""
    clock = FakeClock()
    left = list(answers)

    async def account() -> dict[str, Any]:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    began = clock.monotonic()
    checking = asyncio.create_task(check_jetstream(account, clock))
    while not checking.done():
        sleeping = asyncio.create_task(clock.sleepers(1))
        await asyncio.wait([sleeping, checking], return_when=asyncio.FIRST_COMPLETED)
        sleeping.cancel()
        clock.advance(0.25)
    return await checking, clock.monotonic() - began


async def test_reload_of_the_server_is_waited_for() -> None:
    """Nobody answers while a server takes a new configuration: that is no server without
    JetStream."""
    level, seconds = await asked([SILENT, SILENT, INFO])
    assert level == 3
    assert seconds < 2


async def test_election_is_waited_for_longer_than_a_reload() -> None:
    """A cluster may need eight seconds to elect its leader."""
    level, seconds = await asked([*[ELECTING] * 30, INFO])
    assert level == 3
    assert seconds > 7


async def test_server_without_jetstream_is_named_within_seconds() -> None:
    """It stays silent: the error says what to add to its configuration."""
    with pytest.raises(errors.BrokerError, match=r"add 'jetstream \{\}'") as found:
        await asked([SILENT])
    assert not isinstance(found.value, errors.TryAgain)


async def test_cluster_that_elects_nobody_may_be_tried_again() -> None:
    """Servers are missing: the error says so, and a role that starts keeps trying."""
    with pytest.raises(errors.Unavailable, match="start the servers that are missing"):
        await asked([ELECTING])
