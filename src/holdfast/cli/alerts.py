"""`holdfast alerts`: what fires, which notices were sent, and whether the channels work."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import typer

from holdfast.cli import out
from holdfast.cli.command import command, connected

if TYPE_CHECKING:
    from holdfast.notices import Message
    from holdfast.status.alerts import Alerting, AlertsInfo, Channel


@command("alerts list")
async def list_alerts() -> None:
    """List the alerts that fire or are about to, the rules, and the notices that were sent."""
    from holdfast.status.alerts import alerts

    async with connected() as client:
        found = await alerts(client.broker)
        now = client.broker.server_now()
    if not out.as_json(found):
        _print(found, now)


def _print(found: AlertsInfo, now: float) -> None:
    def ago(at: float) -> str:
        return f"{out.age(round(now - at))} ago"

    if not found.rules:
        out.say("no rules are evaluated: set alerts.rules where 'holdfast control' runs")
        return
    if found.late:
        out.say(f"no rule was evaluated since {ago(found.at)}: is 'holdfast control' running?")
    rows = [("firing", one.rule, one.text, ago(one.since)) for one in found.firing]
    rows += [("pending", one.rule, one.text, ago(one.since)) for one in found.pending]
    out.table(("state", "rule", "alert", "since"), rows, empty="nothing fires")
    for kind, why in found.unread.items():
        out.say(f"{kind} could not be evaluated: {why}")
    out.block(f"\nrules: {'; '.join(found.rules)}")
    out.block(f"channels: {', '.join(found.channels) or 'none'}\n")
    notices = sorted([*found.waiting, *found.told], key=lambda one: -one.at)[:20]
    told = [(n.told, ago(n.at), n.text, ", ".join([*n.left, *n.failed])) for n in notices]
    out.table(("notice", "at", "text", "not sent to"), told, empty="no notice was sent yet")


@command("alerts test")
async def test() -> None:
    """Send a test notice to every channel, from this host and with its configuration.

    Exit code 1 if a channel did not accept it.
    """
    from holdfast.config import AlertsConfig, load
    from holdfast.notices import Message
    from holdfast.status.alerts import Alerting

    alerting = Alerting.of(load(AlertsConfig))
    if not alerting.channels:
        out.say("no channels are configured: set alerts.channels")
        raise typer.Exit(1)
    text = "Holdfast can reach you: this is a test"
    message = Message(f"test.{time.time_ns()}", text, (), {"told": "test"})
    outcomes = await asyncio.gather(*(_try(alerting, c, message) for c in alerting.channels))
    rows = [
        {"channel": channel.name, "error": error}
        for channel, error in zip(alerting.channels, outcomes, strict=True)
    ]
    if not out.as_json(rows):
        out.table(("channel", "outcome"), [(r["channel"], r["error"] or "accepted") for r in rows])
    if any(outcomes):
        raise typer.Exit(1)


async def _try(alerting: Alerting, channel: Channel, message: Message) -> str:
    from holdfast.notices import NotDelivered

    try:
        await alerting.send(channel, message)
    except NotDelivered as error:
        return str(error) or "not delivered"
    return ""
