"""Operators and their actions: each `Action` has a role, a preview and an audit line.

The actions themselves are functions under the decorator `action`: see `actions`,
`schedule_actions` and `fleet_actions`. A function's docstring is the sentence that help texts and
the API show; its role says who may do it on the web; its preview says what it would do, for a
confirmation. Calling an action performs it and then writes one line to the audit.

Guaranteed: an action that had an effect writes one line, even when interrupted halfway; one that
was refused, or changed nothing, writes none. Not guaranteed: that the line is stored (see `audit`).

Nothing heavy is imported at the top, because every start of the CLI reads its help from here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, Literal, ParamSpec, TypeVar

if TYPE_CHECKING:
    from holdfast.client import Client
    from holdfast.client.schedules import Schedules
    from holdfast.status.audit import Audit
    from holdfast.status.dead import DeadLetters
    from holdfast.status.fleet import Agents, FleetStatus
    from holdfast.status.flows import Flows
    from holdfast.status.jobs import Jobs
    from holdfast.status.joins import Joins
    from holdfast.status.limits import Limits
    from holdfast.status.nodes import Nodes
    from holdfast.status.runs import Runs
    from holdfast.status.unreadable import UnreadableRecords

P = ParamSpec("P")
R = TypeVar("R")

Role = Literal["operator", "admin"]
"""Who may do it on the web; only an admin may do what cannot be undone. On the command line the
NATS login decides."""

Line = dict[str, Any]
"""What an action reports to the audit: members of `audit.AuditLine`. Empty: nothing changed."""

LONGEST_DETAIL: Final = 500
"""Characters of `detail` in an audit line: an agent's error is part of it, and the ledger should
stay readable."""

NAMED: Final = 8
"""Objects that a confirmation lists by name; more do not fit into a dialog."""


class Operator:
    """An operator who acts through a client, and the services they act on."""

    def __init__(self, client: Client, who: str = "") -> None:
        self.client = client
        self.who = who
        """Their name in the audit; empty: the operating-system user."""

    @cached_property
    def audit(self) -> Audit:
        from holdfast.status.audit import Audit

        return Audit(self.client, self.who)

    @cached_property
    def runs(self) -> Runs:
        from holdfast.status.runs import Runs

        return Runs(self.client)

    @cached_property
    def dead(self) -> DeadLetters:
        from holdfast.status.dead import DeadLetters

        return DeadLetters(self.client)

    @cached_property
    def jobs(self) -> Jobs:
        from holdfast.status.jobs import Jobs

        return Jobs(self.client)

    @cached_property
    def flows(self) -> Flows:
        from holdfast.status.flows import Flows

        return Flows(self.client)

    @cached_property
    def limits(self) -> Limits:
        from holdfast.status.limits import Limits

        return Limits(self.client)

    @cached_property
    def schedules(self) -> Schedules:
        from holdfast.client.schedules import Schedules

        return Schedules(self.client)

    @cached_property
    def nodes(self) -> Nodes:
        from holdfast.status.nodes import Nodes

        return Nodes(self.client)

    @cached_property
    def agents(self) -> Agents:
        from holdfast.status.fleet import Agents

        return Agents(self.client)

    @cached_property
    def joins(self) -> Joins:
        from holdfast.status.joins import Joins

        return Joins(self.client)

    @cached_property
    def fleet(self) -> FleetStatus:
        from holdfast.status.fleet import FleetStatus

        return FleetStatus(self.client)

    @cached_property
    def unreadable(self) -> UnreadableRecords:
        from holdfast.status.unreadable import UnreadableRecords

        return UnreadableRecords(self.client)


class Preview:
    """What an action would do, shown for confirmation."""

    def __init__(self, title: str, *effects: str, listed: Sequence[str] = ()) -> None:
        self.title = title
        self.effects = effects
        self.listed = shortlist(listed)


class Action(Generic[P, R]):
    """One thing that an operator can do: `await pause_job(operator, job, group)`."""

    def __init__(
        self,
        noun: str,
        verb: str,
        role: Role,
        button: str,
        danger: bool,
        call: Callable[Concatenate[Operator, Line, P], Awaitable[R]],
    ) -> None:
        self.noun = noun
        self.verb = verb
        self.role = role
        self.button = button
        """The label of the confirmation's button."""
        self.danger = danger
        """Whether it cannot be undone."""
        self.doc = " ".join((call.__doc__ or "").split())
        """What it does, in one or two sentences."""
        self._call = call
        self._preview: Callable[Concatenate[Operator, P], Awaitable[Preview]] | None = None

    async def __call__(self, by: Operator, *args: P.args, **kwargs: P.kwargs) -> R:
        """Perform the action and write it to the audit."""
        line: Line = {}
        try:
            return await self._call(by, line, *args, **kwargs)
        finally:
            if line:
                await by.audit.write(self.verb, noun=self.noun, **line)

    def previewed(
        self, preview: Callable[Concatenate[Operator, P], Awaitable[Preview]]
    ) -> Callable[Concatenate[Operator, P], Awaitable[Preview]]:
        """Decorate the function that says what this action would do."""
        self._preview = preview
        return preview

    async def preview(self, by: Operator, *args: P.args, **kwargs: P.kwargs) -> Preview:
        """Describe what the action would do, without doing it."""
        if self._preview is None:
            return Preview(f"{self.button}?", self.doc)
        return await self._preview(by, *args, **kwargs)


ACTIONS: Final[dict[tuple[str, str], Action[..., Any]]] = {}
"""Every action by noun and verb, as the CLI names them."""


def action(
    noun: str, verb: str, role: Role, button: str, *, danger: bool = False
) -> Callable[[Callable[Concatenate[Operator, Line, P], Awaitable[R]]], Action[P, R]]:
    """Register a function in the table of actions."""

    def enter(call: Callable[Concatenate[Operator, Line, P], Awaitable[R]]) -> Action[P, R]:
        made = Action(noun, verb, role, button, danger, call)
        ACTIONS[noun, verb] = made
        return made

    return enter


def many(count: int, noun: str) -> str:
    """A count with its noun: `1 run`, `3 runs`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shortlist(names: Sequence[str]) -> list[str]:
    """The first `NAMED` names, then how many more there are."""
    more = len(names) - NAMED
    return [*names[:NAMED], *([f"… and {more} more"] if more > 0 else [])]


def sentence(text: str) -> str:
    """Capitalize a text and end it with a full stop."""
    return f"{text[:1].upper()}{text[1:]}."
