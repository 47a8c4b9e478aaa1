"""The workload: operations at a steady rate, from a seed, each recorded before and after.

Some delayed runs are withdrawn before they are due: once confirmed, they must not happen. A tenth
of the keyed runs is repeated with the same key, some at once and some much later. Without an
answer, the sender retries with the same key for a while, as a caller should; without a key it does
not, and the operation stays unknown. A bulk of runs is resent unchanged: its requests have ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from chaos import flows
from chaos.app import ANIMALS, ANNOUNCED
from chaos.history import History
from chaos.limits import KEYS, lane_mark
from holdfast.app import Holdfast
from holdfast.errors import BrokerError, HoldfastError

REPEATED: Final = 0.1
TRIES: Final = 4
PENDING: Final = 400
"""Operations in flight; above that the workload waits, as a caller would."""
MIX: Final = {
    "keyed": 30,
    "keyless": 20,
    "chain": 15,
    "delayed": 12,
    "put_off": 5,
    "flaky": 10,
    "event": 8,
    "long": 5,
    "withdrawn": 3,
    "once": 4,
    "bulk": 1,
    "delayed_key": 2,
    "large": 2,
    "compute": 0.5,
    "beside": 4,
    "misbehave": 3,
    "poison": 0.1,
    "narrow": 10,
    "sorted": 6,
    "paced": 4,
    "flow": 6,
    "undone": 2,
    "called": 1,
}
LIMITED: Final = ("narrow", "sorted", "paced")
"""Jobs with limits; few enough that nothing waits for good, many enough that runs wait."""
FAILING: Final = 0.2
"""The share of them that fails at first: a retry gives its place back, or keeps it."""
BULK: Final = 10
COMPUTE_SECONDS: Final = 0.3
WITHDRAWN_SECONDS: Final = 15.0
"""The delay of a run to withdraw: leaves time to cancel it."""
MARGIN_SECONDS: Final = 2.0  # a cancel this close to the due time may lose the race


class Workload:
    """Sends operations until stopped."""

    def __init__(
        self, app: Holdfast, history: History, seed: int, rate: float, window: float
    ) -> None:
        """`window`: how long servers remember message ids; a delayed key is sent again later."""
        self._app = app
        self._history = history
        self._dice = random.Random(f"{seed}/workload")
        self._rate = rate
        self._window = window
        self._numbers = itertools.count(1)
        self._stopped = asyncio.Event()
        self._repeatable: list[str] = []
        self._turns = [asyncio.Lock() for _ in range(KEYS)]

    def stop(self) -> None:
        """No more new operations."""
        self._stopped.set()

    async def run(self) -> None:
        """Send until `stop`; returns when every operation has its answer."""
        kinds, weights = list(MIX), list(MIX.values())
        gate = asyncio.Semaphore(PENDING)
        async with asyncio.TaskGroup() as group:
            while not self._stopped.is_set():
                kind = self._dice.choices(kinds, weights)[0]
                operation = self._next(kind)
                await gate.acquire()
                task = group.create_task(operation())
                task.add_done_callback(lambda _: gate.release())
                await self._pause(self._dice.expovariate(self._rate))

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            return

    def _next(self, kind: str) -> Callable[[], Coroutine[Any, Any, None]]:
        """Prepare one operation, all random choices made, so that answers affect no other."""
        name = f"{kind}-{next(self._numbers)}"
        dice = self._dice
        seconds = round(dice.uniform(0.01, 1.0) ** 2, 3)
        if kind == "keyed" and self._repeatable and dice.random() < REPEATED:
            again = dice.choice(self._repeatable)
            return lambda: self._touch(again, "keyed", seconds, again)
        if kind == "keyed":
            self._repeatable.append(name)
            self._repeatable = self._repeatable[-1000:]
            return lambda: self._touch(name, kind, seconds, name)
        if kind == "delayed":
            delay = round(dice.uniform(1.0, 15.0), 1)
            return lambda: self._touch(name, kind, seconds, name, delay)
        lasting, failures = round(dice.uniform(3.0, 12.0), 1), dice.randint(1, 4)
        margin, how = round(dice.uniform(6.0, 12.0), 1), dice.choice(sorted(ANIMALS))
        jobs: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "keyless": lambda: self._touch(name, kind, seconds),
            "chain": lambda: self._send(name, kind, "link", (name, f"{name}/next"), {}),
            "put_off": lambda: self._send(name, kind, "put_off", (name, f"{name}/later"), {}),
            "flaky": lambda: self._send(name, kind, "flaky", (name,), {"failures": failures}),
            "long": lambda: self._send(name, kind, "long", (name,), {"seconds": lasting}),
            "once": lambda: self._send(name, kind, "once", (name,), {"seconds": seconds * 3}),
            "event": lambda: self._announce(name),
            "withdrawn": lambda: self._withdraw(name),
            "bulk": lambda: self._bulk(name, seconds),
            "delayed_key": lambda: self._delay_key(name, seconds, self._window + margin),
            "large": lambda: self._send(name, kind, "bulky", (name,), {"seconds": seconds}),
            "compute": lambda: self._send(
                name, kind, "compute", (name,), {"seconds": COMPUTE_SECONDS}
            ),
            "beside": lambda: self._send(name, kind, "beside", (name,), {"seconds": seconds}),
            "misbehave": lambda: self._misbehave(name, how),
            "poison": lambda: self._send(name, kind, "poison", (name,), {}),
        }
        if kind in LIMITED:
            lane, failing = dice.randrange(KEYS), dice.random() < FAILING
            return lambda: self._limited(name, kind, lane, min(seconds, 0.3), int(failing))
        if kind in flows.KINDS:
            return lambda: self._flow(
                name, kind, seconds / 3, int(failures > 3), dice.uniform(0, 5)
            )
        return jobs[kind]

    async def _touch(
        self, name: str, kind: str, seconds: float, key: str = "", delay: float = 0.0
    ) -> None:
        options: dict[str, Any] = {"key": key} if key else {}
        due = time.monotonic() + delay if delay else 0.0
        if delay:
            options["delay"] = delay
        await self._send(name, kind, "touch", (name,), {"seconds": seconds}, options, due)

    async def _send(
        self,
        name: str,
        kind: str,
        job: str,
        marks: tuple[str, ...],
        arguments: dict[str, Any],
        options: dict[str, Any] | None = None,
        not_before: float = 0.0,
    ) -> None:
        sender = self._app.jobs[job].options(**(options or {}))

        async def enqueue() -> str:
            run = await sender.enqueue(mark=name, **arguments)
            return str(run.id)

        tries = TRIES if options and "key" in options else 1
        await self._make(name, kind, marks, enqueue, tries, not_before)

    async def _limited(
        self, name: str, kind: str, lane: int, seconds: float, failures: int
    ) -> None:
        """A run of a job with limits; those of an ordered key are sent one after the other."""
        mark = lane_mark(name, lane)
        arguments = {"lane": lane, "seconds": seconds, "failures": failures}
        turn = self._turns[lane] if kind == "sorted" else contextlib.nullcontext()
        async with turn:
            await self._send(mark, kind, kind, (mark,), arguments, {"key": mark})

    async def _flow(
        self, name: str, kind: str, seconds: float, failures: int, pause: float
    ) -> None:
        """A flow, and what it waits for: its event, or somebody who cancels it."""
        more = {"flow": {"seconds": seconds, "failures": failures}, "undone": {"seconds": seconds}}
        sent = time.monotonic()
        marks = flows.marks_of(kind, name)
        await self._send(name, kind, kind, marks, more.get(kind, {}), {"key": name})
        operation = self._history.operations[name]
        if kind == "undone" or operation.forbidden:
            return
        await self._pause(pause)
        if kind == "called":
            await self._call_off(next(iter(operation.runs), ""))
            return
        heard = flows.heard_mark(name)

        async def go() -> str:
            await self._app.publish(flows.GO, key=name)
            if time.monotonic() > sent + flows.IN_TIME_SECONDS or not operation.required:
                raise BrokerError("too late to be sure that it is received")
            return ""

        await self._make(heard, "heard", (heard,), go, TRIES, 0.0)

    async def _call_off(self, run: str) -> None:
        """Cancel a flow once it waits; if that fails, its own time ends it."""
        with contextlib.suppress(HoldfastError, TimeoutError):
            async with asyncio.timeout(10):
                while run and (await self._app.run(run).status()).state != "parked":
                    await self._pause(0.3)
            await self._app.run(run).cancel()

    async def _misbehave(self, name: str, how: str) -> None:
        job = "misbehave" if ANIMALS[how].is_async else "misbehave_plainly"
        name = f"{name} {how}"
        await self._send(name, "misbehave", job, (name,), {"how": how})

    async def _bulk(self, name: str, seconds: float) -> None:
        """Send many at once; after an error, send the same requests again."""
        marks = tuple(f"{name}/{number}" for number in range(BULK))
        requests = [self._app.jobs["touch"].request(mark=m, seconds=seconds) for m in marks]

        async def enqueue() -> str:
            await self._app.enqueue_many(requests)
            return ""

        await self._make(name, "bulk", marks, enqueue, TRIES, 0.0)

    async def _delay_key(self, name: str, seconds: float, delay: float) -> None:
        """Send a delayed key again, without delay, once its message id is forgotten."""
        due = time.monotonic() + delay
        await self._touch(name, "delayed_key", seconds, name, delay)
        await self._pause(self._window + 2.0)
        accepted = self._history.operations[name].required
        if accepted and self._window < time.monotonic() - (due - delay) < delay - MARGIN_SECONDS:
            await self._send(
                name, "delayed_key", "touch", (name,), {"seconds": seconds}, {"key": name}, due
            )

    async def _announce(self, name: str) -> None:
        async def publish() -> str:
            await self._app.publish(ANNOUNCED, {"mark": name}, id=f"announced.{name}")
            return ""

        await self._make(name, "event", (name,), publish, TRIES, 0.0)

    async def _withdraw(self, name: str) -> None:
        """Enqueue, then cancel: confirmed in time, it counts as refused."""
        due = time.monotonic() + WITHDRAWN_SECONDS
        self._history.invoke(name, "withdrawn", (name,), not_before=due)
        sender = self._app.jobs["touch"].options(delay=WITHDRAWN_SECONDS)
        try:
            run = await sender.enqueue(mark=name, seconds=0.1)
            await asyncio.sleep(1.0)
            cancelled = await run.cancel()
        except HoldfastError as error:
            self._history.unknown(name, f"{type(error).__name__}: {error}")
            return
        if cancelled and time.monotonic() < due - MARGIN_SECONDS:
            self._history.failed(name, "cancelled in time")
        else:
            self._history.unknown(name, "cancelled too late, or not at all")

    async def _make(
        self,
        name: str,
        kind: str,
        marks: tuple[str, ...],
        make: Callable[[], Awaitable[str]],
        tries: int,
        not_before: float,
    ) -> None:
        for _ in range(tries):
            self._history.invoke(
                name,
                kind,
                marks,
                not_before=not_before,
                at_most_once=kind == "once",
                doomed=kind == "poison",
            )
            try:
                self._history.ok(name, await make())
                return
            except BrokerError as error:
                self._history.unknown(name, f"{type(error).__name__}: {error}")
            except HoldfastError as error:
                self._history.failed(name, f"{type(error).__name__}: {error}")
                return
            await asyncio.sleep(0.5)
