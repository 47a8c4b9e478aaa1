"""nats-py without aiohttp, which only `ws://` needs.

The library imports aiohttp wherever it is installed: 12 MB and a fifth of a second in every
process, for a transport that few use. Importing this module first defers that until the first
connection over a websocket. Other imports of aiohttp are not affected.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_AIOHTTP = "aiohttp"


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


_import_transport()
