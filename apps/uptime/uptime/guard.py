"""The guard: which addresses a check may connect to.

A check is a request that somebody else wrote and that leaves from inside our network. So every name
is resolved here, *all* its addresses are checked, and the connection goes to a checked address: a
name cannot resolve differently between check and connection. Redirects come back here. Numeric
hosts (hex, octal, one big decimal) are resolved like names, by the same system function, so there
is no second interpretation.

* Never: link-local and metadata addresses, multicast, unspecified, reserved; also inside an
  address that carries another one (IPv4-mapped, NAT64); addresses of tunnels (6to4, Teredo,
  IPv4-compatible) at all. No configuration allows them.
* Only when configured: everything else that is not public, as 10.0.0.0/8 or 127.0.0.1.

Not covered: a public address that a firewall on the way maps to something private.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from uptime.config import Network

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Awaitable[list[str]]]

LONGEST_URL = 2_000
SCHEMES = ("http", "https")

_NEVER: tuple[Network, ...] = tuple(
    ipaddress.ip_network(n)
    for n in (
        "0.0.0.0/8",  # this host
        "169.254.0.0/16",  # link-local: the metadata of most clouds
        "100.100.100.200",  # metadata of Alibaba
        "168.63.129.16",  # Azure's own services
        "192.0.0.192",  # metadata of Oracle
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
        "::/96",  # unspecified, and IPv4-compatible; ::1 is handled before
        "64:ff9b:1::/48",  # network-specific NAT64: its target is unknown
        "2001::/32",  # Teredo
        "2002::/16",  # 6to4
        "fe80::/10",  # link-local
        "fec0::/10",  # site-local, deprecated
        "ff00::/8",  # multicast
        "fd00:ec2::254",  # metadata of AWS
        "fd20:ce::254",  # metadata of Google
        "fd00:42::42",  # metadata of Scaleway
    )
)
_NOT_PUBLIC: tuple[Network, ...] = tuple(
    ipaddress.ip_network(n)
    for n in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "3fff::/20")
)
_PUBLIC_V6 = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}")
_LOOPBACK_V6 = ipaddress.ip_address("::1")


class Refused(Exception):
    """This address or URL must not be connected to."""


_threads = ThreadPoolExecutor(64, "uptime-resolve")
"""The system's resolver blocks, perhaps for long: a few dead names must not stop the others."""


async def resolve_by_system(host: str, port: int) -> list[str]:
    """Every address of a name, from the system's resolver."""
    loop = asyncio.get_running_loop()
    look = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        found = await loop.run_in_executor(_threads, look)
    except (OSError, UnicodeError):
        raise Refused(f"the name {host} does not resolve") from None
    return list(dict.fromkeys(str(info[4][0]) for info in found))


@dataclass(frozen=True, slots=True)
class Guard:
    """Decides what may be connected to; `resolver` is for tests."""

    allow_private: tuple[Network, ...] = ()
    resolver: Resolver = resolve_by_system

    async def resolve(self, host: str, port: int) -> list[str]:
        """The addresses of a host, all checked; one refused address refuses the host."""
        found = await self.resolver(host, port)
        if not found:
            raise Refused(f"the name {host} has no address")
        return [self.judge(address, host) for address in found]

    def judge(self, text: str, host: str = "") -> str:
        """The address to connect to; raises `Refused`."""
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            raise Refused(f"{text!r} is no address") from None
        inner = _carried(address)
        shown = text if not host or host == text else f"{host} ({text})"
        if _is_never(inner):
            raise Refused(f"{shown} is a metadata, link-local or reserved address: never checked")
        if not _is_public(inner) and not any(inner in network for network in self.allow_private):
            raise Refused(f"{shown} is a private address: UPTIME_ALLOW_PRIVATE may allow it")
        return str(address) if address in _NAT64 else str(inner)


def _carried(address: Address) -> Address:
    """The IPv4 address embedded in an IPv6 one, else the address itself."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def _is_never(address: Address) -> bool:
    return address != _LOOPBACK_V6 and any(address in network for network in _NEVER)


def _is_public(address: Address) -> bool:
    if any(address in network for network in _NOT_PUBLIC):
        return False
    if isinstance(address, ipaddress.IPv6Address) and address not in _PUBLIC_V6:
        return False
    return address.is_global


def parse_url(text: str) -> httpx.URL:
    """Parse a URL that may be requested: http or https, a host, no credentials."""
    if len(text) > LONGEST_URL:
        raise Refused(f"the URL is longer than {LONGEST_URL:,} characters")
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, UnicodeError, ValueError):
        raise Refused("this is no URL: write https://example.org/path") from None
    if url.scheme not in SCHEMES:
        raise Refused(f"only http and https are checked, not {url.scheme or 'no scheme'!r}")
    if not url.host:
        raise Refused("the URL has no host: write https://example.org/path")
    _check_host(url)
    if url.userinfo:
        raise Refused("credentials do not belong into a URL: send an Authorization header")
    if url.port is not None and not 1 <= url.port <= 65_535:
        raise Refused(f"{url.port} is no port")
    return url


def _check_host(url: httpx.URL) -> None:
    host = url.raw_host.decode("ascii")
    if ":" not in host and not _HOST.fullmatch(host):
        raise Refused("the host is no name and no address")


def parse_place(text: str) -> tuple[str, int]:
    """Host and port of `example.org:443` or `[2001:db8::1]:443`."""
    try:
        url = httpx.URL(f"tcp://{text}")
    except (httpx.InvalidURL, UnicodeError, ValueError):
        url = httpx.URL("tcp://")
    whole = not url.userinfo and url.path in ("", "/") and not url.query and not url.fragment
    if not whole or not url.host or url.port is None or not 1 <= url.port <= 65_535:
        raise Refused("this is no host and port: write example.org:443")
    _check_host(url)
    return url.raw_host.decode("ascii"), url.port


def judge_number(guard: Guard, host: str, port: int) -> None:
    """Refuse early a host that is an address, in any notation; names are checked later."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return
    for info in found:
        guard.judge(str(info[4][0]), host)
