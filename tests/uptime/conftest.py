"""What the tests of apps/uptime share: a separate environment, and a certificate authority."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from holdfast.server import Server

LOCAL = "127.0.0.1,::1"


@pytest.fixture(autouse=True)
def _own_environment(
    monkeypatch: pytest.MonkeyPatch,
    namespace: str,
) -> None:
    """Each test has its own namespace, and may probe this machine."""
    monkeypatch.setenv("UPTIME_ALLOW_PRIVATE", LOCAL)
    monkeypatch.setenv("UPTIME_SHORTEST_INTERVAL", "1")
    monkeypatch.setenv("HOLDFAST_NAMESPACE", namespace)


@pytest.fixture
def store(nats: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server that stores the monitor's data."""
    monkeypatch.setenv("HOLDFAST_NATS_URL", nats.url)
    return nats


class Authority:
    """A private certificate authority, made by openssl."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "ca.pem"
        self._run(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-days", "30"),
            *("-subj", "/CN=Test authority"),
            *("-addext", "basicConstraints=critical,CA:TRUE"),
            *("-addext", "keyUsage=critical,keyCertSign"),
        )

    def issue(self, name: str, alt: str, days: int = 90) -> tuple[Path, Path]:
        """A certificate and its key; `alt` as openssl writes it: DNS:example.org."""
        self._run(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"),
        )
        (self.folder / f"{name}.ext").write_text(f"subjectAltName={alt}\n")
        self._run(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-out", f"{name}.pem", "-extfile", f"{name}.ext"),
            *("-days", str(days)),  # negative: already expired
        )
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"

    def _run(self, *arguments: str) -> None:
        command = ["openssl", *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))
