"""What only a server's monitoring endpoint tells: how it syncs, how large the cluster is.

The endpoint is plain HTTP and often closed to the outside, so not reaching it is no error: whoever
asks gets None and says that it could not be checked.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

CLIENT_PORT: Final = 4222
MONITOR_PORT: Final = 8222
ANSWER_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Jetstream:
    """JetStream on one server, as its monitor shows it."""

    url: str
    sync_always: bool
    sync_seconds: float
    storage_bytes: int
    storage_limit: int
    """What it may use on its disk; 0: not said."""
    cluster_size: int


def derived_urls(servers: Sequence[str]) -> list[str]:
    """Where the monitors of these servers probably are: 8222 for 4222, and so on."""
    found = []
    for server in servers:
        parts = urlsplit(server)
        port = (parts.port or CLIENT_PORT) + MONITOR_PORT - CLIENT_PORT
        host = parts.hostname or "127.0.0.1"
        found.append(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    return found


async def ask(url: str) -> Jetstream | None:
    """JetStream's state and configuration from one monitor; None when it cannot be had."""
    try:
        found = await asyncio.to_thread(_get, f"{url.rstrip('/')}/jsz?config=true")
    except (OSError, http.client.HTTPException, ValueError):
        return None
    config = found.get("config")
    if not isinstance(config, dict):
        return None
    return Jetstream(
        url,
        bool(config.get("sync_always")),
        int(config.get("sync_interval", 0)) / 1e9,
        int(found.get("storage", 0)),
        max(0, int(config.get("max_storage", 0))),
        int((found.get("meta_cluster") or {}).get("cluster_size", 1)),
    )


def _get(url: str) -> dict[str, Any]:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("a monitor has an http address")
    with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
        return dict(json.loads(answer.read()))
