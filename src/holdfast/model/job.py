"""What a job promises: the part of its definition that travels, without the function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from holdfast import durations
from holdfast.errors import DefinitionError, InvalidInput
from holdfast.model import backoff
from holdfast.model.backoff import Backoff
from holdfast.model.debounce import Debounce
from holdfast.model.limit import Limit
from holdfast.model.run import Restart
from holdfast.names import DEFAULT_GROUP, check_event, check_name

Delivery = Literal["effectively_once", "at_least_once", "at_most_once"]
Fallback = Literal["wait", "fail", "cancel"]
Execution = Literal["worker", "process"]
Priority = Literal["high", "normal", "low"]
Lane = Literal["loop", "thread", "process"]
"""Where a handler runs; a worker has a number of places of each kind."""
RestartSaid = Literal["", "group", "job"]
"""Who in the code chose a restart strategy."""
MOST_LIMITS: Final = 2
"""Most limits of a job: each costs two writes per run, and a run that waits for one keeps its
places in the others."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Defaults for all jobs of a group.

    `fallback` says what happens to a run that is sent while no worker of the group is alive: it
    waits for one, sending it fails, or it is accepted as cancelled.
    """

    name: str
    restart: Restart | None = None
    """None leaves it to the configuration and the default."""
    fallback: Fallback = "wait"
    profile: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "group")
        owner = f"group {self.name!r}"
        if self.restart is not None:
            _check_choice(owner, "restart", self.restart, get_args(Restart))
        _check_choice(owner, "fallback", self.fallback, get_args(Fallback))
        if self.profile:
            _check_choice(owner, "profile", self.profile, ("local", "lan", "wan"))


def _check_choice(owner: str, what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise DefinitionError(f"{owner}: {what} {value!r} is not one of {', '.join(choices)}")


def _time(seconds: float | None) -> str:
    return durations.text(seconds) if seconds else ""


def _per(member: str) -> str:
    return f" per {member}" if member else ""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job's name and contract; impossible mixes are refused here."""

    name: str
    group: str = DEFAULT_GROUP
    delivery: Delivery = "effectively_once"
    retry: Backoff = backoff.DEFAULT
    restart: Restart = "immediately"
    timeout_seconds: float | None = None
    run_timeout_seconds: float | None = None
    on: tuple[str, ...] = ()
    fallback: Fallback = "wait"
    restart_said: RestartSaid = ""
    """Where the restart strategy was chosen: by the job, by its group, or nowhere if it is the
    default."""
    execution: Execution = "worker"
    """Where handlers run: in the worker's own process, or in a process of its pool."""
    keep_payload: bool = True
    """Whether the payloads of its runs are kept in the history."""
    limits: tuple[Limit, ...] = ()
    """The limits on its runs over all workers, in the order in which they are taken."""
    debounce: Debounce | None = None
    """The debounce rule: only the last run of a burst is executed."""
    priority: Priority = "normal"
    """Which of the waiting runs a worker starts first."""
    flow: bool = False
    """Whether its runs are flows: each has a journal, and may wait without a worker."""

    def __post_init__(self) -> None:
        check_name(self.name, "job")
        check_name(self.group, "group")
        for event in self.on:
            check_event(event)
        self._check_choices()
        self._check_times()
        self._check_limits()

    def configured(self, default: str, by_group: Mapping[str, str]) -> JobSpec:
        """The contract with the restart strategy that the configuration chooses.

        In order of precedence: what the job says, what is configured for its group, what the code
        says about the group, the configured default. Only `effectively_once` jobs have a choice.
        """
        if self.restart_said == "job" or self.delivery != "effectively_once":
            return self
        chosen = by_group.get(self.group) or ("" if self.restart_said == "group" else default)
        return replace(self, restart=chosen) if chosen else self  # type: ignore[arg-type]

    @property
    def recorded(self) -> bool:
        """Whether every run of it has a record (and so a result, an epoch, a status)."""
        return self.delivery != "at_least_once"

    def describe(self) -> dict[str, str]:
        """The contract for people, without options at their defaults."""
        found = {
            "delivery": self.delivery,
            "retry": self.retry.describe(),
            "timeout": _time(self.timeout_seconds),
            "timeout of the whole run": _time(self.run_timeout_seconds),
            "after a crash": f"restart {self.restart}".replace("_", " "),
            "limits": "; ".join(str(limit.numbers) + _per(limit.per) for limit in self.limits),
            "debounce": _time(self.debounce.quiet) + _per(self.debounce.per)
            if self.debounce
            else "",
            "priority": "" if self.priority == "normal" else self.priority,
            "executed in": "a pool of processes" if self.execution == "process" else "",
            "without a worker": "" if self.fallback == "wait" else f"sending: {self.fallback}",
            "subscribes to": ", ".join(self.on),
            "payloads": "" if self.keep_payload else "not kept in the history",
        }
        return {name: text for name, text in found.items() if text}

    def _check_choices(self) -> None:
        owner = f"job {self.name!r}"
        _check_choice(owner, "delivery", self.delivery, get_args(Delivery))
        _check_choice(owner, "execution", self.execution, get_args(Execution))
        _check_choice(owner, "restart", self.restart, get_args(Restart))
        _check_choice(owner, "priority", self.priority, get_args(Priority))
        if self.delivery == "at_most_once" and self.retry.attempts > 1:
            raise DefinitionError(
                f"job {self.name!r}: at_most_once allows one attempt only: leave retry out, "
                "or choose at_least_once or effectively_once"
            )
        if self.delivery == "at_most_once" and self.restart != "never":
            raise DefinitionError(
                f"job {self.name!r}: at_most_once implies restart='never': leave restart out"
            )
        if self.delivery == "at_least_once" and self.restart != "immediately":
            raise DefinitionError(
                f"job {self.name!r}: restart={self.restart!r} needs the run's record, which "
                "at_least_once does not keep: choose effectively_once"
            )

    @property
    def ordered(self) -> bool:
        """Whether its runs start in the order in which they were accepted."""
        return bool(self.limits) and self.limits[0].ordered

    def queue_of(self, priority: str | None) -> str:
        """The queue of a run with a priority; empty (the job's own queue) for the job's own
        priority."""
        if priority is None or priority == self.priority:
            return ""
        if priority not in get_args(Priority):
            choices = ", ".join(get_args(Priority))
            raise InvalidInput(f"priority is one of {choices}, not {priority!r}")
        if self.ordered:
            raise InvalidInput(
                f"job {self.name!r} is ordered: its runs start in the order in which they were "
                "accepted, so a run has no priority; give the job one, priority= in @app.job"
            )
        return priority

    def _check_limits(self) -> None:
        if self.limits and self.delivery == "at_least_once":
            raise DefinitionError(
                f"job {self.name!r}: a place in a limit belongs to a claim, which at_least_once "
                "does not make: choose effectively_once or at_most_once"
            )
        if self.debounce and self.delivery == "at_least_once":
            raise DefinitionError(
                f"job {self.name!r}: a debounced run ends in its record, which at_least_once does "
                "not keep: choose effectively_once or at_most_once"
            )
        if len(self.limits) > MOST_LIMITS:
            raise DefinitionError(
                f"job {self.name!r}: at most {MOST_LIMITS} limits, not {len(self.limits)}: a run "
                "keeps its places in the first ones while it waits for the next"
            )
        if sum(limit.ordered for limit in self.limits) > 1:
            raise DefinitionError(f"job {self.name!r}: only one of its limits can be ordered")

    def _check_times(self) -> None:
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise DefinitionError(f"job {self.name!r}: timeout must be more than 0")
        if self.run_timeout_seconds is not None:
            if self.run_timeout_seconds <= 0:
                raise DefinitionError(f"job {self.name!r}: run_timeout must be more than 0")
            if self.timeout_seconds and self.timeout_seconds > self.run_timeout_seconds:
                raise DefinitionError(
                    f"job {self.name!r}: timeout (one attempt) is longer than run_timeout "
                    "(all attempts together)"
                )
