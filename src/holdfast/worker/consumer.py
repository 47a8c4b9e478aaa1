"""`run_consumer`: one call for a job that lives in its own directory and its own container.

    from holdfast import run_consumer

    async def handle_event(data: dict, publish) -> None:
        await publish("image-downloaded", {"key": ...})

    if __name__ == "__main__":
        run_consumer(handler=handle_event, job_name="image-download")

The handler takes what any job's handler takes, or `(data, publish)`. Configuration comes from
`HOLDFAST_*`, with `NATS_URL` understood too; health is served on port 8080.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from holdfast.app import Holdfast
from holdfast.config import LogConfig, RecordConfig, WorkerConfig, load
from holdfast.context import Context, SyncContext
from holdfast.log_lines import configure_logging
from holdfast.process import run_role
from holdfast.worker.worker import Worker

HEALTH_PORT = 8080  # the usual port of a container that serves one thing


def consumer_app(handler: Callable[..., Any], job_name: str, **contract: Any) -> Holdfast:
    """The app with one job that `run_consumer` runs; use it in tests of the handler."""
    app = Holdfast(job_name, nats_url=_url())
    app.job(name=job_name, **contract)(_adapt(handler))
    return app


def run_consumer(
    handler: Callable[..., Any],
    job_name: str,
    *,
    health_port: int | None = None,
    **contract: Any,
) -> None:
    """Run a worker for one handler until SIGTERM; exits the process.

    `contract` is what `@app.job` takes: `on=`, `retry=`, `timeout=`, `group=`, `delivery=` …
    """
    log = load(LogConfig)
    configure_logging(log.level, log.format)
    app = consumer_app(handler, job_name, **contract)
    config = load(WorkerConfig, group=app.jobs[job_name].spec.group)
    port = health_port if health_port is not None else (config.health_port or HEALTH_PORT)
    config = dataclasses.replace(config, health_port=port)
    sys.exit(run_role(lambda: Worker(app, config, records=load(RecordConfig), whole_process=True)))


def _url() -> str | None:
    return None if os.environ.get("HOLDFAST_NATS_URL") else os.environ.get("NATS_URL")


def _adapt(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Turn `(data, publish)` into a handler with a context."""
    signature = inspect.signature(handler)
    parameters = list(signature.parameters.values())
    if len(parameters) != 2 or parameters[1].name != "publish":
        return handler
    if inspect.iscoroutinefunction(handler):

        async def adapted(data: Any, ctx: Context) -> Any:
            return await handler(data, ctx.publish)

        chosen: Callable[..., Any] = adapted
    else:

        def adapted_sync(data: Any, ctx: SyncContext) -> Any:
            return handler(data, ctx.publish)

        chosen = adapted_sync
    functools.update_wrapper(chosen, handler)  # its annotations are resolved where it was defined
    data = parameters[0].replace(name="data", kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ctx = data.replace(name="ctx", annotation=Context, default=inspect.Parameter.empty)
    chosen.__signature__ = signature.replace(parameters=[data, ctx])  # type: ignore[attr-defined]
    return chosen
