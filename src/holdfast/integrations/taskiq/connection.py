"""How the arguments of taskiq-nats become a connection of ours.

`servers` and the keyword arguments are those of the NATS client; its callbacks are called as
before, beside our own. What is fixed: nothing is buffered while disconnected, since a message that
leaves minutes later may act on something that has changed hands.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from holdfast.broker import Broker
from holdfast.config import ConnectionConfig
from holdfast.errors import NotConnected, OutcomeUnknown, Unavailable
from holdfast.names import DEFAULT_NAMESPACE

CONNECT_SECONDS: Final = 10.0
PATIENCE_SECONDS: Final = 30.0
PAUSE_SECONDS: Final = 0.1

Servers = str | Sequence[str]
T = TypeVar("T")


async def connect(
    servers: Servers,
    options: Mapping[str, Any],
    *,
    name: str,
    namespace: str = DEFAULT_NAMESPACE,
    check: bool = False,
) -> Broker:
    """Connect; `check` refuses a server that would silently ignore TTLs."""
    urls = [servers] if isinstance(servers, str) else list(servers)
    config = ConnectionConfig(
        nats_url=",".join(url if "://" in url else f"nats://{url}" for url in urls),
        namespace=namespace,
        connect_timeout_seconds=CONNECT_SECONDS,
    )
    broker = Broker(config, name=name, options=options)
    try:
        await broker.open(check=check)
    except NotConnected as error:  # the address is the caller's, and in no variable of ours
        text = str(error).replace("set HOLDFAST_NATS_URL", "give another address (servers)")
        raise NotConnected(text) from None
    return broker


async def patiently(
    broker: Broker, step: Callable[[], Awaitable[T]], seconds: float = PATIENCE_SECONDS
) -> T:
    """Do what may be done again, while streams have no leader or the connection is away."""
    deadline = broker.clock.monotonic() + seconds
    while True:
        try:
            return await step()
        except (NotConnected, Unavailable, OutcomeUnknown):
            if broker.clock.monotonic() > deadline or broker.closed.is_set():
                raise
            await broker.clock.sleep(PAUSE_SECONDS)
