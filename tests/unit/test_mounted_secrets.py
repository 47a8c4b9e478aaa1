"""Secrets that Kubernetes mounts are private, although a group may read them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.identity.files import read_private


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file with a key."""
    path = tmp_path / "login.json"
    path.write_bytes(b"key")
    return path


def _mounted(monkeypatch: pytest.MonkeyPatch, mode: int, *, owner: int, group: int) -> None:
    """Let the file look as a mount of that owner and group does to user 1000."""
    found = os.stat_result((0o100000 | mode, 1, 1, 1, owner, group, 3, 0, 0, 0))
    monkeypatch.setattr("holdfast.identity.files.os.fstat", lambda _: found)
    monkeypatch.setattr("holdfast.identity.files.os.geteuid", lambda: 1000)
    monkeypatch.setattr("holdfast.identity.files.os.getegid", lambda: 1000)
    monkeypatch.setattr("holdfast.identity.files.os.getgroups", lambda: [1000])


def test_mounted_secret_is_read(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's, readable by our own group: only root and we can read it."""
    _mounted(monkeypatch, 0o440, owner=0, group=1000)
    assert read_private(secret, "login") == b"key"


@pytest.mark.parametrize(
    ("mode", "owner", "group"),
    [
        (0o444, 0, 1000),  # everybody may read it
        (0o460, 0, 1000),  # the group may write it
        (0o440, 0, 50),  # a group that is not ours
        (0o440, 1000, 1000),  # ours, and lent to a group
        (0o440, 1001, 1000),  # somebody else's
    ],
)
def test_what_others_may_read_is_refused(
    secret: Path, monkeypatch: pytest.MonkeyPatch, mode: int, owner: int, group: int
) -> None:
    """Every other way to be readable by a group is still refused."""
    _mounted(monkeypatch, mode, owner=owner, group=group)
    with pytest.raises(ConfigError, match="may be read by others"):
        read_private(secret, "login")
