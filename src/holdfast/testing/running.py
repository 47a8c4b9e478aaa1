"""A real worker inside a test: one for every group of an app, in the test's process.

With `async with` it runs on the test's event loop, so handlers and test share objects; with `with`
it runs on a loop in a separate thread, and the block gets a `SyncApp`. It is ready when the block
is entered: streams and consumers exist, so an event published in the first line reaches its
subscribers. Leaving the block drains.

Not covered: what happens when the process dies. For that, run the workers as processes, or use
`holdfast.testing.memory`, where a crash can be simulated.
"""

from __future__ import annotations

import asyncio
from typing import Any

from holdfast.app import Holdfast
from holdfast.config import WorkerConfig
from holdfast.errors import HoldfastError
from holdfast.sync import LoopThread, SyncApp
from holdfast.worker import Worker

READY_SECONDS = 10.0
"""Timeout of a start: many times what it takes, for machines under load."""
_LOOK_SECONDS = 0.01
"""Pause between two checks: short compared to the start, which takes a few tenths of a second."""


class RunningWorker:
    """The workers of an app, for as long as the block lasts. Made by `holdfast_worker`."""

    def __init__(self, app: Holdfast, nats_url: str, namespace: str, **config: Any) -> None:
        self.app = app
        self.workers: list[Worker] = []
        self._connection = {"nats_url": nats_url, "namespace": namespace}
        self._config = config
        self._tasks: list[asyncio.Task[None]] = []
        self._before: dict[str, str | None] = {}
        self._thread: LoopThread | None = None
        self._client = SyncApp(app)

    async def __aenter__(self) -> Holdfast:
        self._before = dict(self.app._overrides)
        self.app._overrides.update(self._connection)
        for group in sorted({job.spec.group for job in self.app.jobs.values()}):
            config = WorkerConfig(**{"group": group, **self._config})
            self.workers.append(Worker(self.app, config))
        self._tasks = [
            asyncio.create_task(w.run(), name=f"holdfast-test-worker-{w.config.group}")
            for w in self.workers
        ]
        try:
            await self._until_ready()
        except BaseException:
            await self._stop()
            raise
        return self.app

    async def __aexit__(self, *exc: object) -> None:
        await self._stop()
        for task in self._tasks:
            task.result()  # a worker that failed fails the test

    def __enter__(self) -> SyncApp:
        self._thread = LoopThread(self.app)
        try:
            self._thread.wait(self.__aenter__())
        except BaseException:
            self._thread.close()
            raise
        return self._client

    def __exit__(self, *exc: object) -> None:
        assert self._thread is not None
        self._client.close()
        try:
            self._thread.wait(self.__aexit__(*exc))
        finally:
            self._thread.close()

    async def _until_ready(self) -> None:
        """Wait until every consumer exists; raise if a worker ends before that."""
        try:
            async with asyncio.timeout(READY_SECONDS):
                while not all(_ready(worker) for worker in self.workers):
                    ended = [task for task in self._tasks if task.done()]
                    for task in ended:
                        task.result()
                    await asyncio.wait(self._tasks, timeout=_LOOK_SECONDS)
        except TimeoutError:
            raise HoldfastError(
                f"the worker was not ready after {READY_SECONDS:g} s: see the log"
            ) from None

    async def _stop(self) -> None:
        for worker in self.workers:
            worker.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.app.close()
        self.app._overrides.clear()
        self.app._overrides.update(self._before)


def _ready(worker: Worker) -> bool:
    return worker.pulling
