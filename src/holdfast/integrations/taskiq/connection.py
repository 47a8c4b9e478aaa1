"""Turns the arguments of taskiq-nats into a Holdfast connection.

`servers` and the keyword arguments are those of the NATS client; its callbacks are called as
before, next to ours. One thing cannot be changed: nothing is buffered while disconnected, because a
message sent minutes later may act on something that has a new owner.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from holdfast.broker import Broker
from holdfast.config import ConnectionConfig
from holdfast.errors import NotConnected
from holdfast.names import DEFAULT_NAMESPACE
from holdfast.retrying import PATIENCE_SECONDS, retrying

CONNECT_SECONDS: Final = 10.0
"""taskiq restarts a worker that does not start, so an unreachable server should fail soon."""
STEP_SECONDS: Final = 5.0
"""For a write or read that a caller waits for: longer than electing a stream's leader."""

Servers = str | Sequence[str]
T = TypeVar("T")

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")


async def connect(
    servers: Servers,
    options: Mapping[str, Any],
    *,
    name: str,
    namespace: str = DEFAULT_NAMESPACE,
    check: bool = False,
) -> Broker:
    """Connect; `check` rejects a server that would silently ignore TTLs."""
    urls = [servers] if isinstance(servers, str) else list(servers)
    config = ConnectionConfig(
        nats_url=",".join(url if "://" in url else f"nats://{url}" for url in urls),
        namespace=namespace,
        connect_timeout_seconds=CONNECT_SECONDS,
    )
    broker = Broker(config, name=name, options=options)
    try:
        await broker.open(check=check)
    except NotConnected as error:  # the URL is the caller's, not one of our variables
        text = str(error).replace("set HOLDFAST_NATS_URL", "give another address (servers)")
        raise NotConnected(text) from None
    return broker


async def surely(
    broker: Broker, step: Callable[[], Awaitable[T]], what: str, seconds: float = STEP_SECONDS
) -> T:
    """Retry an idempotent step while a stream has no leader or the connection is down."""
    until = broker.closed.is_set
    return await retrying(step, clock=broker.clock, what=what, seconds=seconds, until=until)


class Connected:
    """Holds one connection between `startup` and `shutdown`."""

    _broker: Broker | None = None

    @property
    def connection(self) -> Broker:
        """The connection to NATS."""
        if self._broker is None:
            raise NotConnected(f"{type(self).__name__} is not started: await startup() first")
        return self._broker

    async def _open(
        self,
        prepare: Callable[[Broker], Awaitable[object]],
        servers: Servers,
        options: Mapping[str, Any],
        **given: Any,
    ) -> Broker:
        """Connect and prepare; disconnect again if that fails."""
        broker = self._broker = await connect(servers, options, **given)
        try:
            await surely(broker, lambda: prepare(broker), "starting", PATIENCE_SECONDS)
        except BaseException:
            await broker.close()
            raise
        return broker


def plain_name(text: str) -> str:
    """A task or stream as one of our names, for metrics and dead letters: `a.b:c` is `a_b_c`."""
    name = _NOT_IN_NAMES.sub("_", text).lstrip("_-")[-64:].lstrip("_-")
    return name or "unknown"
