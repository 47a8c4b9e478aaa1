"""What a shell offers when somebody presses Tab: jobs, runs, schedules, nodes and other names.

The server is asked for the names, within a second. If it does not answer, nothing is offered and
nothing is printed: that would disturb the line that is being typed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.status.operators import Operator

PATIENCE_SECONDS = 1.0
"""A person waits for it."""
MOST = 200
"""Runs that are offered: more do not fit on a screen."""


def offers(kind: str, ctx: Any, incomplete: str) -> list[str]:
    """The names of a kind that begin with the word that is being typed."""
    from holdfast.status.listing import STATES

    logging.disable()
    with contextlib.suppress(Exception):  # no names are better than a traceback in a prompt
        found = STATES if kind == "states" else asyncio.run(_asked(kind, ctx, incomplete))
        return sorted({name for name in found if name.startswith(incomplete)})
    return []


def _connection(ctx: Any) -> dict[str, Any]:
    """The connection options that are already on the line."""
    given: dict[str, Any] = {}
    while ctx is not None:
        given = {k: v for k, v in ctx.params.items() if v is not None} | given
        ctx = ctx.parent
    names = {"nats_url": "nats_url", "namespace": "namespace", "credentials_file": "credentials"}
    return {field: given[option] for field, option in names.items() if given.get(option)}


async def _asked(kind: str, ctx: Any, incomplete: str) -> list[str]:
    from holdfast.broker import Broker
    from holdfast.client import Client
    from holdfast.config import ConnectionConfig, RecordConfig, load
    from holdfast.status.operators import Operator

    given = {**_connection(ctx), "connect_timeout_seconds": PATIENCE_SECONDS}
    async with asyncio.timeout(PATIENCE_SECONDS):
        async with Broker(load(ConnectionConfig, **given), name="holdfast tab") as broker:
            return await _names(kind, Operator(Client(broker, load(RecordConfig))), incomplete)


async def _names(kind: str, by: Operator, incomplete: str) -> list[str]:
    from holdfast.names import parse_consumer
    from holdfast.status.listing import RunFilter

    match kind:
        case "runs":
            found = await by.runs.list(RunFilter(prefix=incomplete), MOST)
            return [run.run for run in found]
        case "flows":
            return [flow.run for flow in await by.flows.list(limit=MOST)]
        case "fleet":
            return [run.run for run in await by.fleet.list(most=MOST)]
        case "dead":
            return [str(letter.id) for letter in await by.dead.list(limit=MOST)]
        case "schedules":
            return [schedule.name for schedule in await by.schedules.list()]
        case "limits":
            return [limit.name for limit in await by.limits.list()]
        case "nodes":
            return [node.id for node in await by.nodes.list()]
        case "agents":
            return [agent.id for agent in await by.agents.list("*")]
    known = await by.client.topology.consumers(by.client.broker.names.jobs)
    homes = [home for one in known if (home := parse_consumer(one.get("name", "")))]
    return [group if kind == "groups" else job for group, job in homes]
