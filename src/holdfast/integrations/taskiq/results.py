"""`ResilientNATSResultBackend`: taskiq-nats' bucket of results, in JSON.

It takes the arguments of `NATSObjectStoreResultBackend` and keeps its names. A result that JSON
cannot carry is rejected when it is set, as there; pickles are read only on request, and then plain
values only (see `plain`).
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

from taskiq import AsyncResultBackend, ResultGetError
from taskiq.abc.serializer import TaskiqSerializer
from taskiq.depends.progress_tracker import TaskProgress
from taskiq.result import TaskiqResult

from holdfast.broker.objects import Objects
from holdfast.errors import NotFound
from holdfast.integrations.taskiq.connection import Connected, Servers, connect, surely
from holdfast.integrations.taskiq.plain import PlainSerializer, readable

R = TypeVar("R")


class ResilientNATSResultBackend(Connected, AsyncResultBackend[R], Generic[R]):
    """Results and progress in an object bucket."""

    def __init__(
        self,
        servers: Servers,
        keep_results: bool = True,
        bucket_name: str = "taskiq_results",
        serializer: TaskiqSerializer | None = None,
        *,
        read_pickled: bool = False,
        **connect_options: Any,
    ) -> None:
        """The arguments of taskiq-nats; `read_pickled`: also read what it has pickled."""
        self.servers: Final = servers
        self.keep_results: Final = keep_results
        self.bucket_name: Final = bucket_name
        self.serializer = serializer or PlainSerializer(read_pickled=read_pickled)
        self.connect_options: Final = connect_options

    async def startup(self) -> None:
        """Connect; the first result creates the bucket."""
        self._broker = await connect(self.servers, self.connect_options, name="taskiq-results")
        self._objects = Objects(self._broker, self.bucket_name, ttl=None)

    async def shutdown(self) -> None:
        """Disconnect."""
        if self._broker is not None:
            await self._broker.close()

    async def set_result(self, task_id: str, result: TaskiqResult[R]) -> None:
        """Store a result, replacing an earlier one."""
        await self._put(task_id, self.serializer.dumpb(result.model_dump(mode="json")))

    async def is_result_ready(self, task_id: str) -> bool:
        """Whether there is a result; this does not read it."""
        step = "looking for a result"
        return await surely(self.connection, lambda: self._objects.exists(task_id), step)

    async def get_result(self, task_id: str, with_logs: bool = False) -> TaskiqResult[R]:
        """The result; `ResultGetError` when there is none."""
        try:
            value = await self._get(task_id)
        except NotFound as error:
            raise ResultGetError from error
        if not self.keep_results:
            await self._objects.delete(task_id)
        found = TaskiqResult[R].model_validate(readable(self.serializer, value))
        if not with_logs:
            found.log = None
        return found

    async def set_progress(self, task_id: str, progress: TaskProgress[Any]) -> None:
        """Store how far a task has come."""
        value = self.serializer.dumpb(progress.model_dump(mode="json"))
        await self._put(f"progress:{task_id}", value)

    async def get_progress(self, task_id: str) -> TaskProgress[Any] | None:
        """How far a task has come; None if it never said."""
        try:
            value = await self._get(f"progress:{task_id}")
        except NotFound:
            return None
        return TaskProgress[Any].model_validate(readable(self.serializer, value))

    async def _put(self, name: str, value: bytes) -> None:
        step = "storing a result"
        await surely(self.connection, lambda: self._objects.put(name, value), step)

    async def _get(self, name: str) -> bytes:
        step = "reading a result"
        return await surely(self.connection, lambda: self._objects.get(name), step)
