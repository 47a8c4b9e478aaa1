"""What taskiq's receiver lets a broker see: messages being read, executed, and failing.

The broker adds both classes when it starts and removes them when it stops.
"""

from __future__ import annotations

from collections.abc import Coroutine
from time import monotonic
from typing import Any, Final

import msgspec
from taskiq.abc.broker import AsyncBroker
from taskiq.abc.formatter import TaskiqFormatter
from taskiq.abc.middleware import TaskiqMiddleware
from taskiq.exceptions import NoResultError, TaskRejectedError
from taskiq.formatters.proxy_formatter import ProxyFormatter
from taskiq.message import BrokerMessage, TaskiqMessage
from taskiq.middlewares import SmartRetryMiddleware
from taskiq.result import TaskiqResult
from taskiq.serializers.json_serializer import JSONSerializer

from holdfast.errors import Unreadable
from holdfast.integrations.taskiq.deliveries import Deliveries, HeldDelivery
from holdfast.model.codec import Codec

RETRIES_LABEL: Final = "_retries"
"""Set by taskiq's own retry middlewares on what they send again."""


class _Wire(msgspec.Struct):
    task_id: str
    task_name: str
    labels: dict[str, Any]
    args: list[Any]
    kwargs: dict[str, Any]
    labels_types: dict[str, int] | None = None


_WIRE: Final = Codec[_Wire](_Wire, "a taskiq message")


class OutcomeMiddleware(TaskiqMiddleware):
    """The first middleware, so that it sees errors after all others have reacted."""

    def __init__(self, deliveries: Deliveries) -> None:
        super().__init__()
        self._deliveries = deliveries

    def pre_execute(
        self, message: TaskiqMessage
    ) -> TaskiqMessage | Coroutine[Any, Any, TaskiqMessage]:
        """An attempt begins."""
        held = self._deliveries.current()
        if held is None:
            return message
        held.message = message
        held.executing = True
        held.began = monotonic()
        held.retries = message.labels.get(RETRIES_LABEL)
        self._deliveries.tally(message).started += 1
        return self._started(held, message) if held.delivery.deliveries > 1 else message

    async def _started(self, held: HeldDelivery, message: TaskiqMessage) -> TaskiqMessage:
        await self._deliveries.start(held)
        return message

    async def on_error(
        self, message: TaskiqMessage, result: TaskiqResult[Any], exception: BaseException
    ) -> None:
        """Note a failure that nothing else handles; no result while attempts are left."""
        held = self._deliveries.current()
        if held is None or self._is_settled(held, message, result, exception):
            return
        held.failure = exception
        held.final = isinstance(exception, TaskRejectedError) or RETRIES_LABEL in message.labels
        if not self._deliveries.is_held(held):
            await self._deliveries.keep_copy(held, "failed", repr(exception), exception)
            return
        await self._deliveries.fail(held)
        if self._deliveries.wait(held) is not None:
            result.error = NoResultError()

    def _is_settled(
        self,
        held: HeldDelivery,
        message: TaskiqMessage,
        result: TaskiqResult[Any],
        exception: BaseException,
    ) -> bool:
        """Whether a retry middleware sends it again, now or through a schedule source.

        A send passes through the broker. One through a source does not; then the middleware has
        counted the retry in the labels of the message it received.
        """
        counted = message.labels.get(RETRIES_LABEL) != held.retries
        resent = held.resent or (counted and self._retries_by_schedule())
        no_result = isinstance(result.error, NoResultError) or isinstance(exception, NoResultError)
        return resent or no_result

    def _retries_by_schedule(self) -> bool:
        return any(
            isinstance(other, SmartRetryMiddleware) and other.schedule_source is not None
            for other in self.broker.middlewares
        )


class WatchingFormatter(TaskiqFormatter):
    """The broker's formatter, noting the outcome of reading each message."""

    def __init__(self, broker: AsyncBroker, deliveries: Deliveries) -> None:
        self.inner = broker.formatter
        self._deliveries = deliveries
        usual = type(self.inner) is ProxyFormatter and type(broker.serializer) is JSONSerializer
        self._read = self._quickly if usual else self.inner.loads

    def dumps(self, message: TaskiqMessage) -> BrokerMessage:
        """As the broker's formatter."""
        return self.inner.dumps(message)

    def loads(self, message: bytes) -> TaskiqMessage:
        """As the broker's formatter; a failure is remembered."""
        held = self._deliveries.current()
        try:
            found = self._read(message)
        except Exception as error:
            if held is not None:
                held.unread = error
            raise
        if held is not None:
            held.message = found
        return found

    def _quickly(self, message: bytes) -> TaskiqMessage:
        """As taskiq's default in a third of the time; unusual messages fall back to it."""
        try:
            wire = _WIRE.decode(message)
        except Unreadable:
            return self.inner.loads(message)
        return TaskiqMessage.model_construct(
            task_id=wire.task_id,
            task_name=wire.task_name,
            labels=wire.labels,
            labels_types=wire.labels_types,
            args=wire.args,
            kwargs=wire.kwargs,
        )
