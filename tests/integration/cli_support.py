"""The command line as users see it: a process with arguments, input, output and exit code."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import Holdfast
from tests.integration import prefork


@dataclass(frozen=True)
class Ended:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its output, read as JSON."""
        return json.loads(self.out)


def clean_environment() -> dict[str, str]:
    """Our environment without Holdfast's variables."""
    return {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}


def environment(app: Holdfast) -> dict[str, str]:
    """The environment in which a command finds the app's namespace."""
    config = app.connection_config()
    return clean_environment() | {
        "HOLDFAST_NATS_URL": config.nats_url,
        "HOLDFAST_NAMESPACE": config.namespace,
    }


async def holdfast(app: Holdfast, *arguments: str | bytes, stdin: bytes = b"") -> Ended:
    """Run `holdfast …` against the app's namespace and wait for its end."""
    return await run_command(*arguments, env=environment(app), stdin=stdin)


async def run_command(
    *arguments: str | bytes,
    env: Mapping[str, str],
    cwd: Path | None = None,
    stdin: bytes = b"",
    sources: str = "",
) -> Ended:
    """Run `holdfast …` in a process and wait for its end; a traceback is a failure.

    `sources`: a directory with another version of the package.
    """
    with tempfile.TemporaryDirectory(prefix="hf-") as name:
        files = [Path(name) / part for part in ("in", "out", "err")]
        for file, content in zip(files, (stdin, b"", b""), strict=True):
            file.write_bytes(content)
        wanted = {
            "arguments": [os.fsdecode(a) for a in arguments],
            "env": dict(env),
            "cwd": str(cwd or Path.cwd()),
            "files": [str(file) for file in files],
        }
        reader, writer = await asyncio.open_unix_connection(forking(sources))
        try:
            writer.write(json.dumps(wanted).encode() + b"\n")
            await reader.readline()  # its process
            answer = await reader.readline()
        finally:
            writer.close()
            await writer.wait_closed()
        ended = Ended(int(answer), files[1].read_bytes().decode(), files[2].read_bytes().decode())
    assert "Traceback" not in ended.err, ended.err
    return ended


@functools.cache
def forking(sources: str = "") -> str:
    """The socket of the process that forks commands; one for each version, per pytest process."""
    folder = tempfile.TemporaryDirectory(prefix="hf-")
    address = f"{folder.name}/commands"
    process = subprocess.Popen(
        [sys.executable, "-m", prefork.__name__, address],
        cwd=Path(__file__).parents[2],
        env=clean_environment() | ({"PYTHONPATH": sources} if sources else {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    given, printed = process.stdin, process.stdout
    assert given
    assert printed
    assert printed.readline() == b"ready\n"
    printed.close()

    def end() -> None:
        given.close()
        process.wait(60)
        folder.cleanup()

    atexit.register(end)
    return address
