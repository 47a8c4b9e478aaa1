"""Strangers at the HTTP ports: half requests, bodies without end, too many connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from holdfast.health import MOST_READING, Health, HealthServer
from holdfast.server import Server
from holdfast.web import network as connections
from tests.integration.web_support import serving

HALF_HEAD = b"GET /runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: "
HALF_BODY = (
    b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\n\r\ntoken="
)


@contextlib.contextmanager
def opened(url: str, many: int, *said: bytes) -> Iterator[list[socket.socket]]:
    """Connections that have said something, and go no further."""
    where = urlsplit(url)
    assert where.port
    with contextlib.ExitStack() as stack:
        found = []
        for n in range(many):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", where.port), 10))
            with contextlib.suppress(OSError):  # it was closed for another one
                one.sendall(said[n % len(said)])
            found.append(one)
        yield found


def is_open(one: socket.socket) -> bool:
    """Whether the other side still has it."""
    one.setblocking(False)
    try:
        return one.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def settled(held: list[socket.socket], most: int) -> int:
    """How many are open once no more than `most` are."""
    until = time.monotonic() + 30
    while (count := sum(map(is_open, held))) > most and time.monotonic() < until:
        time.sleep(0.02)
    return count


def test_half_requests_do_not_keep_others_out(nats: Server, namespace: str) -> None:
    """Far more half-sent heads and bodies than there is place for: everybody else is answered."""
    with (
        serving(nats, namespace, connections=100, connections_per_address=60) as url,
        opened(url, 500, HALF_HEAD, HALF_BODY, b"", b"GET / HT") as held,
    ):
        for _ in range(5):
            assert httpx.get(f"{url}/health/live", timeout=30).json() == {"live": True}
        assert httpx.get(f"{url}/login", timeout=30).status_code == 200
        assert settled(held, 60) <= 60


def test_connection_that_is_answered_is_not_closed_for_another(
    nats: Server, namespace: str
) -> None:
    """A request that is complete is answered, however many others come after it."""
    from tests.integration.web_support import TOKENS

    headers = {"authorization": f"Bearer {TOKENS['admin'][0]}"}
    with (
        serving(nats, namespace, connections=50, connections_per_address=20) as url,
        httpx.stream("GET", f"{url}/live", headers=headers, timeout=30) as stream,
    ):
        events = stream.iter_raw()
        assert next(events).startswith(b"retry")
        with opened(url, 200, HALF_HEAD):
            assert next(events)  # a tick, some seconds later


@pytest.mark.parametrize("said", [HALF_HEAD, HALF_BODY, b""])
def test_half_request_has_a_deadline(
    nats: Server, namespace: str, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is waited for longer than it may take to say what one wants."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.2)
    with serving(nats, namespace) as url, opened(url, 5, said) as held:
        assert settled(held, 0) == 0


def answer_to(url: str, head: bytes, parts: Iterator[bytes]) -> tuple[bytes, int]:
    """The answer to a request that is sent part by part, and how much of it was taken."""
    sent = 0
    with opened(url, 1, head) as (one,):
        one.settimeout(30)
        with contextlib.suppress(OSError):
            for part in parts:
                one.sendall(part)
                sent += len(part)
        said = b""
        with contextlib.suppress(OSError):
            while part := one.recv(65536):
                said += part
        return said, sent


def chunks(megabytes: int) -> Iterator[bytes]:
    for _ in range(megabytes * 16):
        yield b"10000\r\n" + b"x" * 65536 + b"\r\n"


@pytest.mark.parametrize("path", ["/login", "/api/v1/runs"])
def test_length_and_chunks_at_once_are_refused(nats: Server, namespace: str, path: str) -> None:
    """Two ways to tell where a body ends are one too many: another server may believe the other."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n"
        "Transfer-Encoding: chunked\r\nContent-Type: application/x-www-form-urlencoded\r\n\r\n"
    ).encode()
    with serving(nats, namespace) as url:
        said, sent = answer_to(url, head, chunks(100))
        assert b" 400 " in said.split(b"\r\n")[0] or not said  # reset: it was still sending
        assert sent < 20_000_000


def test_body_of_a_login_is_counted_as_it_comes(nats: Server, namespace: str) -> None:
    """Whoever is not known yet sends a token, and no megabytes."""
    head = (
        b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: application/x-www-form-urlencoded\r\n\r\n"
    )
    with serving(nats, namespace) as url:
        said, sent = answer_to(url, head, chunks(100))
        assert b" 413 " in said.split(b"\r\n")[0] or not said
        assert sent < 20_000_000
        told = httpx.post(
            f"{url}/login", content=b"x" * 100_000, headers={"content-type": "text/plain"}
        )
        assert told.status_code == 413


async def test_health_port_answers_beside_half_requests() -> None:
    """Of every role: strangers who say nothing take no place from a probe."""
    health = HealthServer("127.0.0.1", 0, lambda: Health(True, [], lambda: b""))
    health._port = free_port()
    async with health:
        held = []
        for _ in range(3 * MOST_READING):
            held.append(await asyncio.open_connection("127.0.0.1", health._port))
            held[-1][1].write(b"GET /health/live HTTP/1.1\r\nX: ")
        for path in ("/health/live", "/metrics"):
            reader, writer = await asyncio.open_connection("127.0.0.1", health._port)
            writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
        assert len(health._reading) <= MOST_READING
        for _, writer in held:
            writer.transport.abort()


async def test_health_port_reads_no_endless_headers() -> None:
    """Headers are dropped, and counted."""
    health = HealthServer("127.0.0.1", free_port(), lambda: Health(True, [], lambda: b""))
    async with health:
        reader, writer = await asyncio.open_connection("127.0.0.1", health._port)
        writer.write(b"GET /health/live HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            for _ in range(10_000):
                writer.write(b"X-A: " + b"a" * 1000 + b"\r\n")
                await writer.drain()
        with contextlib.suppress(OSError):
            assert await reader.read() == b""
        writer.transport.abort()


def free_port() -> int:
    with contextlib.closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
