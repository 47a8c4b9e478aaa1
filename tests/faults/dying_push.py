"""`holdfast …`, killed with -9 right before its n-th write to a bucket (`DIE_AT`).

Everything it sent before that has reached the server. An atomic batch counts as two writes, all but
its last message and then that one, so it can be cut in two as well.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from holdfast.broker.connection import Broker
from holdfast.cli import main

_left = int(os.environ["DIE_AT"])


def _counted(send: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    async def counted(self: Broker, first: Any, *rest: Any) -> Any:
        global _left
        subject = first if isinstance(first, str) else first[0][0] if first else ""
        if subject.startswith("$KV."):
            _left -= 1
            if _left == 0:
                await self.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        return await send(self, first, *rest)

    return counted


if __name__ == "__main__":
    for name in ("store", "put", "send", "publish_all"):
        setattr(Broker, name, _counted(getattr(Broker, name)))
    main()
