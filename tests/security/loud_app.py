"""Jobs that print hostile texts, for a worker process."""

from __future__ import annotations

import logging

from holdfast import Backoff, Holdfast
from tests.security.hostile import TEXT

app = Holdfast("loud")


@app.job(retry=Backoff.never())
async def shout(times: int) -> None:
    logging.getLogger("shop").warning("a host said %s", TEXT)
    raise RuntimeError(TEXT + "\n12:00:00.000 INFO    worker: all is well")
