"""Requirements: what a server must be before anything is trusted to it.

Guaranteed: a server that is too old, or without JetStream, raises `ServerTooOld` or `BrokerError`
with what to do about it. An election in its cluster is waited for; one that does not end raises
`Unavailable`, which is another thing than a server without JetStream.

Not checked: the other nodes of the cluster, and whether streams exist.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from holdfast import errors
from holdfast.clock import Clock

REQUIRED_VERSION: Final = (2, 12, 6)
REQUIRED_API_LEVEL: Final = 3

_ELECTION_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.25
_LEADERLESS: Final = "(10008)"
"""The server's own number for a cluster that elects, or has too few nodes to."""

Account = Callable[[], Awaitable[dict[str, Any]]]
"""Asks JetStream about the account."""


def check_version(version: str) -> None:
    """Refuse a server that is too old."""
    if parse_version(version) < REQUIRED_VERSION:
        wanted = ".".join(map(str, REQUIRED_VERSION))
        raise errors.ServerTooOld(
            f"nats-server {version or '(unknown)'} is too old: Holdfast needs "
            f"{wanted} or newer, because older ones silently ignore message TTLs and "
            "schedules. Upgrade the server, or run 'holdfast server'"
        )


async def check_jetstream(account: Account, clock: Clock) -> int:
    """The level of JetStream's API; refuse one that is too low."""
    info = await _answered(account, clock)
    level = int(info.get("api", {}).get("level", 0))
    if level < REQUIRED_API_LEVEL:
        raise errors.ServerTooOld(
            f"the server's JetStream API level is {level} and Holdfast needs "
            f"{REQUIRED_API_LEVEL} or more (nats-server 2.12): upgrade every node"
        )
    return level


async def _answered(account: Account, clock: Clock) -> dict[str, Any]:
    """What JetStream says of the account; an election in its cluster is waited for.

    A question that was asked during an election is never answered: it is asked again soon.
    """
    deadline = clock.monotonic() + _ELECTION_SECONDS
    while True:
        try:
            return await account()
        except (errors.Unavailable, errors.NotFound, errors.OutcomeUnknown) as error:
            unsure = isinstance(error, errors.OutcomeUnknown)
            if not unsure and _LEADERLESS not in str(error):
                raise errors.BrokerError(
                    f"JetStream is not enabled on this server or account ({error}): "
                    "add 'jetstream {}' to the server's configuration"
                ) from None
            if clock.monotonic() > deadline:
                raise errors.Unavailable(
                    f"the cluster has no leader ({error}): start the servers that are missing, "
                    "most of them must run"
                ) from None
        await clock.sleep(_PAUSE_SECONDS)


def parse_version(text: str) -> tuple[int, int, int]:
    """`2.12.6-RC.1` as numbers; unreadable parts count as 0."""
    parts = [*text.split("-")[0].split("."), "0", "0", "0"]
    major, minor, patch = (int(p) if p.isdigit() else 0 for p in parts[:3])
    return major, minor, patch
