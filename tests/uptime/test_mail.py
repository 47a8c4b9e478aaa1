"""The mail server's password: only to the server that the certificate names, and never in clear."""

from __future__ import annotations

import asyncio
import smtplib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from uptime.config import load
from uptime.notices import mail
from uptime.record import Incident, Notice

from holdfast.notices import NotDelivered
from tests.uptime.conftest import Authority

NOTICE = Notice(Incident("a.1-down", "a", "A", "down", 1), "opened")


@asynccontextmanager
async def mail_server(said: list[bytes], tls: ssl.SSLContext | None) -> AsyncIterator[int]:
    """A server that offers a login, and no STARTTLS; it keeps what it hears."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 test ESMTP\r\n")
        while line := await reader.readline():
            said.append(line)
            word = line.strip().upper()
            if word == b"DATA":
                writer.write(b"354 go on\r\n")
                await reader.readuntil(b"\r\n.\r\n")
            answers = {
                b"QUIT": b"221 bye\r\n",
                b"EHLO": b"250-test\r\n250 AUTH PLAIN\r\n",
                b"AUTH": b"235 fine\r\n",
            }
            writer.write(answers.get(word[:4], b"250 fine\r\n"))
            await writer.drain()
            if word == b"QUIT":
                break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]


def served_by(authority: Authority, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue(name, f"DNS:{name}"))
    return context


def gave_the_password(said: list[bytes]) -> bool:
    return any(line.upper().startswith(b"AUTH") for line in said)


@pytest.mark.parametrize("trusted", [True, False])
async def test_smtps_gives_the_password_to_a_good_certificate_only(
    authority: Authority, trusted: bool
) -> None:
    """Neither to one that nobody signed, nor to one for another name."""
    for name, good in (("localhost", trusted), ("other.example", False)):
        said: list[bytes] = []
        async with mail_server(said, served_by(authority, name)) as port:
            env = {"UPTIME_SMTP_URL": f"smtps://ann:hunter2@localhost:{port}"}
            config = load(env | ({"UPTIME_CA_FILE": str(authority.file)} if trusted else {}))
            if good:
                await mail("a@b.example", NOTICE, config)
            else:
                with pytest.raises(ssl.SSLCertVerificationError):
                    await mail("a@b.example", NOTICE, config)
        assert gave_the_password(said) is good


async def test_smtp_without_tls_gets_no_password() -> None:
    """Unless somebody has said that it may."""
    said: list[bytes] = []
    async with mail_server(said, None) as port:
        env = {"UPTIME_SMTP_URL": f"smtp://ann:hunter2@127.0.0.1:{port}"}
        with pytest.raises(NotDelivered, match="UPTIME_SMTP_PLAIN"):
            await mail("a@b.example", NOTICE, load(env))
        assert not gave_the_password(said)
        await mail("a@b.example", NOTICE, load(env | {"UPTIME_SMTP_PLAIN": "yes"}))
        assert gave_the_password(said)


async def test_smtp_that_offers_tls_must_have_a_good_certificate() -> None:
    """A server that says STARTTLS and then has no TLS to show gets nothing."""
    said: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 test ESMTP\r\n")
        while line := await reader.readline():
            said.append(line)
            starts = line.upper().startswith(b"STARTTLS")
            ehlo = b"250-test\r\n250-STARTTLS\r\n250 AUTH PLAIN\r\n"
            writer.write(b"454 not now\r\n" if starts else ehlo)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        config = load({"UPTIME_SMTP_URL": f"smtp://ann:hunter2@127.0.0.1:{port}"})
        with pytest.raises((smtplib.SMTPException, NotDelivered)):
            await mail("a@b.example", NOTICE, config)
    assert not gave_the_password(said)
