"""A keeper logs in as its worker does, whatever that needs, and comes back after a loss."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import nkeys
import pytest

from holdfast.config import ConnectionConfig
from holdfast.identity.credentials import Credentials, new_nkey_seed, public_nkey
from holdfast.keeper.link import Link, LinkError, LinkMessage
from holdfast.server import Server
from holdfast.server.process import free_ports
from holdfast.worker.keeping import login_of
from tests.integration.test_tls import Authority, authority, block
from tests.support import until

ECHO = {1: "keeper.echo"}


@dataclass(frozen=True)
class Case:
    """A server's demands, and a login that meets them."""

    extra: str
    login: dict[str, str]
    scheme: str = "nats://"


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("keeper") / "ca")


def case_of(name: str, ca: Authority, folder: Path) -> Case:
    users = 'authorization { users: [ { user: "anna", password: "p@ss/word" } ] }'
    cert, key = ca.issue(f"server-{name}")
    tls = {"tls_ca": ca.file}
    if name == "password":
        return Case(users, {"user": "anna", "password": "p@ss/word"})
    if name == "password in the address":
        return Case(users, {}, "nats://anna:p%40ss%2Fword@")
    if name == "token":
        return Case('authorization { token: "geheim" }', {"token": "geheim"})
    if name == "token in the address":
        return Case('authorization { token: "geheim" }', {}, "nats://geheim@")
    if name == "nkey":
        seed = new_nkey_seed()
        (folder / "seed").write_text(f"{seed}\n")
        users = f'authorization {{ users: [ {{ nkey: "{public_nkey(seed)}" }} ] }}'
        return Case(users, {"nkey_seed_file": str(folder / "seed")})
    if name == "credentials":
        seed = new_nkey_seed()
        Credentials(user="w", role="worker", nkey_seed=seed).save(folder / "login")
        users = f'authorization {{ users: [ {{ nkey: "{public_nkey(seed)}" }} ] }}'
        return Case(users, {"credentials_file": str(folder / "login")})
    if name == "TLS":
        return Case(block(ca, cert, key), tls, "tls://")
    if name == "TLS that only the server asks for":
        return Case(block(ca, cert, key), tls)
    if name == "TLS first":
        first = block(ca, cert, key, "handshake_first: true")
        return Case(first, {**tls, "tls_handshake": "first"}, "tls://")
    own, own_key = ca.issue("keeper-client")
    both = block(ca, cert, key, "verify: true")
    return Case(both, {**tls, "tls_cert": own, "tls_key": own_key}, "tls://")


async def answered(link: Link) -> LinkMessage:
    """Connect, ask a subject of its own, and get the question."""
    await until(lambda: link.keep(time.monotonic()) or link.up, 20, link.trouble)
    link.publish("keeper.echo", b"hello", "reply.to", "NATS/1.0\r\nA: b\r\n\r\n")
    found: list[LinkMessage] = []

    def received() -> bool:
        found.extend(link.receive())
        return bool(found)

    await until(received, 20, "the message")
    return found[0]


LOGINS = [
    *("password", "password in the address", "token", "token in the address", "nkey"),
    *("credentials", "TLS", "TLS that only the server asks for", "TLS first"),
    "TLS with a certificate of the client",
]


@pytest.mark.parametrize("name", LOGINS)
async def test_keeper_logs_in_as_its_worker(name: str, ca: Authority, tmp_path: Path) -> None:
    """Each login that a connection may have; messages with headers go both ways."""
    case = case_of(name, ca, tmp_path)
    with Server(fast=True, extra_config=case.extra, monitor_port=None) as server:
        url = server.url.replace("nats://", case.scheme)
        config = ConnectionConfig(nats_url=url, **case.login)  # type: ignore[arg-type]
        link = Link({**login_of(config), "echo": True}, "keeper", ECHO)
        message = await answered(link)
        link.drop()
        server.kill()
    assert (message.subject, message.reply, message.body) == ("keeper.echo", "reply.to", b"hello")
    assert b"A: b" in message.headers


async def test_keeper_goes_to_another_server_and_comes_back(tmp_path: Path) -> None:
    """An address where nobody listens is passed over; a restart is waited out."""
    with Server(store=tmp_path / "store", fast=True, monitor_port=None) as server:
        urls = f"nats://127.0.0.1:{free_ports(1)[0]},{server.url}"
        link = Link({**login_of(ConnectionConfig(nats_url=urls)), "echo": True}, "keeper", ECHO)
        await answered(link)
        server.kill()
        link.receive()
        assert not link.up
        assert not link.keep(time.monotonic())
        with pytest.raises(LinkError):
            link.publish("keeper.echo", b"lost")
        server.restart()
        assert (await answered(link)).body == b"hello"
        assert link.connections == 2
        link.drop()
        server.kill()


async def test_keeper_says_why_it_is_refused() -> None:
    """A wrong password is no connection, and no crash."""
    users = 'authorization { users: [ { user: "anna", password: "right" } ] }'
    with Server(fast=True, extra_config=users, monitor_port=None) as server:
        config = ConnectionConfig(nats_url=server.url, user="anna", password="wrong")
        link = Link(login_of(config), "keeper", ECHO)
        assert not link.keep(time.monotonic())
        assert "Authorization" in link.trouble
        server.kill()


def test_keeper_reads_a_creds_file() -> None:
    """The JWT and the seed, between their markers."""
    from holdfast.keeper.link import _creds

    seed = nkeys.encode_seed(b"x" * 32, nkeys.PREFIX_BYTE_USER).decode()
    text = (
        "-----BEGIN NATS USER JWT-----\neyJ0.e30.sig\n------END NATS USER JWT------\n\n"
        "************************* IMPORTANT *************************\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
    assert _creds(text) == ("eyJ0.e30.sig", seed)
