"""The guard: what no check connects to, in whatever way it is written."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uptime.config import networks
from uptime.guard import Guard, Refused, judge_number, parse_place, parse_url, resolve_by_system

EVERYTHING = networks("0.0.0.0/0,::/0")
NEVER = [
    "169.254.169.254",
    "169.254.170.2",
    "0.0.0.0",
    "0.1.2.3",
    "255.255.255.255",
    "224.0.0.1",
    "240.0.0.1",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "::",
    "::a9fe:a9fe",
    "::ffff:169.254.169.254",
    "::ffff:a9fe:a9fe",
    "64:ff9b::169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "2002:a9fe:a9fe::",
    "2002:7f00:1::",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "fe80::1",
    "fe80::1%lo",
    "fec0::1",
    "ff02::1",
    "fd00:ec2::254",
    "fd20:ce::254",
]
PRIVATE = [
    "127.0.0.1",
    "127.1.2.3",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "192.0.0.8",
    "192.0.2.1",
    "198.18.0.1",
    "203.0.113.1",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::10.0.0.1",
    "64:ff9b::7f00:1",
    "fc00::1",
    "fd12:3456::1",
    "2001:db8::1",
    "3fff::1",
    "4000::1",
    "100::1",
]
PUBLIC = ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "64:ff9b::1.1.1.1"]


@pytest.mark.parametrize("address", NEVER)
def test_guard_never_allows_metadata(address: str) -> None:
    """Not even when everything is allowed."""
    with pytest.raises(Refused, match="never"):
        Guard(EVERYTHING).judge(address)


@pytest.mark.parametrize("address", PRIVATE)
def test_guard_allows_private_only_when_told(address: str) -> None:
    """Private, loopback, shared, documentation: refused, until somebody allows them."""
    with pytest.raises(Refused, match="private"):
        Guard().judge(address)
    assert Guard(EVERYTHING).judge(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_guard_allows_public(address: str) -> None:
    """What is public may be checked."""
    assert ipaddress.ip_address(Guard().judge(address)) == ipaddress.ip_address(address)


def test_guard_allows_a_network_and_no_other() -> None:
    """An allowed network says nothing about its neighbours."""
    guard = Guard(networks("10.1.0.0/16"))
    assert guard.judge("10.1.2.3") == "10.1.2.3"
    assert guard.judge("::ffff:10.1.2.3") == "10.1.2.3", "a mapped address is connected as IPv4"
    with pytest.raises(Refused):
        guard.judge("10.2.0.1")


@given(st.ip_addresses(v=4))
def test_guard_judges_a_carried_address_as_itself(address: ipaddress.IPv4Address) -> None:
    """Whatever IPv4 address is refused is refused inside IPv6 too; allowed likewise."""

    def verdict(text: str) -> bool:
        try:
            return bool(Guard().judge(text))
        except Refused:
            return False

    plain = verdict(str(address))
    assert verdict(f"::ffff:{address}") == plain
    assert verdict(str(ipaddress.ip_address((0x64FF9B << 96) | int(address)))) == plain
    assert not verdict(str(ipaddress.ip_address((0x2002 << 112) | (int(address) << 80))))


@given(st.ip_addresses(v=6))
def test_guard_knows_no_public_address_outside_2000(address: ipaddress.IPv6Address) -> None:
    """An IPv6 address is public only where addresses are given out to the world."""
    if address in ipaddress.ip_network("2000::/3") or address.ipv4_mapped:
        return
    if address in ipaddress.ip_network("64:ff9b::/96"):
        return
    with pytest.raises(Refused):
        Guard().judge(str(address))


LOOPBACK_FORMS = [
    *("127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.1", "0x7f.0.0.1", "017700000001"),
    *("0177.0.0.1", "0177.1", "127.0.1", "localhost"),
]
METADATA_FORMS = [
    *("2852039166", "0xa9fea9fe", "0xa9.0xfe.0xa9.0xfe", "0251.0376.0251.0376", "169.254.43518"),
    *("025177524776",),
]


@pytest.mark.parametrize("host", LOOPBACK_FORMS)
async def test_guard_reads_numbers_as_the_system_does(host: str) -> None:
    """Hex, octal, one decimal, short forms: resolved, and refused for what they are."""
    with pytest.raises(Refused, match="private"):
        await Guard().resolve(host, 80)


@pytest.mark.parametrize("host", METADATA_FORMS)
async def test_guard_reads_metadata_in_every_notation(host: str) -> None:
    """The metadata address too, also when everything is allowed, and already when it is stored."""
    with pytest.raises(Refused, match="never"):
        await Guard(EVERYTHING).resolve(host, 80)
    with pytest.raises(Refused, match="never"):
        judge_number(Guard(EVERYTHING), host, 80)


async def test_guard_refuses_a_name_with_one_bad_address() -> None:
    """All addresses are judged: one that is private refuses the name."""

    async def resolver(host: str, port: int) -> list[str]:
        return ["93.184.216.34", "10.0.0.1"]

    with pytest.raises(Refused, match=r"rebind.example \(10.0.0.1\)"):
        await Guard(resolver=resolver).resolve("rebind.example", 80)


async def test_guard_tells_a_name_that_does_not_resolve() -> None:
    """A failed look-up is a refusal with a sentence, whatever the name."""
    for host in ("does-not-exist.invalid", "a" * 300, "ex\x00ample"):
        with pytest.raises(Refused, match="resolve"):
            await resolve_by_system(host, 80)

    async def nothing(host: str, port: int) -> list[str]:
        return []

    with pytest.raises(Refused, match="no address"):
        await Guard(resolver=nothing).resolve("empty.example", 80)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.org/",
        "file:///etc/passwd",
        "gopher://127.0.0.1:6379/_FLUSHALL",
        "javascript:alert(1)",
        "data:text/html,x",
        "//example.org/",
        "example.org",
        "http://",
        "http:///path",
        "http://user@example.org/",
        "http://user:secret@example.org/",
        "http://:secret@example.org/",
        "http://example.org:0/",
        "http://example.org:99999/",
        "http://[::1/",
        "http://exa mple.org/",
        "https://" + "a" * 2_000 + ".org/",
    ],
)
def test_url_that_is_refused(url: str) -> None:
    """Other schemes, credentials, no host, nonsense."""
    with pytest.raises(Refused):
        parse_url(url)


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:70000", "a@b:80"])
def test_place_that_is_refused(text: str) -> None:
    """A host and a port, and nothing else."""
    with pytest.raises(Refused):
        parse_place(text)


def test_place_takes_names_and_addresses() -> None:
    """Names, also with umlauts, and both kinds of addresses."""
    assert parse_place("example.org:443") == ("example.org", 443)
    assert parse_place("[2606:4700::1]:443") == ("2606:4700::1", 443)
    assert parse_place("bücher.example:25") == ("xn--bcher-kva.example", 25)
    for text in ("host:80/path", "host:80?x", "host:80#x"):
        with pytest.raises(Refused):
            parse_place(text)
