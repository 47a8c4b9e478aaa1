"""The parent's side of rendering: one child process, started on demand, killed if it hangs.

Guaranteed: `render` ends within its limit plus the time of requests queued before it; after a kill
the next request gets a fresh child. An idle child exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from holdfast.errors import SettingsError
from holdfast.settings.child import LENGTH
from holdfast.settings.rendering import Values

RENDER_SECONDS: Final = 5.0  # templates take milliseconds: longer is an endless loop
IDLE_SECONDS: Final = 30.0  # reuses the child in a burst, then frees its memory
_MARGIN_SECONDS: Final = 20.0
"""The child ends itself in time; this covers one that is still starting or was frozen."""


class Renderer:
    """Renders in a child process, one request at a time."""

    def __init__(self, seconds: float = RENDER_SECONDS, idle_seconds: float = IDLE_SECONDS) -> None:
        self._seconds = seconds
        self._idle_seconds = idle_seconds
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None

    async def render(self, files: Sequence[tuple[str, str]], facts: Mapping[str, Any]) -> Values:
        """Render and merge files; `SettingsError` names the template at fault."""
        async with self._turn:
            self._keep()
            try:
                answer = await self._ask(files, facts)
            except BaseException:
                await self._kill()
                raise
            self._idle = asyncio.get_running_loop().call_later(self._idle_seconds, self._hang_up)
        if "error" in answer:
            raise SettingsError(answer["error"], reason=answer.get("reason", "template"))
        values: Values = answer["values"]
        return values

    async def close(self) -> None:
        """Stop the child."""
        self._keep()
        await self._kill()

    async def _ask(
        self, files: Sequence[tuple[str, str]], facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        request = {"files": files, "facts": facts, "seconds": self._seconds}
        body = json.dumps(request, default=str).encode()
        child = await self._started()
        assert child.stdin
        assert child.stdout
        try:
            async with asyncio.timeout(self._seconds + _MARGIN_SECONDS):
                child.stdin.write(LENGTH.pack(len(body)) + body)
                await child.stdin.drain()
                head = await child.stdout.readexactly(LENGTH.size)
                answer = await child.stdout.readexactly(LENGTH.unpack(head)[0])
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            names = ", ".join(f"{file}.yaml" for file, _ in files)
            raise SettingsError(
                f"a template was stopped: rendering {names} took more than {self._seconds:g} s, "
                "or all memory; look for a loop without end",
                reason="template",
            ) from None
        found: dict[str, Any] = json.loads(answer)
        return found

    async def _started(self) -> asyncio.subprocess.Process:
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "holdfast.settings.child",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        return self._child

    def _keep(self) -> None:
        if self._idle:
            self._idle.cancel()
            self._idle = None

    def _hang_up(self) -> None:
        """Close its input, so that the child exits."""
        child, self._child = self._child, None
        if child and child.stdin:
            child.stdin.close()

    async def _kill(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
        child._transport.close()  # type: ignore[attr-defined]  # nothing else closes the pipes
        await asyncio.sleep(0)
