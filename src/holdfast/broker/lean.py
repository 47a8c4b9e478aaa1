"""nats-py without aiohttp, which only `ws://` needs, and without its JetStream client.

The library imports aiohttp wherever it is installed: 12 MB and a fifth of a second in every
process, for a transport that few use. Importing this module first defers that until the first
connection over a websocket. `nats.js`, another 40 ms, is deferred until somebody uses it. Other
imports of either are not affected.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_AIOHTTP = "aiohttp"
_JETSTREAM = "nats.js"


class _Later:
    """A module that is imported on first use."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_AIOHTTP), name)


def _import_transport() -> ModuleType:
    if _AIOHTTP in sys.modules or "nats.aio.transport" in sys.modules:
        return importlib.import_module("nats.aio.transport")
    sys.modules[_AIOHTTP] = None  # type: ignore[assignment]  # makes the import fail
    try:
        transport = importlib.import_module("nats.aio.transport")
    finally:
        del sys.modules[_AIOHTTP]
    if importlib.util.find_spec(_AIOHTTP):
        transport.aiohttp = _Later()  # type: ignore[attr-defined]
    return transport


def _import_client() -> None:
    """Import the client with an empty `nats.js`, and the real one when it is looked up."""
    if "nats" in sys.modules:
        return
    sys.modules[_JETSTREAM] = ModuleType(_JETSTREAM)
    try:
        _import_transport()
        package = importlib.import_module("nats")
    finally:
        del sys.modules[_JETSTREAM]
    package.__dict__.pop("js", None)

    def later(name: str) -> Any:
        if name == "js":
            return importlib.import_module(_JETSTREAM)
        raise AttributeError(f"module 'nats' has no attribute {name!r}")

    package.__getattr__ = later  # type: ignore[method-assign]


_import_client()
