"""taskiq with Holdfast's resilience: same names and arguments as taskiq-nats, other insides."""

from holdfast.integrations.taskiq.pull_broker import ResilientPullBroker

__all__ = ["ResilientPullBroker"]
