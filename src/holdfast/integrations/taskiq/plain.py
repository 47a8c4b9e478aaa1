"""Stored values: JSON, and on request what taskiq-nats pickled before.

taskiq-nats pickles what `model_dump(mode="json")` returns: dicts, lists, texts, numbers. Such a
pickle names no class or function. A pickle executes code by naming one. So any pickle that does is
refused before anything in it is called.
"""

from __future__ import annotations

import io
import json
import pickle
from typing import Any

from taskiq.abc.serializer import TaskiqSerializer
from taskiq.serializers import JSONSerializer

from holdfast.errors import Unreadable


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only plain values are read")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to an object outside of it")


class PlainSerializer(TaskiqSerializer):
    """JSON; with `read_pickled`, pickles of plain values are read too and never written."""

    def __init__(self, *, read_pickled: bool = False) -> None:
        self._json = JSONSerializer()
        self._read_pickled = read_pickled

    def dumpb(self, value: Any) -> bytes:
        """As JSON."""
        return self._json.dumpb(value)

    def loadb(self, value: bytes) -> Any:
        """From JSON, or from a plain pickle."""
        if not is_pickle(value):
            return self._json.loadb(value)
        if not self._read_pickled:
            raise Unreadable(
                "it is pickled, as taskiq-nats does by default: say read_pickled=True to read it "
                "(plain values only), and it is JSON from its next write on"
            )
        try:
            return _PlainUnpickler(io.BytesIO(value)).load()
        except Exception as error:  # noqa: BLE001 - a broken pickle may raise anything
            raise Unreadable(f"a pickle was refused: {error}") from None


def is_pickle(value: bytes) -> bool:
    """Whether bytes are a pickle of protocol 2 or newer: no JSON starts that way."""
    return value[:1] == b"\x80"


def readable(serializer: TaskiqSerializer, value: bytes) -> Any:
    """Decode a stored value; any failure is `Unreadable`."""
    try:
        return serializer.loadb(value)
    except Unreadable:
        raise
    except (ValueError, TypeError, LookupError, RecursionError, json.JSONDecodeError) as error:
        raise Unreadable(f"it cannot be read: {error}") from None
