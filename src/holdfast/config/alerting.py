"""Alerts of the control plane: the rules, and who is notified."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.config.option import RoleConfig, option
from holdfast.errors import ConfigError


@dataclass(frozen=True, repr=False)
class AlertsConfig(RoleConfig):
    """Alerts of `holdfast control` (or `holdfast coordinator`): the rules, and who is notified."""

    table = "alerts"

    rules: str = option("")
    """Rules, one to a line or separated by semicolons, e.g. `lag > 1000 for 5m; dead_letters > 0`.
    Without rules, nothing is watched."""
    channels: str = option("", secret=True)
    """Where to send notices, one to a line or separated by semicolons: `mail ADDRESS`, `webhook
    URL`, or `slack URL` for Slack and compatible receivers."""
    smtp_url: str = option("", secret=True)
    """Mail server for `mail` channels: `smtp://user:password@host:587` (STARTTLS if offered) or
    `smtps://…`."""
    smtp_plain: str = option("no", choices=("yes", "no"))
    """Whether the password may be sent to a mail server without TLS."""
    mail_from: str = option("holdfast@localhost")
    """Sender of mails."""
    ca_file: str = option("")
    """Certificates to trust instead of the system's, for webhooks and mail."""
    pages_url: str = option("")
    """Address of the pages, e.g. `https://jobs.example.org`; notices then link to them."""
    every_seconds: float = option(10.0, least=0.1, most=3600)
    """How often the rules are evaluated. Another control process takes over after three times
    this."""
    clear_seconds: float = option(60.0, least=0, most=86_400)
    """How long a rule must be false before its alert ends, so that one that comes and goes sends
    one notice."""

    def _check_relations(self) -> None:
        if self.pages_url and not self.pages_url.startswith(("http://", "https://")):
            raise ConfigError(f"pages_url must start with http:// or https://: {self.pages_url!r}")
