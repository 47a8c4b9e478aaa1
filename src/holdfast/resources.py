"""Resources: objects that handlers share, opened once per process and injected.

    @app.resource
    async def pool() -> AsyncIterator[Pool]:
        async with create_pool(...) as opened:
            yield opened

    @app.job
    async def charge(ctx: Context, order: Order, db: Pool = pool.injected) -> None: ...

A worker opens the resources of its jobs before the first run and closes them after the last, in
reverse order of opening: one that uses another is closed before it. A failure to close one does not
keep the others open; a failure to open ends the worker, as a startup hook's does. Anywhere else a
resource is opened when it is first used on an event loop, and closed by `app.close()`. The function
may also return the value, or be plain.

`db: Annotated[Pool, pool]` does the same as the default value. Type checkers need the default to
see that callers do not pass the parameter. A resource is itself a FastAPI dependency: `db:
Annotated[Pool, Depends(pool)]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Generic, TypeVar, cast

from holdfast.errors import DefinitionError, HoldfastError

T = TypeVar("T")
Check = Callable[[T], Awaitable[object] | object]

_turns = itertools.count(1)


class Resource(Generic[T]):
    """Something that is opened once per process and event loop. Made by `app.resource`."""

    def __init__(self, opener: Callable[[], Any]) -> None:
        if inspect.signature(opener).parameters:
            raise DefinitionError(
                f"@app.resource decorates a function without parameters, not {opener!r}"
            )
        self.name = getattr(opener, "__name__", type(opener).__name__)
        self.__doc__ = opener.__doc__
        self._opener = opener
        self._check: Check[T] | None = None
        self._opened: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Opened[T]] = (
            weakref.WeakKeyDictionary()
        )
        self._overrides: list[T] = []

    def __repr__(self) -> str:
        return f"<Resource {self.name}>"

    @property
    def injected(self) -> T:
        """The default value of a parameter that gets this resource."""
        return cast(T, Injected(self))

    async def __call__(self) -> T:
        """The opened value; opens it if this is its first use on this event loop."""
        if self._overrides:
            return self._overrides[-1]
        loop = asyncio.get_running_loop()
        opened = self._opened.get(loop)
        if opened is None:
            opened = self._opened[loop] = _Opened()
        async with opened.turn:
            if not opened.ready:
                opened.value = await opened.enter(self._opener)
                opened.ready, opened.order = True, next(_turns)
        return opened.value

    @property
    def order(self) -> int:
        """The number of this opening among all on any event loop; 0 if it is not open here."""
        opened = self._opened.get(asyncio.get_running_loop())
        return opened.order if opened else 0

    async def close(self) -> None:
        """Close it, if it is open on this event loop."""
        opened = self._opened.pop(asyncio.get_running_loop(), None)
        if opened is not None:
            await opened.stack.aclose()

    def health(self, check: Check[T]) -> Check[T]:
        """Decorate a function of the opened value that raises, or returns False, if it is broken.

        A worker asks it every few seconds, and is not ready while the answer is bad.
        """
        self._check = check
        return check

    async def problem(self) -> str:
        """The problem that its health check reports; empty if all is well or it is not open."""
        opened = self._opened.get(asyncio.get_running_loop())
        if self._check is None or opened is None or not opened.ready or self._overrides:
            return ""
        try:
            found = self._check(opened.value)
            answer = await found if inspect.isawaitable(found) else found
        except Exception as error:  # noqa: BLE001 - a user's check may raise anything
            return f"resource {self.name}: {type(error).__name__}: {error}"
        return f"resource {self.name} is not healthy" if answer is False else ""

    @contextlib.contextmanager
    def override(self, value: T) -> Iterator[T]:
        """For tests: inject `value` instead, everywhere in this process."""
        self._overrides.append(value)
        try:
            yield value
        finally:
            self._overrides.remove(value)


class _Opened(Generic[T]):
    value: T

    def __init__(self) -> None:
        self.ready = False
        self.order = 0
        self.turn = asyncio.Lock()
        self.stack = contextlib.AsyncExitStack()

    async def enter(self, opener: Callable[[], Any]) -> T:
        if inspect.isasyncgenfunction(opener):
            manager = contextlib.asynccontextmanager(opener)()
            return cast(T, await self.stack.enter_async_context(manager))
        if inspect.isgeneratorfunction(opener):
            return cast(T, self.stack.enter_context(contextlib.contextmanager(opener)()))
        found = opener()
        return cast(T, await found if inspect.isawaitable(found) else found)


class Injected:
    """Represents a resource in the signature of a handler."""

    def __init__(self, resource: Resource[Any]) -> None:
        self._resource = resource

    @staticmethod
    def of(value: object) -> Resource[Any] | None:
        """The resource that a default value or a part of an annotation names."""
        if isinstance(value, Injected):
            return value._resource
        return value if isinstance(value, Resource) else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise HoldfastError(
            f"resource {self._resource.name!r} is handed in by a worker: pass it yourself when you "
            "call the handler as a function"
        )
