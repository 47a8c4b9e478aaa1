"""A health socket that cannot be opened says which, why and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.health import Health, HealthServer


async def test_socket_with_a_long_path_is_named(tmp_path: Path) -> None:
    """The error names the socket and TMPDIR, not a port that nobody chose."""
    path = str(tmp_path / ("x" * 120))
    with pytest.raises(ConfigError, match=r"too long.*TMPDIR") as told:
        async with HealthServer("", 0, lambda: Health(True, [], lambda: b""), path=path):
            pass
    assert path in str(told.value)
    assert "port" not in str(told.value)
