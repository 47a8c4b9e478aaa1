"""Sending notices: by webhook or mail.

Both carry the notice's id, so that a receiver detects a repeat: the sender died after sending and
before recording it. `Idempotency-Key` is for programs, `Message-ID` for mail.

Webhooks go through the guard, as checks do: their URLs are user input too. The mail server is
verified by its certificate; one that offers no TLS gets no password, unless configured.
"""

from __future__ import annotations

import asyncio
import json
import smtplib
import ssl
from dataclasses import asdict
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import parseaddr
from urllib.parse import SplitResult, unquote, urlsplit

from uptime.config import Config, ConfigError
from uptime.fetching import fetch
from uptime.guard import Guard
from uptime.probes import trust
from uptime.record import Notice

WEBHOOK_SECONDS = 15.0  # a slow receiver must not hold a worker; it is retried
MAIL_SECONDS = 20.0


class NotDelivered(Exception):
    """The receiver did not accept it; it is retried."""


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


async def webhook(url: str, notice: Notice, attempt: int, config: Config) -> None:
    """POST it as JSON; any status but 2xx is a failure."""
    body = {"id": notice.id, "told": notice.told, "text": subject(notice)}
    content = json.dumps(body | {"incident": asdict(notice.incident)}).encode()
    headers = {
        "Content-Type": "application/json",
        "Idempotency-Key": notice.id,
        "Uptime-Attempt": str(attempt),
    }
    async with asyncio.timeout(WEBHOOK_SECONDS):
        answer = await fetch(
            Guard(config.allow_private),
            url,
            trust=trust(config.ca_file),
            method="POST",
            headers=headers,
            content=content,
            limit=1_024,
        )
    if not 200 <= answer.status < 300:
        raise NotDelivered(f"the webhook answered HTTP {answer.status}")


async def mail(address: str, notice: Notice, config: Config) -> None:
    """Send it as mail, in a thread because the library blocks."""
    message = letter(address, notice, config)
    await asyncio.to_thread(_send, message, config)


def letter(address: str, notice: Notice, config: Config) -> EmailMessage:
    """The mail."""
    incident = notice.incident
    message = EmailMessage()
    message["Subject"] = subject(notice)
    message["From"] = config.mail_from
    message["To"] = address
    domain = parseaddr(config.mail_from)[1].partition("@")[2] or "localhost"
    message["Message-ID"] = f"<{notice.id}@{domain}>"
    message["Auto-Submitted"] = "auto-generated"
    lines = [
        subject(notice),
        "",
        f"Since:    {_moment(incident.started)}",
        *([f"Until:    {_moment(incident.ended)}"] if incident.ended else []),
        *([f"Reason:   {incident.reason}"] if incident.reason else []),
        f"Incident: {incident.id}",
    ]
    message.set_content("\n".join(lines) + "\n")
    return message


def _send(message: EmailMessage, config: Config) -> None:
    url = urlsplit(config.smtp_url)
    if url.scheme not in ("smtp", "smtps") or not url.hostname:
        raise ConfigError("UPTIME_SMTP_URL is not set: write smtp://user:password@host:587")
    with _connected(url, trust(config.ca_file)) as server:
        server.ehlo()
        secure = url.scheme == "smtps" or server.has_extn("starttls")
        if url.username and not secure and not config.smtp_plain:
            raise NotDelivered(
                f"{url.hostname} offers no TLS, so it is not given the password: use a server that "
                "does, or set UPTIME_SMTP_PLAIN=yes if nobody can listen in"
            )
        if secure and url.scheme == "smtp":
            server.starttls(context=trust(config.ca_file))
            server.ehlo()
        if url.username:
            server.login(unquote(url.username), unquote(url.password or ""))
        server.send_message(message)


def _connected(url: SplitResult, context: ssl.SSLContext) -> smtplib.SMTP:
    """Connect to the mail server; with smtps, verify its certificate."""
    host = url.hostname or ""
    if url.scheme == "smtps":
        return smtplib.SMTP_SSL(host, url.port or 465, timeout=MAIL_SECONDS, context=context)
    return smtplib.SMTP(host, url.port or 25, timeout=MAIL_SECONDS)
