"""What taskiq's receiver lets a broker see: messages being read, executed, and failing.

Both classes are put in by the broker when it starts and taken out when it stops.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from taskiq.abc.broker import AsyncBroker
from taskiq.abc.formatter import TaskiqFormatter
from taskiq.abc.middleware import TaskiqMiddleware
from taskiq.exceptions import NoResultError, TaskRejectedError
from taskiq.formatters.proxy_formatter import ProxyFormatter
from taskiq.message import BrokerMessage, TaskiqMessage
from taskiq.result import TaskiqResult
from taskiq.serializers.json_serializer import JSONSerializer

from holdfast.errors import Unreadable
from holdfast.integrations.taskiq.deliveries import Deliveries
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
    """First of the middlewares, so that it hears of errors when all others have had their say."""

    def __init__(self, deliveries: Deliveries) -> None:
        super().__init__()
        self._deliveries = deliveries

    def pre_execute(self, message: TaskiqMessage) -> TaskiqMessage:
        """It is about to be executed."""
        if held := self._deliveries.current():
            held.message = message
            held.executing = True
        return message

    async def on_error(
        self, message: TaskiqMessage, result: TaskiqResult[Any], exception: BaseException
    ) -> None:
        """Note a failure that nobody else takes care of; no result while attempts are left."""
        held = self._deliveries.current()
        settled = isinstance(result.error, NoResultError) or isinstance(exception, NoResultError)
        if held is None or settled or held.resent:
            return
        held.failure = exception
        held.final = isinstance(exception, TaskRejectedError) or RETRIES_LABEL in message.labels
        if not self._deliveries.is_held(held):
            await self._deliveries.bury_copy(held)
        elif self._deliveries.wait(held) is not None:
            result.error = NoResultError()


class WatchingFormatter(TaskiqFormatter):
    """The broker's own formatter, and what came of reading each message."""

    def __init__(self, broker: AsyncBroker, deliveries: Deliveries) -> None:
        self.inner = broker.formatter
        self._deliveries = deliveries
        usual = type(self.inner) is ProxyFormatter and type(broker.serializer) is JSONSerializer
        self._read = self._quickly if usual else self.inner.loads

    def dumps(self, message: TaskiqMessage) -> BrokerMessage:
        """As the broker's own."""
        return self.inner.dumps(message)

    def loads(self, message: bytes) -> TaskiqMessage:
        """As the broker's own; a failure is remembered."""
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
        """What taskiq's default does, in a third of the time; what is unusual goes there."""
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
