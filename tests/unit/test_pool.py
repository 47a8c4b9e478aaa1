"""Handlers in processes of the pool: what they get, what they may do, how they end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from holdfast import Backoff, Holdfast
from holdfast.errors import DefinitionError, HandlerError, RunCancelled, RunFailed
from holdfast.testing import memory
from tests import pooled_app
from tests.pooled_app import app
from tests.support import until


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


async def test_handler_runs_in_another_process() -> None:
    """It gets its payload by its types and gives its result; one process serves many runs."""
    async with memory(app) as mem:
        first = await pooled_app.area.enqueue(pooled_app.Size(width=6), 7)
        second = await pooled_app.area.enqueue(pooled_app.Size(width=2, height=3))
        await mem.drain()
        one, other = await first.result(), await second.result()
        assert (one["area"], other["area"]) == (42, 6)
        assert one["pid"] == other["pid"] != os.getpid()


async def test_context_works_over_the_socket(tmp_path: Path) -> None:
    """Progress, events, ownership and facts are those of the attempt in the worker."""
    async with memory(app) as mem:
        run = await pooled_app.tell.options(headers={"trace": "abc"}).enqueue(str(tmp_path))
        await mem.drain()
        record = await mem.record(run.id)
        assert record is not None
        assert record.progress is not None
        assert (record.progress.fraction, record.progress.note) == (0.5, "half")
        assert mem.events[0].data == {"run": run.id}
        result = await run.result()
        assert [result[0], result[1], *result[3:]] == [run.id, 1, True, "abc", "tell"]


ENDS = {
    "raise": ("failed", "KeyError: 'x'"),
    "stop": ("failed", "StopIteration"),
    "exit": ("failed", "SystemExit: 3"),
    "result": ("invalid", "not possible as JSON"),
    "os._exit": ("failed", "exit code 7"),
    "segfault": ("failed", "SIGSEGV"),
    "kill": ("failed", "SIGKILL"),
}


async def test_bad_end_in_a_process_is_a_failed_attempt() -> None:
    """What it raised, or the signal that killed it, is in the record; the next run is well."""
    async with memory(app) as mem:
        runs = {await pooled_app.misbehave.enqueue(how): how for how in ENDS}
        well = await pooled_app.misbehave.enqueue("nothing")
        await mem.drain()
        letters = {letter.run: letter for letter in mem.dead}
        for run, how in runs.items():
            letter = letters[run.id]
            reason, error = ENDS[how]
            assert letter.reason == reason
            assert error in letter.error
            if how == "raise":
                assert "in misbehave" in letter.traceback
                assert "holdfast/worker" not in letter.traceback
        assert await well.result() == "nothing"


async def test_signals_steer_from_another_process() -> None:
    """`Discard`, `Snooze` and `Retry` mean what they mean elsewhere."""
    async with memory(app) as mem:
        discarded = await pooled_app.misbehave.enqueue("discard")
        snoozed = await pooled_app.misbehave.enqueue("snooze")
        tried = await pooled_app.misbehave.enqueue("retry")
        await mem.drain()
        with pytest.raises(RunCancelled, match="unwanted"):
            await discarded.result()
        record = await mem.record(snoozed.id)
        assert record is not None
        assert (record.state, record.failures) == ("failed", 0)
        with pytest.raises(RunFailed, match="not yet"):
            await tried.result()


async def test_timeout_kills_the_process_and_what_it_started(tmp_path: Path) -> None:
    """Nothing of a handler that is over its time is left, not even its children."""
    async with memory(app) as mem:
        run = await pooled_app.hang.enqueue(str(tmp_path))
        await mem.drain()
        with pytest.raises(RunFailed, match="longer than 1s"):
            await run.result()
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        await until(lambda: all(map(gone, pids)), 10, "the end of both")


async def test_middleware_sees_the_error_by_its_name() -> None:
    """Its exception has the name and the text of the one that stayed in the other process."""
    seen: list[Any] = []
    wrapped = Holdfast("pooled")
    wrapped.job(name="misbehave", execution="process", retry=Backoff.never())(
        pooled_app.misbehave.func
    )

    @wrapped.middleware
    async def watch(ctx: Any, call_next: Any) -> Any:
        try:
            return await call_next()
        except HandlerError as error:
            seen.append((type(error).__name__, str(error)))
            raise

    async with memory(wrapped) as mem:
        await wrapped.enqueue("misbehave", "raise")
        await mem.drain()
    assert seen == [("KeyError", "'x'")]


def test_handler_that_no_process_could_run_is_refused() -> None:
    """Where the job is defined, with a sentence that says what to do."""
    refused = Holdfast("pooled")
    with pytest.raises(DefinitionError, match="write `def`"):

        @refused.job(execution="process")
        async def waits() -> None: ...

    with pytest.raises(DefinitionError, match="top level of a module"):

        @refused.job(execution="process")
        def local() -> None: ...

    with pytest.raises(DefinitionError, match="not one of worker, process"):
        refused.job(execution="thread")(gone)  # type: ignore[call-overload]
