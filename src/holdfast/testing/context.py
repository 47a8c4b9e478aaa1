"""A context for calling a handler as the plain function that it is.

    async def test_resize_publishes_its_key():
        ctx = make_context(attempt=2, epoch=17)
        assert await resize(Image(id=42), ctx) == Thumbnail(key="42-small")
        assert ctx.published == [("image-resized", {"key": "42-small"})]

Nothing is sent: published events and reported progress are kept on the context.
`make_sync_context` is for plain handlers, which get a `SyncContext`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from datetime import datetime
from typing import Any, TypeVar

from holdfast.context import Context, SyncContext
from holdfast.model.job import JobSpec
from holdfast.model.settings import Settings
from holdfast.names import DEFAULT_GROUP
from holdfast.payload import encode_value

T = TypeVar("T")


class _Noted:
    """What a handler did through its context."""

    def __init__(self, owner: bool) -> None:
        self.owner = owner
        self.published: list[tuple[str, Any]] = []
        self.progressed: list[tuple[float | None, str]] = []

    async def publish(self, event: str, data: Any) -> None:
        encode_value(data)  # refuses what could not be sent
        self.published.append((event, data))

    async def still_owner(self) -> bool:
        return self.owner

    async def progress(self, fraction: float | None, note: str) -> None:
        self.progressed.append((fraction, note))


class _Recorded:
    """The calls of a handler, as both fakes record them."""

    _execution: _Noted

    @property
    def published(self) -> list[tuple[str, Any]]:
        """The events so far, each with its data."""
        return self._execution.published

    @property
    def progressed(self) -> list[tuple[float | None, str]]:
        """The progress that the handler has reported so far."""
        return self._execution.progressed


class FakeContext(_Recorded, Context):
    """A `Context` that records its calls."""

    _execution: _Noted


class FakeSyncContext(_Recorded, SyncContext):
    """A `SyncContext` that records its calls, without a thread or a loop."""

    _execution: _Noted

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            coroutine.send(None)
        except StopIteration as end:
            value: T = end.value
            return value
        raise AssertionError("recording a call never waits")


def make_context(
    *,
    run: str = "test-run",
    job: str = "test-job",
    group: str = DEFAULT_GROUP,
    node: str = "test-node",
    attempt: int = 1,
    epoch: int | None = 1,
    headers: dict[str, str] | None = None,
    deadline: datetime | None = None,
    owner: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> FakeContext:
    """A context for an `async def` handler; `owner` is what `still_owner()` answers.

    With `epoch=None` it is that of an `at_least_once` job, whose `ctx.epoch` raises `NoRecord`.
    """
    return FakeContext(
        _Noted(owner),
        **_facts(run, job, group, node, attempt, epoch, headers, deadline, settings),
    )


def make_sync_context(
    *,
    run: str = "test-run",
    job: str = "test-job",
    group: str = DEFAULT_GROUP,
    node: str = "test-node",
    attempt: int = 1,
    epoch: int | None = 1,
    headers: dict[str, str] | None = None,
    deadline: datetime | None = None,
    owner: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> FakeSyncContext:
    """The same for a plain handler."""
    return FakeSyncContext(
        _Noted(owner),
        **_facts(run, job, group, node, attempt, epoch, headers, deadline, settings),
    )


def _facts(
    run: str,
    job: str,
    group: str,
    node: str,
    attempt: int,
    epoch: int | None,
    headers: dict[str, str] | None,
    deadline: datetime | None,
    settings: Mapping[str, Any] | None,
) -> dict[str, Any]:
    return {
        "run": run,
        "spec": JobSpec(job, group),
        "group": group,
        "node": node,
        "attempt": attempt,
        "epoch": epoch,
        "headers": dict(headers or {}),
        "deadline": deadline.timestamp() if deadline else None,
        "settings": (lambda: Settings(settings)) if settings is not None else None,
    }
