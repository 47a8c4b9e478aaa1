"""The functions that an agent offers: an allow-list, nothing else.

A function declares whether it is mutating. Mutating ones run one at a time, the others
concurrently. Arguments are values, or words of a command line: then the function's annotations
decide what a word means. `name=value` names a parameter; a word for a `str` parameter is taken
literally, any other is parsed as JSON if it is JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast import threads
from holdfast.app import Holdfast
from holdfast.context import Context, SyncContext
from holdfast.errors import ConfigError, InvalidInput, NoRecord, Unreadable
from holdfast.job import Job
from holdfast.model.codec import JSON
from holdfast.model.fleet import Order
from holdfast.model.settings import Settings


@dataclass(frozen=True, slots=True)
class Call:
    """What a function may know about the command that calls it."""

    run: str
    agent: str
    epoch: int
    deadline: float
    """By the server's clock."""


@dataclass(frozen=True)
class Function:
    """One function that an agent may be asked to run."""

    name: str
    handler: Callable[..., Any]
    """Plain or async. A plain one runs in a thread, unless `quick`; a quick one is plain."""
    mutating: bool = True
    quick: bool = False
    """Executed in the event loop, at once unless mutating: it must neither wait nor compute for
    long."""
    job: Job[Any] | None = None
    settings: Callable[[], Settings] | None = None
    """Provides `ctx.settings` to a job on an agent."""
    rehearsal: Callable[..., Any] | None = None
    """Takes the same arguments, changes nothing, and returns what the function would change."""

    @property
    def doc(self) -> str:
        """The first line of its description."""
        return (inspect.getdoc(self.handler) or "").partition("\n")[0]

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.handler, eval_str=True)

    @functools.cached_property
    def _is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.handler)

    def bind(self, order: Order) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a command, bound to this function's parameters; `InvalidInput` if they
        do not fit."""
        args, kwargs = order.args, order.kwargs
        if order.raw:
            args, kwargs = _read_words(self._signature, order.args)
        if self.job is None:
            try:
                self._signature.bind(*args, **kwargs)
            except TypeError as error:
                raise InvalidInput(f"{self.name}: {error}") from None
        return tuple(args), dict(kwargs)

    async def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Any:
        """Run the function with bound arguments."""
        if self.job is not None:
            bound = self.job.signature.decode(self.job.signature.encode(args, kwargs))
            args, kwargs = (), self._with_context(self.job, bound.kwargs, call)
        if self._is_async:
            return await self.handler(*args, **kwargs)
        if self.quick:
            return self.handler(*args, **kwargs)
        inside = functools.partial(self.handler, *args, **kwargs)
        return threads.given(await asyncio.to_thread(threads.caught, inside))

    async def rehearse(self, order: Order, call: Call) -> dict[str, Any]:
        """What a command would do here; checks its arguments and changes nothing."""
        args, kwargs = self.bind(order)
        found: dict[str, Any] = {"function": self.name, "does": self.doc, "changes": None}
        if not self.mutating:
            return found | {"changes": [], "note": "it only reads"}
        if self.rehearsal is None:
            return found | {"note": "it does not say what it would change"}
        other = dataclasses.replace(self, handler=self.rehearsal, quick=False)
        return found | {"changes": await other.call(args, kwargs, call)}

    def _with_context(self, job: Job[Any], kwargs: dict[str, Any], call: Call) -> dict[str, Any]:
        if not job.signature.contexts:
            return kwargs
        context = Context(
            _OnAgent(),
            run=call.run,
            spec=job.spec,
            group=job.spec.group,
            node=call.agent,
            attempt=1,
            epoch=call.epoch,
            headers={},
            deadline=call.deadline,
            settings=self.settings,
        )
        own = context if job.is_async else SyncContext.beside(context, asyncio.get_running_loop())
        return {**kwargs, **dict.fromkeys(job.signature.contexts, own)}


def _read_words(
    signature: inspect.Signature, words: Iterable[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Parse words of a command line into arguments."""
    named = {
        p.name: p
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    places = _places(signature)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in map(str, words):
        name, found, text = word.partition("=")
        if found and name in named:
            kwargs[name] = _value(named[name].annotation, text)
        else:
            place = next(places, None)
            args.append(_value(place.annotation, word) if place else word)
    return tuple(args), kwargs


def _places(signature: inspect.Signature) -> Iterator[inspect.Parameter]:
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            yield parameter
        while parameter.kind is parameter.VAR_POSITIONAL:
            yield parameter


def _value(annotation: Any, text: str) -> Any:
    if annotation is str:
        return text
    try:
        return JSON.decode(text.encode())
    except Unreadable:
        return text


class _OnAgent:
    """The parts of a job's context that are unavailable on an agent, which holds no claim."""

    async def publish(self, event: str, data: Any) -> None:
        raise NoRecord("events cannot be published from an agent: return the value instead")

    async def still_owner(self) -> bool:
        return True

    async def progress(self, fraction: float | None, note: str) -> None:
        raise NoRecord("progress is not kept for a command on an agent")


class Functions:
    """The allow-list of one agent."""

    def __init__(self) -> None:
        self._known: dict[str, Function] = {}

    def add(self, function: Function) -> None:
        """Offer a function; names must be unique."""
        if function.name in self._known:
            raise ConfigError(f"function {function.name!r} is offered twice by this agent")
        self._known[function.name] = function

    def add_jobs(self, app: Holdfast, settings: Callable[[], Settings] | None = None) -> None:
        """Offer the jobs of an app."""
        for job in app.jobs.values():
            self.add(
                Function(job.name, job.func, job=job, settings=settings, rehearsal=job.rehearsing)
            )

    def get(self, name: str) -> Function:
        """A function by name; `InvalidInput` lists those that exist."""
        found = self._known.get(name)
        if found is None:
            hint = " (it was started without --allow-commands)" if name == "cmd.run" else ""
            raise InvalidInput(
                f"this agent has no function {name!r}{hint}: it has {', '.join(self.names)}"
            )
        return found

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._known))

    async def rehearse(self, *words: str) -> dict[str, Any]:
        """Say what a function would do here, with these arguments; nothing is changed."""
        if not words:
            raise InvalidInput("rehearse takes a function and its arguments")
        order = Order(words[0], args=words[1:], raw=True)
        return await self.get(words[0]).rehearse(order, Call("rehearsal", "", 0, 0.0))
