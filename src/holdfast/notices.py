"""Sending notices: to a webhook, a Slack-compatible webhook, or by mail.

This protocol sends each notice once. Alerts and programs such as the uptime monitor share it:

1. Whoever decides that a notice is due writes it into an outbox, in the same compare-and-swap as
   the decision. Of any number of processes, one wins.
2. The notice is sent under an id that follows from the decision, and then taken out of the outbox
   (`unsent`).

A process that dies between sending and taking it out leaves a notice that is sent again, under the
same id: `Idempotency-Key` is for programs, `Message-ID` for mail. That repeat is the one thing that
cannot be ruled out, because the receiver is not part of the compare-and-swap.

The mail server is verified by its certificate; one that offers no TLS gets no password, unless that
is allowed.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import smtplib
import ssl
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from email.message import EmailMessage
from email.utils import parseaddr
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

__all__ = [
    "MailServer",
    "Message",
    "NotDelivered",
    "letter",
    "mail",
    "post",
    "slack_body",
    "unsent",
    "webhook_body",
    "webhook_headers",
]

POST_SECONDS: Final = 15.0
"""Timeout of a webhook: a slow receiver must not delay the others, and is retried."""
MAIL_SECONDS: Final = 20.0
"""Timeout of mail servers, which often delay their greeting by some seconds, against spam."""


class NotDelivered(Exception):
    """The receiver did not accept a notice; try again later."""


@dataclass(frozen=True, slots=True)
class Message:
    """A notice as it is sent."""

    id: str
    """The same at every repeat, so that a receiver detects them."""
    subject: str
    """The notice in one line."""
    lines: tuple[str, ...] = ()
    """The body of a mail."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further members of the JSON that a webhook gets."""


@dataclass(frozen=True, slots=True)
class MailServer:
    """A mail server for outgoing mail."""

    url: str
    """`smtp://user:password@host:587` (with STARTTLS if offered) or `smtps://…`."""
    sender: str
    plain: bool = False
    """Whether the password may go to a server without TLS."""
    trust: ssl.SSLContext | None = None
    """Certificates to trust; the system's without it."""


class _Identified(Protocol):
    @property
    def id(self) -> str: ...


N = TypeVar("N", bound=_Identified)


def unsent(outbox: Iterable[N], sent: Collection[_Identified]) -> tuple[N, ...]:
    """The outbox without the notices that were sent."""
    ids = {notice.id for notice in sent}
    return tuple(notice for notice in outbox if notice.id not in ids)


# ---- webhooks


def webhook_body(message: Message) -> bytes:
    """The JSON for a webhook: `id`, `text` and the facts."""
    return json.dumps({"id": message.id, "text": message.subject, **message.facts}).encode()


def slack_body(message: Message) -> bytes:
    """The JSON that Slack, Mattermost, Rocket.Chat and Discord's `/slack` address accept."""
    text = "\n".join((f"*{_plain(message.subject)}*", *map(_plain, message.lines)))
    return json.dumps({"text": text}).encode()


def _plain(text: str) -> str:
    """Text without Slack's control characters, which could mention people or hide links."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def webhook_headers(message: Message) -> dict[str, str]:
    """The headers of a webhook."""
    return {"Content-Type": "application/json", "Idempotency-Key": message.id}


async def post(url: str, message: Message, body: bytes, trust: ssl.SSLContext | None) -> None:
    """POST it, in a thread because the library blocks; any status but 2xx is a failure."""
    request = urllib.request.Request(url, body, webhook_headers(message), method="POST")
    await asyncio.to_thread(_post, request, trust)


def _post(request: urllib.request.Request, trust: ssl.SSLContext | None) -> None:
    context = trust or ssl.create_default_context()
    opener = urllib.request.build_opener(
        urllib.request.HTTPSHandler(context=context), _NoRedirect()
    )
    try:
        with opener.open(request, timeout=POST_SECONDS):
            pass
    except urllib.error.HTTPError as error:
        error.close()
        raise NotDelivered(f"the webhook answered HTTP {error.code}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise NotDelivered(f"the webhook cannot be reached: {reason}") from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST arrives as a GET without its body: it counts as a failure instead."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


# ---- mail


async def mail(message: Message, to: str, server: MailServer) -> None:
    """Send it as mail, in a thread because the library blocks."""
    await asyncio.to_thread(_send, letter(message, to, server.sender), server)


def letter(message: Message, to: str, sender: str) -> EmailMessage:
    """The mail."""
    mail = EmailMessage()
    mail["Subject"] = message.subject
    mail["From"] = sender
    mail["To"] = to
    domain = parseaddr(sender)[1].partition("@")[2] or "localhost"
    mail["Message-ID"] = f"<{message.id}@{domain}>"
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content("\n".join((message.subject, "", *message.lines)) + "\n")
    return mail


def _send(message: EmailMessage, mail_server: MailServer) -> None:
    url = urlsplit(mail_server.url)
    trust = mail_server.trust or ssl.create_default_context()
    with _connected(url, trust) as server:
        server.ehlo()
        secure = url.scheme == "smtps" or server.has_extn("starttls")
        if url.username and not secure and not mail_server.plain:
            raise NotDelivered(f"{url.hostname} offers no TLS, so it is not given the password")
        if secure and url.scheme == "smtp":
            server.starttls(context=trust)
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
