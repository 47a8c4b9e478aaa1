"""Probing: one check, one outcome. A check that fails is a result, not an error.

Everything has one deadline, the check's timeout, whatever the other side does: a name that does not
resolve, a handshake that hangs, a byte each second. Nothing here raises but `CancelledError`, and
bugs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from uptime.check import Check
from uptime.fetching import Answer, fetch
from uptime.guard import Guard, Refused, parse_place

Verdict = Literal["ok", "degraded", "failed"]

BANNER_LIMIT = 4_096  # bounds what a server can make us read
LONGEST_DETAIL = 300
DAY_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one probe."""

    verdict: Verdict
    ms: int
    detail: str = ""
    """Why it is not good, as a sentence; or what came back."""
    code: int = 0
    """The HTTP status."""
    expires: int = 0
    """When the certificate expires, in seconds since 1970."""


class Failed(Exception):
    """The target does not meet an expectation; the message says which."""


@functools.lru_cache(maxsize=4)
def trust(ca_file: str = "") -> ssl.SSLContext:
    """Trust the system's authorities, and those in a file."""
    context = ssl.create_default_context()
    if ca_file:
        context.load_verify_locations(ca_file)
    return context


async def look(check: Check, guard: Guard, context: ssl.SSLContext | None = None) -> Outcome:
    """Probe once."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(check.timeout):
            outcome = await _KINDS[check.kind](check, guard, context or trust())
    except TimeoutError:
        outcome = Outcome("failed", 0, f"no answer within {check.timeout:g} s")
    except (Failed, Refused) as error:
        outcome = Outcome("failed", 0, str(error))
    except ssl.SSLCertVerificationError as error:
        outcome = Outcome("failed", 0, f"certificate: {error.verify_message or error.reason}")
    except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, OSError, ValueError) as error:
        outcome = Outcome("failed", 0, _reason(error))
    ms = outcome.ms or round((time.monotonic() - began) * 1000)
    return _judged(check, outcome, ms)


def _judged(check: Check, outcome: Outcome, ms: int) -> Outcome:
    """Degrade a good answer that was slow, or whose certificate expires soon."""
    verdict, detail = outcome.verdict, outcome.detail
    days = (outcome.expires - time.time()) / DAY_SECONDS
    if verdict == "ok" and check.slow_ms and ms > check.slow_ms:
        verdict, detail = "degraded", f"slow: {ms} ms, more than {check.slow_ms} ms"
    elif verdict == "ok" and outcome.expires and days < check.warn_days:
        verdict, detail = "degraded", f"the certificate ends in {max(0, int(days))} days"
    return Outcome(verdict, ms, detail[:LONGEST_DETAIL], outcome.code, outcome.expires)


def _reason(error: Exception) -> str:
    """What went wrong with the connection, without text chosen by the other side."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"certificate: {cause.verify_message or cause.reason}"
        if isinstance(cause, ssl.SSLError):
            return f"TLS: {(cause.reason or 'handshake failed').lower().replace('_', ' ')}"
        if isinstance(cause, ConnectionRefusedError):
            return "connection refused"
        cause = cause.__cause__ or cause.__context__
    if "certificate verify failed" in str(error):
        return "certificate: " + str(error).partition("verify failed: ")[2].partition(" (_ssl")[0]
    told = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {told}" if told else type(error).__name__


# ---- HTTP


async def _http(check: Check, guard: Guard, context: ssl.SSLContext) -> Outcome:
    answer = await fetch(
        guard,
        check.target,
        trust=context,
        method=check.method,
        headers=check.headers,
        redirects=check.redirects,
    )
    _expect(check, answer)
    detail = f"HTTP {answer.status}" + (f" after {answer.hops} redirects" if answer.hops else "")
    ms = max(1, round(answer.seconds * 1000))
    return Outcome("ok", ms, detail, answer.status, _ends(answer.certificate))


def _expect(check: Check, answer: Answer) -> None:
    if not check.expects_status(answer.status):
        raise Failed(f"HTTP {answer.status}, not {check.status}")
    if check.contains and check.contains not in answer.text:
        raise Failed(f"the body does not contain {check.contains!r}" + _cut(answer))
    if check.lacks and check.lacks in answer.text:
        raise Failed(f"the body contains {check.lacks!r}")
    for name, wanted in check.expect_headers.items():
        found = answer.headers.get(name.lower())
        if found is None or wanted not in found:
            raise Failed(f"the header {name} does not contain {wanted!r}")


def _cut(answer: Answer) -> str:
    return f" in its first {len(answer.body):,} bytes" if answer.cut else ""


# ---- TLS and TCP


async def _tls(check: Check, guard: Guard, context: ssl.SSLContext) -> Outcome:
    host, port = parse_place(check.target)
    name = check.server_name or host
    began = time.monotonic()
    writer = (await _connect(guard, host, port, ssl=context, server_hostname=name))[1]
    try:
        certificate = writer.get_extra_info("ssl_object").getpeercert()
        ms = max(1, round((time.monotonic() - began) * 1000))
    finally:
        await _close(writer)
    ends = _ends(certificate)
    days = int((ends - time.time()) / DAY_SECONDS)
    return Outcome("ok", ms, f"certificate for {name}, {days} days left", 0, ends)


async def _tcp(check: Check, guard: Guard, context: ssl.SSLContext) -> Outcome:
    host, port = parse_place(check.target)
    began = time.monotonic()
    reader, writer = await _connect(guard, host, port)
    try:
        ms = max(1, round((time.monotonic() - began) * 1000))
        if check.contains:
            await _expect_banner(reader, check.contains)
    finally:
        await _close(writer)
    return Outcome("ok", ms, "connected")


async def _expect_banner(reader: asyncio.StreamReader, wanted: str) -> None:
    """Read until the expected text, the end of the stream, or a limit."""
    said = b""
    while wanted.encode() not in said:
        chunk = await reader.read(BANNER_LIMIT)
        said += chunk
        if not chunk or len(said) > BANNER_LIMIT:
            raise Failed(f"the server's first words do not contain {wanted!r}")


async def _connect(
    guard: Guard, host: str, port: int, **options: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first accepted address that answers."""
    trouble: OSError | None = None
    for address in await guard.resolve(host, port):
        try:
            return await asyncio.open_connection(address, port, **options)
        except ssl.SSLError:
            raise  # it answered, and this is the answer
        except OSError as error:
            trouble = error
    assert trouble is not None
    raise trouble


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()  # nothing more to send, and a clean close may take long
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _ends(certificate: Mapping[str, Any]) -> int:
    text = certificate.get("notAfter", "") if certificate else ""
    return int(ssl.cert_time_to_seconds(text)) if text else 0


_KINDS = {"http": _http, "tls": _tls, "tcp": _tcp}
