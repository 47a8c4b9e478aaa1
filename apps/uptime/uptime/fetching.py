"""HTTP requests through the guard: pinned to an address, bounded, credentials kept to their origin.

The connection goes to an address that the guard has accepted; the name stays in the Host header, in
the TLS handshake and in the check of the certificate. Redirects are followed here, one by one, each
through the guard; a check's headers go only to its own origin. No proxy from the environment is
used, no cookie kept, no connection reused. Bodies are requested uncompressed and read up to a
limit; a compressed one is not unpacked.

Not bounded here: time. The caller sets a deadline.
"""

from __future__ import annotations

import itertools
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from uptime.guard import Guard, Refused, parse_url

BODY_LIMIT = 256 * 1024  # bounds the memory of a probe
AGENT = "holdfast-uptime/0.1"
_OWN = {"user-agent": AGENT, "accept": "*/*", "accept-encoding": "identity", "connection": "close"}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer after all redirects."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes
    cut: bool
    """Whether there was more than the limit."""
    hops: int
    seconds: float
    certificate: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The body as text; invalid UTF-8 is replaced."""
        return self.body.decode("utf-8", "replace")


class PinnedTransport(httpx.AsyncBaseTransport):
    """Connects to an accepted address, under the requested name."""

    def __init__(self, guard: Guard, trust: ssl.SSLContext) -> None:
        self._guard = guard
        self._inner = httpx.AsyncHTTPTransport(verify=trust, trust_env=False, retries=0)
        self._opened: list[Any] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = parse_url(str(request.url))
        host = url.raw_host.decode("ascii")
        port = url.port or (443 if url.scheme == "https" else 80)
        trouble: httpx.TransportError | None = None
        for address in await self._guard.resolve(host, port):
            try:
                pinned = self._pinned(request, url, host, address)
                return await self._inner.handle_async_request(pinned)
            except httpx.ConnectError as error:
                trouble = error  # nothing was sent: the next address may answer
        assert trouble is not None
        raise trouble

    def _pinned(
        self, request: httpx.Request, url: httpx.URL, host: str, address: str
    ) -> httpx.Request:
        return httpx.Request(
            request.method,
            url.copy_with(host=address),
            headers=request.headers,  # with the Host header that the client set
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": host, "trace": self._trace},
        )

    async def _trace(self, event: str, info: dict[str, Any]) -> None:
        """Track each connection: one cancelled during its handshake would otherwise stay open."""
        if event == "connection.connect_tcp.complete":
            self._opened.append(info["return_value"])

    async def aclose(self) -> None:
        await self._inner.aclose()
        for stream in self._opened:
            await stream.aclose()


async def fetch(
    guard: Guard,
    url: str,
    *,
    trust: ssl.SSLContext,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    content: bytes | None = None,
    redirects: int = 0,
    limit: int = BODY_LIMIT,
) -> Answer:
    """Request a URL, follow up to `redirects` redirects, and return the last answer."""
    began = time.monotonic()
    place, own = parse_url(url), dict(headers or {})
    transport = PinnedTransport(guard, trust)
    async with httpx.AsyncClient(transport=transport, trust_env=False, timeout=None) as client:
        for hops in itertools.count():
            client.cookies.clear()
            sent = _OWN | {name.lower(): value for name, value in own.items()}
            async with client.stream(method, place, headers=sent, content=content) as response:
                if hops < redirects and (following := _next(place, response)):
                    own = own if _origin(following) == _origin(place) else {}
                    place = following
                    continue
                certificate = _certificate(response)
                body, cut = await _bounded(response, limit)
            seconds = time.monotonic() - began
            names = {k.lower(): v for k, v in response.headers.items()}
            return Answer(
                str(place), response.status_code, names, body, cut, hops, seconds, certificate
            )
    raise AssertionError("the loop has no end of its own")


def _next(place: httpx.URL, response: httpx.Response) -> httpx.URL | None:
    """Where an answer redirects to, if it does; checked like any URL."""
    if not response.has_redirect_location:
        return None
    try:
        target = place.join(response.headers["location"])
    except (httpx.InvalidURL, ValueError):
        raise Refused("a redirect leads to something that is no URL") from None
    try:
        return parse_url(str(target))
    except Refused as error:
        raise Refused(f"a redirect leads to where no check goes: {error}") from None


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


async def _bounded(response: httpx.Response, limit: int) -> tuple[bytes, bool]:
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > limit:
            return bytes(body[:limit]), True
    return bytes(body), False


def _certificate(response: httpx.Response) -> Mapping[str, Any]:
    stream = response.extensions.get("network_stream")
    tls = stream.get_extra_info("ssl_object") if stream is not None else None
    return (tls.getpeercert() or {}) if tls is not None else {}
