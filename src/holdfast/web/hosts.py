"""Names: which of them this process answers to, and whose page a request comes from.

An address cannot be made to point elsewhere; a name can, by whoever owns it. So addresses are known
by themselves, and names only when they are ours.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

from holdfast.errors import ConfigError

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
PORTS: Final = {"http": 80, "https": 443}


class Hosts:
    """The names that this process answers to."""

    def __init__(self, given: str, bound: str) -> None:
        self._given = [name.strip().lower() for name in given.split(",") if name.strip()]
        self._own = {*LOOPBACK, bound.lower(), socket.gethostname().lower()} - {""}
        for name in self._given:
            if "/" in name or (":" in name and not name.startswith("[")):
                raise ConfigError(f"web.hosts: {name!r} must be a name without scheme and port")

    def known(self, host: str) -> bool:
        """Whether a Host header names this process."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if not name or any(c in host for c in "/\\?#@ "):
            return False
        return name in self._own or is_address(name) or any(_fits(name, g) for g in self._given)


def source_of(address: str) -> str:
    """Whom an address stands for in a limit: itself, or the /64 around it, which one owner has."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 4:
        return address
    inner = found.ipv4_mapped
    return str(inner) if inner else str(ipaddress.ip_network((found, 64), strict=False))


def is_address(name: str) -> bool:
    """Whether a host is an IP address: no name server can let that point elsewhere."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _fits(name: str, given: str) -> bool:
    if given.startswith("*."):
        return name.endswith(given[1:])
    return given == "*" or name == given


def same_origin(origin: str, host: str) -> bool:
    """Whether an Origin is the host that was asked; the scheme may have ended at a proxy."""
    try:
        parts = urlsplit(origin)
        if parts.scheme not in PORTS or not parts.hostname:
            return False
        own = urlsplit(f"{parts.scheme}://{host}")
        usual = PORTS[parts.scheme]
        return (parts.hostname, parts.port or usual) == (own.hostname, own.port or usual)
    except ValueError:
        return False
