"""What people type: payloads, headers, times, and texts in their editor."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.errors import InvalidInput, InvalidPayload

if TYPE_CHECKING:
    from holdfast.client import Client
    from holdfast.status.listing import RunFilter

MEMORY: Final = Path("/dev/shm")
"""Where Linux keeps files in memory: a text with secrets need not touch a disk."""


def read_payload(text: str | None) -> bytes:
    """The bytes to send, exactly as given; refused unless they are JSON."""
    if text is None:
        return b""
    if text == "-":
        body = sys.stdin.buffer.read()
    elif text.startswith("@"):
        body = _read_file(text[1:])
    else:
        body = _bytes_of(text)
    _check_json(body)
    return body


def _bytes_of(text: str) -> bytes:
    """An argument's bytes, even if they are not valid text."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidPayload("the payload is not UTF-8") from None


def _read_file(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInput(f"payload file {name!r} cannot be read: {reason}") from None


def _check_json(body: bytes) -> None:
    import msgspec

    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise InvalidPayload(
            f"the payload is not JSON ({error}): a text needs its own quotes, as in '\"text\"'"
        ) from None


def headers_of(pairs: Sequence[str] | None) -> dict[str, str]:
    """The headers of `HeaderOption`."""
    headers: dict[str, str] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals:
            raise InvalidInput(f"--header takes NAME=VALUE, not {pair!r}")
        headers[name.strip()] = value.strip()
    return headers


def instant(text: str | None, client: Client, what: str) -> float:
    """`10m` ago, or a time such as `2026-11-16T01:45:00Z`; 0 when none was given."""
    from holdfast import durations

    if not text:
        return 0.0
    with contextlib.suppress(InvalidInput):
        return client.broker.server_now() - durations.seconds(text, what)
    try:
        # A filter may name any time; one that is far away just finds nothing.
        return durations.instant(text, what, latest=math.inf)
    except InvalidInput as error:
        raise InvalidInput(f"{error}, or how long ago: 90s, 10m, 2d") from None


def run_filter(
    client: Client, job: str, group: str, state: str, prefix: str, search: str, since: str | None
) -> RunFilter:
    """The filter of `RUN_FILTERS`."""
    from holdfast.status.listing import RunFilter

    at = instant(since, client, "--since")
    return RunFilter(job, group, state, prefix=prefix, since=at, search=search)


def edited(text: str, name: str) -> str:
    """Let somebody edit a text in $VISUAL, $EDITOR or vi, in a file with this name; returns the
    result."""
    place = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None
    command = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
    with tempfile.TemporaryDirectory(prefix="holdfast-", dir=place) as folder:
        path = Path(folder) / name
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")
        try:
            code = subprocess.run([*command, str(path)], check=False).returncode
        except OSError as error:
            raise InvalidInput(f"{command[0]} cannot be started: {error.strerror}") from None
        if code != 0:
            raise InvalidInput(f"{command[0]} ended with code {code}: nothing was changed")
        return path.read_text(encoding="utf-8")
