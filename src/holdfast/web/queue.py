"""`Queue`: a FastAPI dependency that gives routes a connected Holdfast app to send runs with.

    queue = Queue(shop)
    api = FastAPI(lifespan=queue.lifespan)

    @api.post("/images")
    async def add(image: Image, jobs: Annotated[Holdfast, Depends(queue)]) -> str:
        return (await jobs.enqueue("resize", image)).id

Without the lifespan it connects with the first run that is sent, and nobody closes the connection.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from holdfast.app import Holdfast


class Queue:
    """Gives the app of which it was made, connected on this event loop."""

    def __init__(self, app: Holdfast) -> None:
        self.app = app

    async def __call__(self) -> Holdfast:
        await self.app.backend()
        return self.app

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Any = None) -> AsyncIterator[None]:
        """Connected from the start of the web app to its end."""
        async with self.app:
            yield
