"""Handlers for pool processes: at the top level of a module, so that they can be imported."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from holdfast import Backoff, Discard, Holdfast, Retry, Snooze, SyncContext

app = Holdfast("pooled")
once = Backoff.never()


class Size(BaseModel):
    width: int
    height: int = 1


@app.job(execution="process", retry=once)
def area(size: Size, times: int = 1) -> dict[str, int]:
    """Computes in a separate process."""
    return {"area": size.width * size.height * times, "pid": os.getpid()}


@app.job(execution="process", retry=once)
def tell(ctx: SyncContext, folder: str) -> list[Any]:
    """Uses everything in its context."""
    ctx.progress(0.5, "half")
    ctx.publish("told", {"run": ctx.run})
    ctx.logger.info("a line of %s", ctx.run)
    return [ctx.run, ctx.attempt, ctx.epoch, ctx.still_owner(), ctx.headers.get("trace"), ctx.job]


@app.job(execution="process", retry=once)
def misbehave(how: str) -> Any:
    """Fails in one of many ways."""
    match how:
        case "raise":
            raise KeyError("x")
        case "stop":
            return next(iter(()))
        case "exit":
            raise SystemExit(3)
        case "result":
            return object()
        case "retry":
            raise Retry("not yet", delay="50ms")
        case "snooze":
            raise Snooze("1h", "later")
        case "discard":
            raise Discard("unwanted")
        case "os._exit":
            os._exit(7)
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return how


@app.job(execution="process", retry=once, timeout=1.0)
def hang(folder: str) -> None:
    """Runs forever, with a child that does too."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


@app.job(execution="process", retry=once)
def hang_without_limit(folder: str) -> None:
    """The same without a timeout."""
    Path(folder, "pids").write_text(f"{os.getpid()}")
    time.sleep(600)
