"""The process that renders templates: it holds no secret and can be killed.

Reads length-prefixed requests from standard input and answers them in order on standard output.
Guaranteed: the kernel's alarm ends the process when a request takes too long, whatever the template
does and even if the parent is dead. Should a template escape the sandbox, resource limits keep it
from using more than `MEMORY_BYTES` and from opening or writing files, where the system has them.
"""

from __future__ import annotations

import contextlib
import encodings.unicode_escape  # noqa: F401 - imported late by the lexer, when no file can be opened
import json
import os
import resource
import signal
import struct
from typing import Any, Final

import jinja2.debug  # noqa: F401 - likewise, at the first error

from holdfast.errors import SettingsError
from holdfast.settings.rendering import render

MEMORY_BYTES: Final = 512 * 1024 * 1024
"""Limit on address space, so it includes the interpreter and its libraries."""
LENGTH: Final = struct.Struct(">I")

_IN, _OUT = 0, 1


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    for text in ("a: {{ facts.a }}", "a: {{ facts.b }}", "{{"):  # triggers Jinja's lazy imports
        _answer({"files": [("warm", text)], "facts": {"a": "1"}})
    _limit()
    while (head := _read(LENGTH.size)) is not None:
        request = json.loads(_read(LENGTH.unpack(head)[0]) or b"{}")
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        answer = json.dumps(_answer(request)).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(LENGTH.pack(len(answer)) + answer)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"values": render(request["files"], request["facts"])}
    except SettingsError as error:
        return {"error": str(error), "reason": error.reason}
    except MemoryError:
        mebibytes = MEMORY_BYTES // 1024**2
        return {"error": f"a template needs more than {mebibytes} MiB of memory: {_files(request)}"}
    except RecursionError:
        return {"error": f"a template calls itself without end: {_files(request)}"}
    except Exception as error:  # noqa: BLE001 - the parent always gets an answer
        what = f"{type(error).__name__}: {error}"
        return {"error": f"a template cannot be rendered ({_files(request)}): {what}"}


def _files(request: dict[str, Any]) -> str:
    return ", ".join(f"{file}.yaml" for file, _ in request["files"])


def _limit() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    for what, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 3),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # not every system has all of them
            resource.setrlimit(what, (most, most))


def _read(size: int) -> bytes | None:
    out = b""
    while len(out) < size:
        piece = os.read(_IN, size - len(out))
        if not piece:
            return None
        out += piece
    return out


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(_OUT, data) :]


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
