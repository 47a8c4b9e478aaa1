"""Two versions of a job side by side: a payload of one is not the dead letter of the other."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import Backoff, Holdfast
from holdfast.server import Server
from holdfast.worker import execution
from tests.integration.support import (
    Seen,
    all_records,
    dead_letter,
    dead_letters,
    queue_empty,
    until,
    working,
)


@pytest.fixture(autouse=True)
def _sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left to others comes again soon; half of the time the old worker gets it again."""
    monkeypatch.setattr(execution, "LEFT_SECONDS", 0.2)


def _app(nats: Server, namespace: str) -> Holdfast:
    return Holdfast("shop", nats_url=nats.url, namespace=namespace)


def _old(nats: Server, namespace: str, seen: Seen, delivery: Any) -> Holdfast:
    app = _app(nats, namespace)

    @app.job(delivery=delivery)
    async def mail(to: str, subject: str) -> None:
        seen.append(("old", to))

    return app


def _new(nats: Server, namespace: str, seen: Seen, delivery: Any) -> Holdfast:
    app = _app(nats, namespace)

    @app.job(delivery=delivery)
    async def mail(to: str, subject: str, copy: str = "") -> None:
        seen.append(("new", to, copy))

    return app


@pytest.mark.parametrize("delivery", ["effectively_once", "at_least_once", "at_most_once"])
async def test_parameter_that_is_added_is_left_to_those_who_know_it(
    nats: Server, namespace: str, seen: Seen, delivery: Any
) -> None:
    """Old workers leave what they do not know; each run starts once, nothing is a dead letter."""
    old, new = _old(nats, namespace, seen, delivery), _new(nats, namespace, seen, delivery)
    async with new, working(old):
        mail = new.jobs["mail"]
        await mail.enqueue_many([mail.request(f"{n}", "s", copy="c") for n in range(20)])
        await mail.enqueue("plain", "s")
        await seen.wait(1)
        async with working(new):
            await until(lambda: len(seen) == 21, 30, "every run")
            await until(lambda: queue_empty(new), 10, "an empty queue")
        assert sorted(s for s in seen if len(s) == 3 and s[2]) == sorted(
            ("new", f"{n}", "c") for n in range(20)
        )
        assert not await dead_letters(new)
        for record in (await all_records(new)).values():
            assert (record.state, record.failures, record.crashes) == ("done", 0, 0)
            assert len(record.attempts) == 1


@pytest.mark.parametrize("delivery", ["effectively_once", "at_least_once", "at_most_once"])
async def test_member_that_nobody_knows_is_a_dead_letter_when_the_time_is_over(
    nats: Server, namespace: str, seen: Seen, delivery: Any
) -> None:
    """It says what was unknown, and how long it was left to others; no attempt is counted."""
    old, new = _old(nats, namespace, seen, delivery), _new(nats, namespace, seen, delivery)
    async with new, working(old, unknown_payload_seconds=1):
        await new.jobs["mail"].enqueue("a", "s", copy="c")
        letter = await dead_letter(new, 20)
        assert letter.story("Hf-Error") == (
            "InvalidPayload: payload: 'copy' is unknown; known are 'to', 'subject'; no worker that "
            "knows it took the run within 1s"
        )
        assert letter.headers["Hf-Failures"] == "0"
        await until(lambda: queue_empty(new), 10, "an empty queue")
    assert not seen


@pytest.mark.parametrize("value", ["text", "model"])
async def test_second_parameter_is_added_and_taken_away(
    nats: Server, namespace: str, seen: Seen, value: str
) -> None:
    """From a bare value to an object with members: both versions read both, or leave them."""
    import dataclasses

    @dataclasses.dataclass
    class Letter:
        to: str

    kind: Any = str if value == "text" else Letter
    given: Any = "a" if value == "text" else Letter("a")
    one, two = _app(nats, namespace), _app(nats, namespace)

    async def alone(letter: kind) -> None:
        seen.append(("one", letter))

    async def both(letter: kind, copy: str = "") -> None:
        seen.append(("two", letter, copy))

    alone.__annotations__["letter"] = both.__annotations__["letter"] = kind
    both.__annotations__["copy"] = str
    for app, handler in ((one, alone), (two, both)):
        app.job(name="mail", retry=Backoff.never())(handler)
    async with one, two:
        await one.jobs["mail"].enqueue(given)
        async with working(two):
            await seen.wait(1)
        assert seen == [("two", given, "")]
        await two.jobs["mail"].enqueue(given, copy="c")
        async with working(one), working(two):
            await seen.wait(2, 20)
        assert seen[1:] == [("two", given, "c")]
        assert not await dead_letters(one)
