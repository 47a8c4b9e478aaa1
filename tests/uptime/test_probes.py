"""Looking at real servers, good ones and others: a failure is a result, and always in time."""

from __future__ import annotations

import asyncio
import ssl
import zlib
from typing import Any

import pytest
from uptime.check import Check
from uptime.config import networks
from uptime.fetching import fetch
from uptime.guard import Guard, Refused
from uptime.probes import Outcome, look, trust

from tests.uptime.conftest import Authority
from tests.uptime.servers import serving
from tests.uptime.sites import Website, response

LOCAL = Guard(networks("127.0.0.1,::1"))


def check(target: str, **members: Any) -> Check:
    return Check(id="it", name="It", target=target, **{"timeout": 5, "interval": 60, **members})


def saying(answer: bytes) -> Any:
    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    return handler


async def seen(answer: bytes, **members: Any) -> Outcome:
    async with serving(saying(answer)) as port:
        return await look(check(f"http://127.0.0.1:{port}/", **members), LOCAL)


# ---- HTTP


@pytest.mark.parametrize(
    ("members", "verdict", "detail"),
    [
        ({}, "ok", "HTTP 200"),
        ({"status": "204,300-399"}, "failed", "HTTP 200, not 204,300-399"),
        ({"contains": "well"}, "ok", "HTTP 200"),
        ({"contains": "ill"}, "failed", "does not contain 'ill'"),
        ({"lacks": "well"}, "failed", "contains 'well'"),
        ({"lacks": "error"}, "ok", "HTTP 200"),
        ({"expect_headers": {"X-Version": "7"}}, "ok", "HTTP 200"),
        ({"expect_headers": {"X-Version": "8"}}, "failed", "header X-Version"),
        ({"expect_headers": {"X-Other": ""}}, "failed", "header X-Other"),
        ({"method": "HEAD"}, "ok", "HTTP 200"),
    ],
)
async def test_http_expectations(members: dict[str, Any], verdict: str, detail: str) -> None:
    """Status, body and headers, each as it is expected."""
    found = await seen(response(200, b"all is well", X_Version="1.7"), **members)
    assert (found.verdict, found.code) == (verdict, 200 if verdict == "ok" else 0)
    assert detail in found.detail


async def test_http_slow_answer_is_degraded() -> None:
    """Good, and too slow."""
    async with Website() as site:
        await site.become("slow")
        found = await look(check(site.url, slow_ms=200), LOCAL)
    assert found.verdict == "degraded"
    assert "slow" in found.detail


async def test_http_nobody_there_is_a_failure() -> None:
    """A closed port, and a private one that nobody allowed."""
    async with Website() as site:
        await site.become("away")
        found = await look(check(site.url), LOCAL)
        assert (found.verdict, found.detail) == ("failed", "connection refused")
        found = await look(check(site.url), Guard())
        assert found.verdict == "failed"
        assert "UPTIME_ALLOW_PRIVATE" in found.detail
        assert site.asked == 0


async def test_http_asks_under_the_name_with_the_pinned_address() -> None:
    """The name stays in the Host header, the address is the judged one, the own headers arrive."""
    heads = []

    async def resolver(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        writer.write(response(200))

    async with serving(handler) as port:
        guard = Guard(networks("127.0.0.1"), resolver)
        target = f"http://shop.example:{port}/a?b=c"
        found = await look(check(target, headers={"Authorization": "Bearer x"}), guard)
    assert found.verdict == "ok"
    assert heads[0].startswith("GET /a?b=c HTTP/1.1\r\n")
    lines = {line.lower() for line in heads[0].splitlines()}
    assert f"host: shop.example:{port}" in lines
    assert "authorization: bearer x" in lines
    assert "accept-encoding: identity" in lines


async def test_http_goes_on_to_the_next_address() -> None:
    """A name with an address that does not answer is asked at its next one; IPv6 works, too."""
    heads = []

    async def resolver(host: str, port: int) -> list[str]:
        return ["127.0.0.1", "::1"]

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        writer.write(response(200))

    guard = Guard(networks("127.0.0.1,::1"), resolver)
    async with serving(handler, host="::1") as port:
        assert (await look(check(f"http://both.example:{port}/"), guard)).verdict == "ok"
        assert (await look(check(f"http://[::1]:{port}/"), LOCAL)).verdict == "ok"
        assert (await look(check(f"both.example:{port}", kind="tcp"), guard)).verdict == "ok"
    assert f"host: both.example:{port}" in heads[0].lower()
    assert f"host: [::1]:{port}" in heads[1].lower()


async def test_http_rebinding_name_is_not_asked_twice() -> None:
    """A name that answers differently the second time has no second time."""
    answers = iter([["127.0.0.1"], ["169.254.169.254"]])
    asked = []

    async def resolver(host: str, port: int) -> list[str]:
        asked.append(host)
        return next(answers)

    async with Website() as site:
        guard = Guard(networks("127.0.0.1"), resolver)
        target = f"http://rebind.example:{site.port}/"
        assert (await look(check(target), guard)).verdict == "ok"
        assert asked == ["rebind.example"], "resolved once, connected to what was judged"
        found = await look(check(target), guard)
        assert "never" in found.detail
        assert site.asked == 1


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://[::ffff:169.254.169.254]/",
        "http://[64:ff9b::a9fe:a9fe]/",
        "http://0xa9fea9fe/",
        "http://2852039166/",
        "http://10.0.0.1/",
        "http://[::1]:1/",
        "file:///etc/passwd",
        "gopher://127.0.0.1/",
        "http://user:pass@127.0.0.1/",
        "http://[broken/",
    ],
)
async def test_http_redirect_to_a_refused_place_fails(location: str) -> None:
    """Each hop passes the guard: 302 into the network behind us gets no further."""
    async with serving(saying(response(302, Location=location))) as port:
        guard = Guard(networks("127.0.0.1"))
        found = await look(check(f"http://127.0.0.1:{port}/"), guard)
    assert found.verdict == "failed"
    assert "connection refused" not in found.detail
    assert "HTTP 302" not in found.detail


async def test_http_redirects_are_followed_and_counted() -> None:
    """Relative and absolute ones, up to the limit; 0 makes the redirect the answer."""

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        step = int(head.split()[1].strip("/") or 0)
        writer.write(response(302, Location=f"/{step + 1}") if step < 3 else response(200, b"end"))

    async with serving(handler) as port:
        url = f"http://127.0.0.1:{port}/"
        assert (await look(check(url), LOCAL)).detail == "HTTP 200 after 3 redirects"
        found = await look(check(url, redirects=2), LOCAL)
        assert (found.verdict, found.detail) == ("failed", "HTTP 302, not 200-299")
        moved = check(url, redirects=0, status="302", expect_headers={"Location": "/1"})
        assert (await look(moved, LOCAL)).verdict == "ok"


async def test_http_own_headers_stay_with_their_origin() -> None:
    """A secret of the check is not carried to where a redirect leads."""
    heads = []

    async def second(head: str, writer: asyncio.StreamWriter) -> None:
        heads.append(head.lower())
        writer.write(response(200))

    async with serving(second) as other:
        there = f"http://127.0.0.1:{other}/"
        async with serving(saying(response(307, Location=there, Set_Cookie="a=b"))) as port:
            url = f"http://127.0.0.1:{port}/"
            found = await look(check(url, headers={"X-Secret": "s3cret"}), LOCAL)
    assert found.verdict == "ok"
    assert "s3cret" not in heads[0]
    assert "cookie" not in heads[0]


async def test_http_environment_proxy_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would connect for us, past the guard."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    async with Website() as site:
        assert (await look(check(site.url), LOCAL)).verdict == "ok"


# ---- bounds


async def test_http_huge_body_is_bounded() -> None:
    """A body without end is read up to the limit, and the connection is closed."""
    written = 0

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65_536)
            written += 65_536
            await writer.drain()

    async with serving(handler) as port:
        answer = await fetch(LOCAL, f"http://127.0.0.1:{port}/", trust=trust(), limit=100_000)
        found = await look(check(f"http://127.0.0.1:{port}/", contains="y"), LOCAL)
    assert (len(answer.body), answer.cut) == (100_000, True)
    assert found.detail == "the body does not contain 'y' in its first 262,144 bytes"
    assert written < 100_000_000


async def test_http_compressed_body_is_not_unpacked() -> None:
    """A megabyte of zeros in a kilobyte stays a kilobyte."""
    packed = zlib.compress(b"\0" * 50_000_000)
    answer = response(200, packed, Content_Encoding="deflate")
    async with serving(saying(answer)) as port:
        found = await fetch(LOCAL, f"http://127.0.0.1:{port}/", trust=trust())
    assert found.body == packed


@pytest.mark.parametrize("what", ["nothing", "header", "body", "handshake"])
async def test_slow_loris_ends_with_the_time_limit(what: str) -> None:
    """A byte now and then, in the head or in the body, or silence: the limit is the limit."""

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        if what == "body":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n")
        elif what == "header":
            writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            if what in ("header", "body"):
                writer.write(b"x")
                await writer.drain()
            await asyncio.sleep(0.05)

    async with serving(handler, reads=what != "handshake") as port:
        scheme = "https" if what == "handshake" else "http"
        target = f"{scheme}://127.0.0.1:{port}/"
        async with asyncio.timeout(60):
            found = await look(check(target, timeout=0.5), LOCAL)
    assert (found.verdict, found.detail) == ("failed", "no answer within 0.5 s")


async def test_slow_resolver_ends_with_the_time_limit() -> None:
    """A name that takes for ever is a failure like any other."""

    async def resolver(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    async with asyncio.timeout(60):
        found = await look(check("http://slow.example/", timeout=0.3), Guard(resolver=resolver))
    assert found.detail == "no answer within 0.3 s"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\xff" * 100,
        b"HTTP/1.1 200 OK\r\nContent-Length: nine\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=range(7),
)
async def test_http_nonsense_is_a_failure(answer: bytes) -> None:
    """Whatever a server says, a check ends with a result."""
    found = await seen(answer)
    assert found.verdict == "failed"
    assert found.detail
    assert len(found.detail) <= 300


# ---- TLS


def tls_server(authority: Authority, name: str, alt: str, days: int = 90) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue(name, alt, days))
    return context


async def by_name(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


NAMED = Guard(networks("127.0.0.1"), by_name)


@pytest.mark.parametrize("kind", ["tls", "http"])
@pytest.mark.parametrize(
    ("alt", "days", "verdict", "detail"),
    [
        ("DNS:good.example", 90, "ok", ""),
        ("DNS:good.example", 5, "degraded", "certificate ends in 4 days"),
        ("DNS:good.example", -1, "failed", "certificate: certificate has expired"),
        ("DNS:other.example", 90, "failed", "not valid for 'good.example'"),
    ],
)
async def test_tls_certificate_is_judged(
    authority: Authority, kind: Any, alt: str, days: int, verdict: str, detail: str
) -> None:
    """Chain, name and end of a certificate, by a TLS check and by HTTPS, under the pinned name."""
    context = tls_server(authority, f"{kind}{days}{len(alt)}", alt, days)
    trusting = trust(str(authority.file))
    async with serving(saying(response(200)), tls=context, reads=kind == "http") as port:
        target = f"good.example:{port}" if kind == "tls" else f"https://good.example:{port}/"
        found = await look(check(target, kind=kind), NAMED, trusting)
    assert found.verdict == verdict, found.detail
    assert detail in found.detail
    assert (found.expires > 0) == (verdict != "failed")


@pytest.mark.parametrize("kind", ["tls", "http"])
async def test_tls_unknown_authority_is_a_failure(authority: Authority, kind: Any) -> None:
    """A chain that leads to nobody we trust."""
    context = tls_server(authority, f"chain-{kind}", "DNS:good.example")
    async with serving(saying(response(200)), tls=context, reads=kind == "http") as port:
        target = f"good.example:{port}" if kind == "tls" else f"https://good.example:{port}/"
        found = await look(check(target, kind=kind), NAMED, ssl.create_default_context())
    assert found.verdict == "failed"
    assert found.detail.startswith("certificate: ")
    assert "issuer" in found.detail or "self-signed" in found.detail


async def test_tls_server_name_is_what_is_checked(authority: Authority) -> None:
    """A certificate for another name than the host's, when that is what is wanted."""
    context = tls_server(authority, "sni", "DNS:inner.example")
    trusting = trust(str(authority.file))
    async with serving(saying(b""), tls=context, reads=False) as port:
        target = f"front.example:{port}"
        found = await look(check(target, kind="tls", server_name="inner.example"), NAMED, trusting)
        assert found.verdict == "ok", found.detail
        assert (await look(check(target, kind="tls"), NAMED, trusting)).verdict == "failed"


async def test_tls_of_a_server_that_speaks_none() -> None:
    """A plain server on the port is a failure with a sentence."""
    async with Website() as site:
        found = await look(check(f"127.0.0.1:{site.port}", kind="tls", timeout=0.5), LOCAL)
    assert found.verdict == "failed"
    assert found.detail


# ---- TCP


async def test_tcp_connects_and_listens() -> None:
    """An open port is enough; with words, the words have to come."""

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.exam")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(b"ple ESMTP\r\n")

    async with serving(handler, reads=False) as port:
        target = f"127.0.0.1:{port}"
        assert (await look(check(target, kind="tcp"), LOCAL)).verdict == "ok"
        ready = check(target, kind="tcp", contains="example ESMTP")
        assert (await look(ready, LOCAL)).verdict == "ok"
        found = await look(check(target, kind="tcp", contains="SSH-2.0"), LOCAL)
        assert "first words" in found.detail


async def test_tcp_talkative_server_is_bounded() -> None:
    """A server that talks without end does not hold the check up."""

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"bla " * 1_000)
            await writer.drain()

    async with serving(handler, reads=False) as port:
        found = await look(check(f"127.0.0.1:{port}", kind="tcp", contains="SSH"), LOCAL)
    assert found.verdict == "failed"


async def test_tcp_passes_the_guard() -> None:
    """A TCP or TLS check goes where an HTTP check may go, and nowhere else."""
    for kind in ("tcp", "tls"):
        found = await look(check("[::ffff:169.254.169.254]:80", kind=kind), LOCAL)
        assert "never" in found.detail
        found = await look(check("0x7f000001:22", kind=kind), Guard())
        assert "private" in found.detail


async def test_fetch_refuses_before_anything_is_sent() -> None:
    """The transport itself refuses: who forgets to ask the guard is still guarded."""
    with pytest.raises(Refused):
        await fetch(Guard(), "http://127.0.0.1:1/", trust=trust())
