"""What user code puts into a record can be read again, or is refused where it was put."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import pytest

from holdfast import Backoff, Context, Discard, Holdfast, Retry
from holdfast.errors import HoldfastError, InvalidInput, RunCancelled, RunFailed
from holdfast.status.dead import DeadLetters
from tests.integration.support import Seen, all_records, broker_of, until, working

SURROGATE = "half \ud800 a pair, \x00 and \x1b[31m"


class Unspeakable(Exception):
    """Its author's mistakes are in every method that shows it."""

    def __str__(self) -> str:
        raise ValueError("no")

    __repr__ = __str__


FRACTIONS: dict[str, tuple[Any, float | None]] = {
    "true": (True, None),
    "text": ("0.5", None),
    "decimal": (Decimal("0.5"), 0.5),
    "fraction": (Fraction(1, 4), 0.25),
    "int": (1, 1.0),
    "nan": (float("nan"), None),
    "decimal nan": (Decimal("NaN"), None),
    "inf": (float("inf"), None),
    "huge": (10**5000, None),
    "negative": (-0.1, None),
    "list": ([1], None),
}


@pytest.mark.parametrize("name", sorted(FRACTIONS))
async def test_progress_is_a_number_or_refused(app: Holdfast, seen: Seen, name: str) -> None:
    """The record stays readable, and the handler hears at once what was wrong."""
    given, kept = FRACTIONS[name]

    @app.job(retry=Backoff.never())
    async def tells(ctx: Context) -> str:
        try:
            await ctx.progress(given, note=SURROGATE)
        except InvalidInput as error:
            seen.append(str(error))
        return "done"

    async with working(app):
        run = await tells.enqueue()
        assert await run.result(timeout=60) == "done"
        progress = (await run.status()).progress
    if kept is None:
        assert "between 0 and 1" in seen[0]
        assert progress is None
    else:
        assert progress is not None
        assert progress.fraction == kept
        assert "\\ud800" in progress.note


NOTES: list[Any] = ["x" * 2_000_000, SURROGATE, 17, None, "\udfff" * 600, "\x00" * 600]


async def test_notes_of_any_kind_are_kept(app: Holdfast) -> None:
    """Cut, escaped, and shown as they were meant."""

    @app.job
    async def tells(ctx: Context, n: int) -> None:
        await ctx.progress(0.5, NOTES[n])

    async with working(app):
        for n, note in enumerate(NOTES):
            run = await tells.enqueue(n)
            await run.result(timeout=60)
            found = (await run.status()).progress
            assert found is not None
            assert len(found.note) <= 500
            assert found.note[:4] == str(note).encode("utf-8", "backslashreplace").decode()[:4]


ERRORS: dict[str, Callable[[], BaseException]] = {
    "surrogates": lambda: ValueError(SURROGATE),
    "nuls": lambda: ValueError("\x00" * 5000),
    "huge": lambda: ValueError("ä" * 3_000_000),
    "unspeakable": Unspeakable,
    "retry": lambda: Retry(SURROGATE),
    "retry that cannot wait": lambda: Retry("x", delay=Unspeakable()),  # type: ignore[arg-type]
    "retry for ever": lambda: Retry("x", delay=10**5000),
    "retry nan": lambda: Retry("x", delay=float("nan")),
    "syntax": lambda: SyntaxError("x", (None, "a", Unspeakable(), b"\xff")),  # type: ignore[arg-type]
    "group": lambda: ExceptionGroup(SURROGATE, [ValueError(SURROGATE), Unspeakable()]),
}


@pytest.mark.parametrize("name", sorted(ERRORS))
async def test_errors_of_any_kind_are_a_dead_letter(app: Holdfast, name: str) -> None:
    """Whatever an exception is made of: a record and a letter that everybody can show."""

    @app.job(retry=Backoff.never())
    async def fails() -> None:
        raise ERRORS[name]()

    async with working(app):
        run = await fails.enqueue()
        with pytest.raises(RunFailed):
            await run.result(timeout=60)
        for record in (await all_records(app)).values():
            json.dumps(record.error).encode()
            record.error.encode()
        client = await app.backend()
        [letter] = await DeadLetters(client).list()  # type: ignore[arg-type]
        assert msgspec.json.encode(letter)


async def test_discard_of_any_kind_is_kept(app: Holdfast) -> None:
    """The reason of a discard is in the record, too."""

    @app.job
    async def gives_up() -> None:
        raise Discard(SURROGATE)

    async with working(app):
        run = await gives_up.enqueue()
        with pytest.raises(RunCancelled, match="half"):
            await run.result(timeout=60)


RESULTS: dict[str, Callable[[], Any]] = {
    "nan": lambda: float("nan"),
    "inf inside": lambda: {"a": [float("inf")]},
    "huge int": lambda: 10**5000,
    "surrogate": lambda: ["\ud800"],
    "raw": lambda: msgspec.Raw(b"{nonsense"),
    "raw bytes": lambda: {"a": msgspec.Raw(b'"\xff"')},
    "object": object,
    "itself": lambda: _itself(),
}


def _itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize("name", sorted(RESULTS))
async def test_result_that_cannot_be_read_again_is_a_dead_letter(app: Holdfast, name: str) -> None:
    """Never a record that nobody can read; the letter says what was wrong."""

    @app.job
    async def returns() -> Any:
        return RESULTS[name]()

    async with working(app):
        run = await returns.enqueue()
        with pytest.raises(RunFailed, match="InvalidPayload"):
            await run.result(timeout=60)
        assert [r.state for r in (await all_records(app)).values()] == ["dead"]


async def test_deep_result_is_read_or_refused(app: Holdfast) -> None:
    """However deep a result is nested, its run has ended and its record can be read."""

    @app.job
    async def returns(depth: int) -> Any:
        found: Any = 1
        for _ in range(depth):
            found = [found]
        return found

    async with working(app):
        for depth in (100, 1_000, 100_000):
            run = await returns.enqueue(depth)
            try:
                found = await run.result(timeout=20)
                assert found is not None
            except RunFailed:
                assert (await run.status()).state == "dead"
        assert {r.state for r in (await all_records(app)).values()} <= {"done", "dead"}


@pytest.mark.parametrize("id", ["a\nb", "\ud800", "x" * 2000, 17])
async def test_event_id_that_no_header_can_carry_is_refused(app: Holdfast, id: Any) -> None:
    """Two ids that would look the same on the wire would be taken for one event."""
    async with app:
        await broker_of(app)
        with pytest.raises(HoldfastError, match="event id"):
            await app.publish("made", {"n": 1}, id=id)


async def test_orphan_whose_handler_told_its_progress_starts_again(
    app: Holdfast, seen: Seen
) -> None:
    """What a handler said last does not keep others from taking its run over."""

    @app.job
    async def tells(ctx: Context) -> str:
        try:
            await ctx.progress(True)
        except InvalidInput:
            await ctx.progress(Decimal("0.5"))
        seen.append(ctx.attempt)
        if len(seen) == 1:
            await asyncio.sleep(60)
        return "done"

    async with app:
        async with working(app, grace_seconds=0.1):
            run = await tells.enqueue()
            await seen.wait(1)
        async with working(app):
            assert await run.result(timeout=60) == "done"
            await until(lambda: len(seen) == 2, 5, "the second start")
