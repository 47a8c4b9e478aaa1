"""`holdfast …`, killed with -9 right before its n-th write to a bucket (`DIE_AT`).

Everything it sent before that has reached the server. An atomic batch counts as two writes, all but
its last message and then that one, so it can be cut in two as well.
"""

from __future__ import annotations

import os
import signal

from holdfast.broker.connection import Broker
from holdfast.cli import main

_write = Broker._write
_left = int(os.environ["DIE_AT"])


async def _counted(self: Broker, lines: bytes) -> None:
    global _left
    if lines.startswith((b"PUB $KV.", b"HPUB $KV.")):
        _left -= 1
        if _left == 0:
            await self.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    await _write(self, lines)


if __name__ == "__main__":
    Broker._write = _counted  # type: ignore[method-assign]
    main()
