"""The command line as its users have it: a process with arguments, input, output and exit code."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from holdfast import Holdfast


@dataclass(frozen=True)
class Ended:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its output, read as JSON."""
        return json.loads(self.out)


def environment(app: Holdfast) -> dict[str, str]:
    """The environment in which a command finds the app's namespace."""
    config = app.connection_config()
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
    return kept | {"HOLDFAST_NATS_URL": config.nats_url, "HOLDFAST_NAMESPACE": config.namespace}


async def holdfast(app: Holdfast, *arguments: str | bytes, stdin: bytes = b"") -> Ended:
    """Run `holdfast …` against the app's namespace and wait for its end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "holdfast",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(app),
    )
    out, err = await process.communicate(stdin)
    assert process.returncode is not None
    ended = Ended(process.returncode, out.decode(), err.decode())
    assert "Traceback" not in ended.err, ended.err
    return ended
