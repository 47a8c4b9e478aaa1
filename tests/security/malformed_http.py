"""Malformed HTTP requests: a saved corpus, and random mutations of it."""

from __future__ import annotations

import random
from collections.abc import Iterator

HOST = b"Host: 127.0.0.1\r\n"
LOGIN = b"Content-Type: application/x-www-form-urlencoded\r\n"
JSON = b"Content-Type: application/json\r\n"

RUNS = b"POST /api/v1/runs HTTP/1.1\r\n" + HOST + JSON

CORPUS: tuple[bytes, ...] = (
    b"",
    b"\r\n\r\n",
    b"\x00" * 50 + b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + HOST + b"X" * 20_000 + b"\r\n\r\n",
    b"GET /" + b"a/" * 7_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /%ff%fe%00%1b[2J HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /runs?since=" + b"1" * 10_000 + b"x HTTP/1.1\r\n" + HOST + b"Accept: text/html\r\n\r\n",
    b"GET /api/v1/runs?limit=1e308&cursor=\xf0 HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /api/v1/agents?target=" + b"(" * 5_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /login?next=" + b"//" * 4_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET / HTTP/1.1\r\n" + HOST + b"Cookie: " + b"a=b; " * 2_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + HOST + b"Cookie: hf_said=" + b"W" * 5_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + HOST + b"Authorization: Bearer \xff\xfe\x00\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: [\r\nAccept: text/html\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: \xff\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET / HTTP/1.1\r\n" + HOST + b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    b"POST /login HTTP/1.1\r\n" + HOST + b"Origin: http://[\r\n" + LOGIN + b"\r\n",
    b"POST /login HTTP/1.1\r\n" + HOST + LOGIN + b"Content-Length: -1\r\n\r\n",
    b"POST /login HTTP/1.1\r\n" + HOST + LOGIN + b"Content-Length: 9999999999999999999\r\n\r\n",
    b"POST /login HTTP/1.1\r\n" + HOST + LOGIN + b"Content-Length: 7\r\n\r\n%ff=%ff",
    b"POST /login HTTP/1.1\r\n" + HOST + LOGIN + b"Content-Length: 1\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
    b"POST /login HTTP/1.1\r\n" + HOST + LOGIN + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /login HTTP/1.1\r\n" + HOST + LOGIN + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc",
    b"POST /login HTTP/1.1\r\n" + HOST + LOGIN + b"Transfer-Encoding: gzip\r\n\r\nabc",
    b"POST /api/v1/runs HTTP/1.1\r\n"
    + HOST
    + JSON
    + b"Content-Length: 6000\r\n\r\n"
    + b"[" * 6_000,
    RUNS + b"Content-Length: 4\r\n\r\n\xff\xfe\x00\x00",
    b"POST /api/v1/runs HTTP/1.1\r\n"
    + HOST
    + JSON
    + b'Content-Length: 14\r\n\r\n{"job":"\\ud800"}',
    b"PUT /api/v1/runs HTTP/1.1\r\n" + HOST + b"\r\nGET / HTTP/1.1\r\n" + HOST + b"\r\n",
)


def with_token(request: bytes, token: str) -> bytes:
    """The request with a valid token, so that it gets further."""
    line, end, rest = request.partition(b"\r\n")
    return line + end + f"Authorization: Bearer {token}\r\n".encode() + rest if end else request


def malformed(seed: int, token: str = "") -> Iterator[bytes]:
    """Endless requests: the corpus, then random mutations; deterministic for a seed."""
    chance = random.Random(seed)
    yield from CORPUS
    yield from (with_token(one, token) for one in CORPUS)
    while True:
        made = bytearray(chance.choice(CORPUS))
        if token and chance.random() < 0.5:
            made = bytearray(with_token(bytes(made), token))
        for _ in range(chance.randrange(1, 6)):
            place = chance.randrange(len(made) + 1)
            if chance.random() < 0.5:
                made[place : place + chance.randrange(8)] = b""
            else:
                made[place:place] = chance.randbytes(chance.randrange(1, 12))
        yield bytes(made)
