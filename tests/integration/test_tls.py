"""TLS: a server that is trusted is used, any other is refused in one sentence, at once."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.broker import Broker
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.errors import ConfigError, NotConnected
from holdfast.server import Server
from holdfast.status.doctor import examine
from holdfast.sync import SyncApp
from holdfast.testing.running import RunningWorker


@dataclass(frozen=True)
class Authority:
    """A certificate authority in a folder."""

    folder: Path

    @property
    def file(self) -> str:
        return str(self.folder / "ca.pem")

    def issue(self, name: str, host: str = "127.0.0.1") -> tuple[str, str]:
        """A certificate for an address, and its key."""
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        extension = self.folder / f"{name}.ext"
        kind = "IP" if host[0].isdigit() else "DNS"
        extension.write_text(f"subjectAltName={kind}:{host}")
        request = self.folder / f"{name}.csr"
        _openssl("req", "-new", *_key(key), "-subj", f"/CN={name}", "-out", str(request))
        sign = ["x509", "-req", "-in", str(request), "-CA", self.file, "-days", "2"]
        sign += ["-CAkey", str(self.folder / "ca.key"), "-CAcreateserial"]
        _openssl(*sign, "-extfile", str(extension), "-out", str(cert))
        return str(cert), str(key)


def _key(path: Path) -> list[str]:
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(path)]


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def authority(folder: Path) -> Authority:
    folder.mkdir(parents=True)
    made = Authority(folder)
    _openssl(
        *("req", "-x509", *_key(folder / "ca.key"), "-subj", "/CN=Test authority"),
        *("-days", "2", "-out", made.file),
        *("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=keyCertSign"),
    )
    return made


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls") / "theirs")


def block(ca: Authority, cert: str, key: str, more: str = "") -> str:
    return f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{ca.file}", {more} }}'


@pytest.fixture(scope="module")
def secure(ours: Authority) -> Iterator[Server]:
    """A server with a certificate for its address."""
    with Server(fast=True, extra_config=block(ours, *ours.issue("server"))) as server:
        yield server
        server.kill()


def tls(server: Server) -> str:
    return server.url.replace("nats://", "tls://")


async def refused(config: ConnectionConfig) -> str:
    """Why a connection is refused; with ten minutes to try, so that the reason cannot be time."""
    with pytest.raises(NotConnected) as error:
        await Broker(replace(config, connect_timeout_seconds=600)).open()
    assert "\n" not in str(error.value)
    return str(error.value)


async def test_trusted_server_is_used(secure: Server, ours: Authority) -> None:
    """With the authority that signed it, by either way to write the address."""
    for url in (secure.url, tls(secure)):
        async with Broker(ConnectionConfig(nats_url=url, tls_ca=ours.file)) as broker:
            assert broker.api_level >= 3


async def test_server_of_another_authority_is_refused(secure: Server, theirs: Authority) -> None:
    """Neither another authority nor those of the system will do."""
    other = ConnectionConfig(nats_url=tls(secure), tls_ca=theirs.file)
    system = ConnectionConfig(nats_url=tls(secure))
    for config in (other, system):
        text = await refused(config)
        assert "certificate that is not trusted" in text
        assert "tls_ca" in text


async def test_server_that_wants_tls_gets_it(secure: Server) -> None:
    """Also where the address does not say so, and then it has to be trusted as well."""
    assert "not trusted" in await refused(ConnectionConfig(nats_url=secure.url))


async def test_certificate_for_another_host_is_refused(ours: Authority) -> None:
    """Unless that name was asked for."""
    config = block(ours, *ours.issue("elsewhere", "nats.example"))
    with Server(fast=True, extra_config=config) as server:
        given = ConnectionConfig(nats_url=tls(server), tls_ca=ours.file)
        assert "not trusted" in await refused(given)
        named = ConnectionConfig(
            nats_url=tls(server), tls_ca=ours.file, tls_hostname="nats.example"
        )
        async with Broker(named) as broker:
            assert broker.connected


async def test_server_that_verifies_clients(ours: Authority, theirs: Authority) -> None:
    """Ours get in, others and those without a certificate do not."""
    config = block(ours, *ours.issue("strict"), more="verify: true")
    with Server(fast=True, extra_config=config) as server:
        plain: dict[str, Any] = {"nats_url": tls(server), "tls_ca": ours.file}
        cert, key = ours.issue("client")
        async with Broker(ConnectionConfig(**plain, tls_cert=cert, tls_key=key)) as broker:
            assert broker.connected
        assert "set tls_cert and tls_key" in await refused(ConnectionConfig(**plain))
        cert, key = theirs.issue("stranger")
        short: dict[str, Any] = {**plain, "connect_timeout_seconds": 1.0}
        with pytest.raises(NotConnected):
            await Broker(ConnectionConfig(**short, tls_cert=cert, tls_key=key)).open()


async def test_handshake_first(ours: Authority) -> None:
    """Not one byte in the clear, for servers that want it so."""
    config = block(ours, *ours.issue("first"), more="handshake_first: true")
    with Server(fast=True, extra_config=config) as server:
        given = ConnectionConfig(nats_url=tls(server), tls_ca=ours.file, tls_handshake="first")
        async with Broker(given) as broker:
            assert broker.connected


def test_everything_passes_through_from_the_environment(
    secure: Server, ours: Authority, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker, client and the blocking client take TLS from the same options."""
    monkeypatch.setenv("HOLDFAST_TLS_CA", ours.file)
    app = Holdfast("shop")

    @app.job
    async def double(n: int) -> int:
        return 2 * n

    with RunningWorker(app, tls(secure), namespace) as client:
        assert isinstance(client, SyncApp)
        assert client.enqueue("double", 21).result(timeout=20) == 42


async def test_doctor_sees_the_encryption(secure: Server, ours: Authority) -> None:
    """It says so, and that nobody is asked for a login."""
    config = ConnectionConfig(nats_url=tls(secure), tls_ca=ours.file)
    found = {f.check: f for f in await examine(config, RecordConfig())}
    assert (found["encryption"].level, found["encryption"].text) == (
        "ok",
        "the connection uses TLS",
    )
    assert "requires no login" in found["login"].text


def test_options_that_cannot_work_are_refused() -> None:
    """Before anything is connected."""
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"tls_cert": "a"}, "belong together"),
        ({"tls_handshake": "first"}, "needs TLS"),
        ({"tls_handshake": "never"}, "must be"),
        ({"credentials_file": "a", "token": "b"}, "different ways to log in"),
        ({"inbox_prefix": "a.>"}, "not usable"),
    )
    for given, text in wrong:
        with pytest.raises(ConfigError, match=text):
            ConnectionConfig(**given)


async def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """A missing authority, credentials that others may read."""
    with pytest.raises(ConfigError, match="TLS files cannot be used"):
        await Broker(ConnectionConfig(tls_ca=str(tmp_path / "none.pem"))).open()
    with pytest.raises(ConfigError, match="cannot be read"):
        await Broker(ConnectionConfig(credentials_file=str(tmp_path / "none.json"))).open()
    loose = tmp_path / "loose.json"
    loose.write_text("{}")
    loose.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        await Broker(ConnectionConfig(credentials_file=str(loose))).open()
