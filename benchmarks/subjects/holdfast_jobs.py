"""Holdfast: the job in one of its delivery modes, asynchronous or plain, and its sender.

The worker is the product's own command: `holdfast worker benchmarks.subjects.holdfast_jobs:app`.
"""

from __future__ import annotations

import os
from typing import Any, cast

from benchmarks import sending
from benchmarks.subjects import job
from holdfast import Holdfast

app = Holdfast("bench")
_mode, _, _kind = os.environ.get("BENCH_VARIANT", "effectively_once").partition(" ")
_delivery: Any = _mode

handler: Any = job.work_in_thread if _kind == "def" else job.work
_keep = os.environ.get("BENCH_KEEP") != "off"
work = app.job(name="work", delivery=_delivery, keep_payload=_keep)(handler)


class HoldfastSender:
    """`enqueue`, and `enqueue_many`."""

    async def open(self) -> None:
        client = cast(Any, await app.backend())
        await client.topology.ensure()

    async def one(self, payload: sending.Payload) -> None:
        await work.enqueue(**payload)

    async def many(self, payloads: list[sending.Payload]) -> None:
        await work.enqueue_many([work.request(**p) for p in payloads])

    async def close(self) -> None:
        await app.close()


if __name__ == "__main__":
    sending.main(HoldfastSender())
