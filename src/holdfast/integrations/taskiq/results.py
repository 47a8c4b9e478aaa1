"""`ResilientNATSResultBackend`: taskiq-nats' bucket of results, in JSON.

It takes the arguments of `NATSObjectStoreResultBackend` and keeps its names. A result that JSON
cannot carry is refused when it is set, as there; nothing is ever unpickled unless told to, and then
plain values only (see `plain`).
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

from taskiq import AsyncResultBackend, ResultGetError
from taskiq.abc.serializer import TaskiqSerializer
from taskiq.depends.progress_tracker import TaskProgress
from taskiq.result import TaskiqResult

from holdfast.broker import Broker
from holdfast.broker.objects import Objects
from holdfast.errors import NotConnected, NotFound
from holdfast.integrations.taskiq.connection import Servers, connect, patiently
from holdfast.integrations.taskiq.plain import PlainSerializer, readable

SECONDS: Final = 5.0

R = TypeVar("R")


class ResilientNATSResultBackend(AsyncResultBackend[R], Generic[R]):
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
        """As taskiq-nats' own; and `read_pickled`: also read what it has pickled."""
        self.servers: Final = servers
        self.keep_results: Final = keep_results
        self.bucket_name: Final = bucket_name
        self.serializer = serializer or PlainSerializer(read_pickled=read_pickled)
        self.connect_options: Final = connect_options
        self._broker: Broker | None = None

    async def startup(self) -> None:
        """Connect; the bucket is made by the first result."""
        self._broker = await connect(self.servers, self.connect_options, name="taskiq-results")
        self._objects = Objects(self._broker, self.bucket_name, ttl=None)

    async def shutdown(self) -> None:
        """Disconnect."""
        if self._broker is not None:
            await self._broker.close()

    @property
    def _connection(self) -> Broker:
        if self._broker is None:
            raise NotConnected("the result backend has not been started: await startup() first")
        return self._broker

    async def set_result(self, task_id: str, result: TaskiqResult[R]) -> None:
        """Keep a result; told again, it is replaced."""
        await self._put(task_id, self.serializer.dumpb(result.model_dump(mode="json")))

    async def is_result_ready(self, task_id: str) -> bool:
        """Whether there is a result; it is not read for that."""
        return await patiently(
            self._connection, lambda: self._objects.exists(task_id), seconds=SECONDS
        )

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
        """Keep how far it has come."""
        value = self.serializer.dumpb(progress.model_dump(mode="json"))
        await self._put(f"progress:{task_id}", value)

    async def get_progress(self, task_id: str) -> TaskProgress[Any] | None:
        """How far it has come; None when it never said."""
        try:
            value = await self._get(f"progress:{task_id}")
        except NotFound:
            return None
        return TaskProgress[Any].model_validate(readable(self.serializer, value))

    async def _put(self, name: str, value: bytes) -> None:
        await patiently(self._connection, lambda: self._objects.put(name, value), seconds=SECONDS)

    async def _get(self, name: str) -> bytes:
        return await patiently(self._connection, lambda: self._objects.get(name), seconds=SECONDS)
