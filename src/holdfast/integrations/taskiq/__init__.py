"""taskiq with Holdfast's resilience: the names and arguments of taskiq-nats, reimplemented.

    ResilientPullBroker            for PullBasedJetStreamBroker ResilientNATSScheduleSource    for
    NATSKeyValueScheduleSource ResilientNATSResultBackend     for NATSObjectStoreResultBackend
    K8sScheduler                   for TaskiqScheduler, in two replicas HAScheduleSource
    any schedule source, in more than one scheduler LeaderElection                 what these build
    on, usable alone DeadLetters                    messages that the broker gave up: list, replay,
    drop

Needs `pip install holdfast-jobs[taskiq]`.
"""

from __future__ import annotations

try:
    import taskiq as _taskiq  # noqa: F401
except ImportError as missing:
    raise ImportError(
        "holdfast.integrations.taskiq needs taskiq: pip install 'holdfast-jobs[taskiq]'"
    ) from missing

from holdfast.integrations.taskiq.dead import DeadLetter, DeadLetters
from holdfast.integrations.taskiq.election import LeaderElection
from holdfast.integrations.taskiq.ha_source import HAScheduleSource
from holdfast.integrations.taskiq.plain import PlainSerializer
from holdfast.integrations.taskiq.pull_broker import ResilientPullBroker
from holdfast.integrations.taskiq.results import ResilientNATSResultBackend
from holdfast.integrations.taskiq.schedule_source import ResilientNATSScheduleSource
from holdfast.integrations.taskiq.scheduler import K8sScheduler

__all__ = [
    "DeadLetter",
    "DeadLetters",
    "HAScheduleSource",
    "K8sScheduler",
    "LeaderElection",
    "PlainSerializer",
    "ResilientNATSResultBackend",
    "ResilientNATSScheduleSource",
    "ResilientPullBroker",
]
