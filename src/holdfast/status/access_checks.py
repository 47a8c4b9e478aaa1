"""Checks of the way in: who we are to the server, and who could listen on the way."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from holdfast.config import ConnectionConfig
from holdfast.identity import load_credentials
from holdfast.status.checkup import Finding, Site

_LOCAL: Final = ("127.", "localhost", "::1")


async def encryption(site: Site) -> list[Finding]:
    """What travels in the clear can be read, and logins with it."""
    if site.broker.encrypted:
        return [Finding("encryption", "ok", "the connection uses TLS")]
    if is_local(site.broker.config):
        return [Finding("encryption", "ok", "no TLS, and the connection stays on this machine")]
    text = "no TLS: payloads and passwords can be read on the way"
    todo = "give the server a certificate and write tls:// in nats_url (see docs/security.md)"
    return [Finding("encryption", "warn", text, todo)]


async def login(site: Site) -> list[Finding]:
    """A server that asks for no login lets everybody do everything."""
    config = site.broker.config
    if not site.broker.asks_login:
        local = is_local(config)
        text = "the server asks for no login: whoever reaches it may do everything"
        todo = "make users with 'holdfast auth init', and start the server with its auth.conf"
        return [Finding("login", "ok" if local else "warn", text, "" if local else todo)]
    if config.credentials_file:
        found = load_credentials(config.credentials_file)
        return [Finding("login", "ok", f"logged in as {found.user} (role {found.role})")]
    if config.user or config.token or "@" in config.nats_url:
        text = "logged in with a password or token, which the server's configuration holds as well"
        todo = "use a key that never leaves this machine: 'holdfast auth user ROLE'"
        return [Finding("login", "warn", text, "" if is_local(config) else todo)]
    return [Finding("login", "ok", "logged in with a key")]


def is_local(config: ConnectionConfig) -> bool:
    """Whether every server is on this machine."""
    hosts = [urlsplit(url).hostname or "" for url in config.servers]
    return all(host.startswith(_LOCAL) for host in hosts)
