"""Configuration from `UPTIME_…` variables, read on use.

Where NATS is, and everything else about Holdfast, is Holdfast's own configuration.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class ConfigError(ValueError):
    """A variable has an invalid value; the message says which, and what would be valid."""


@dataclass(frozen=True, slots=True)
class Config:
    """One process's configuration."""

    title: str = "Status"
    """What the status page is called."""
    allow_private: tuple[Network, ...] = ()
    """Networks that may be checked although they are not public, as 10.0.0.0/8."""
    shortest_interval: int = 10
    """Seconds between two checks of one target, at least."""
    results_kept: str = "1d"
    """How long every single result is kept; days and incidents are kept for 90 days."""
    cache_seconds: float = 3.0
    """How old the status page may be."""
    ca_file: str = ""
    """Certificates to trust besides the system's, as those of a private authority."""
    smtp_url: str = ""
    """The mail server: smtp://user:password@host:587 (with STARTTLS) or smtps://…"""
    smtp_plain: bool = False
    """Whether the password may go to a mail server without TLS."""
    mail_from: str = "uptime@localhost"
    token: str = ""
    """Who changes things shows this; needed off loopback."""
    hosts: tuple[str, ...] = ()
    """Names under which the pages are reached; others are refused."""
    proxies: str = ""
    """Addresses of proxies in front of the pages: their X-Forwarded-For is believed."""


def load(env: Mapping[str, str] | None = None) -> Config:
    """Load the configuration from the environment."""
    given = os.environ if env is None else env

    def text(name: str, default: str) -> str:
        return given.get(f"UPTIME_{name}", default).strip()

    default = Config()
    return Config(
        title=text("TITLE", default.title),
        allow_private=networks(text("ALLOW_PRIVATE", "")),
        shortest_interval=_number("SHORTEST_INTERVAL", text("SHORTEST_INTERVAL", "10")),
        results_kept=text("RESULTS_KEPT", default.results_kept),
        cache_seconds=_number("CACHE_SECONDS", text("CACHE_SECONDS", "3")),
        ca_file=text("CA_FILE", ""),
        smtp_url=text("SMTP_URL", ""),
        smtp_plain=text("SMTP_PLAIN", "").lower() in ("1", "yes", "true"),
        mail_from=text("MAIL_FROM", default.mail_from),
        token=text("TOKEN", ""),
        proxies=text("PROXIES", ""),
        hosts=tuple(part for part in _parts(text("HOSTS", "").lower())),
    )


def networks(text: str) -> tuple[Network, ...]:
    """Parse networks separated by commas."""
    found: list[Network] = []
    for part in _parts(text):
        try:
            found.append(ipaddress.ip_network(part))
        except ValueError:
            raise ConfigError(
                f"UPTIME_ALLOW_PRIVATE: {part!r} is no network: write 10.0.0.0/8 or 127.0.0.1"
            ) from None
    return tuple(found)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 86_400):
        raise ConfigError(f"UPTIME_{name} must be whole seconds from 1 to 86400, not {text!r}")
    return int(text)
