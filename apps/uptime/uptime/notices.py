"""Sending notices: by webhook or mail.

`holdfast.notices` says how a notice is told once, and sends mail. Webhooks go through the guard, as
checks do: their URLs are user input too.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from datetime import UTC, datetime
from urllib.parse import urlsplit

from holdfast.notices import MailServer, Message, NotDelivered, webhook_body, webhook_headers
from holdfast.notices import mail as send_mail
from uptime.config import Config, ConfigError
from uptime.fetching import fetch
from uptime.guard import Guard
from uptime.probes import trust
from uptime.record import Notice

WEBHOOK_SECONDS = 15.0  # a slow receiver must not hold a worker; it is retried


def subject(notice: Notice) -> str:
    """The notice in one line."""
    incident = notice.incident
    if notice.told == "opened":
        return f"{incident.name} is {incident.status}"
    return f"{incident.name} has recovered ({incident.status} for {_lasted(notice)})"


def _lasted(notice: Notice) -> str:
    seconds = max(0, notice.incident.ended - notice.incident.started)
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest if not hours else 0, "s")]
    return " ".join(f"{n} {unit}" for n, unit in parts if n) or "0 s"


def _moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def message(notice: Notice) -> Message:
    """A notice as it is sent."""
    incident = notice.incident
    lines = (
        f"Since:    {_moment(incident.started)}",
        *([f"Until:    {_moment(incident.ended)}"] if incident.ended else []),
        *([f"Reason:   {incident.reason}"] if incident.reason else []),
        f"Incident: {incident.id}",
    )
    facts = {"told": notice.told, "incident": asdict(incident)}
    return Message(notice.id, subject(notice), lines, facts)


async def webhook(url: str, notice: Notice, attempt: int, config: Config) -> None:
    """POST it as JSON; any status but 2xx is a failure."""
    sent = message(notice)
    async with asyncio.timeout(WEBHOOK_SECONDS):
        answer = await fetch(
            Guard(config.allow_private),
            url,
            trust=trust(config.ca_file),
            method="POST",
            headers=webhook_headers(sent) | {"Uptime-Attempt": str(attempt)},
            content=webhook_body(sent),
            limit=1_024,
        )
    if not 200 <= answer.status < 300:
        raise NotDelivered(f"the webhook answered HTTP {answer.status}")


async def mail(address: str, notice: Notice, config: Config) -> None:
    """Send it as mail."""
    url = urlsplit(config.smtp_url)
    if url.scheme not in ("smtp", "smtps") or not url.hostname:
        raise ConfigError("UPTIME_SMTP_URL is not set: write smtp://user:password@host:587")
    server = MailServer(config.smtp_url, config.mail_from, config.smtp_plain, trust(config.ca_file))
    try:
        await send_mail(message(notice), address, server)
    except NotDelivered as error:
        raise NotDelivered(
            f"{error}: use a server that does, or set UPTIME_SMTP_PLAIN=yes if nobody can listen in"
        ) from None
