"""The only code that speaks to NATS: connection, streams, buckets, objects, the pull loop."""

from holdfast.broker import lean  # noqa: F401 - before anything of nats-py
from holdfast.broker.connection import Broker
from holdfast.broker.kv import Bucket, Entry
from holdfast.broker.pull import Delivery, Pull
from holdfast.broker.wire import Received, Stored

__all__ = ["Broker", "Bucket", "Delivery", "Entry", "Pull", "Received", "Stored"]
