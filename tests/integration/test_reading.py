"""What pages read beyond lists: payloads, groups of dead letters, outcomes of slots."""

from __future__ import annotations

import asyncio
import json

import pytest

from holdfast import Backoff, Holdfast
from holdfast.errors import InvalidInput
from holdfast.status.dead import DeadFilter, DeadLetters, dead_groups
from holdfast.status.finding import Finder, payload_of, place_of
from tests.integration.support import Seen, client_of, dead_letters, until, working


async def test_payload_is_found_while_a_run_waits_runs_and_is_dead(
    app: Holdfast, seen: Seen
) -> None:
    """Wherever the message is, its bytes and headers are shown; after the end by the history."""
    gate = asyncio.Event()

    @app.job(retry=Backoff.never())
    async def step(how: str) -> None:
        seen.append(how)
        if how == "hold":
            await gate.wait()
        if how == "die":
            raise ValueError("no")

    @app.job(group="other")
    async def waits(how: str) -> None: ...

    async with working(app):
        queued = await waits.options(key="q", headers={"X-Who": "ann"}).enqueue("wait")
        running = await step.options(key="h", headers={"X-Who": "bob"}).enqueue("hold")
        dead = await step.options(key="d").enqueue("die")
        done = await step.options(key="g").enqueue("go")
        await seen.wait(3)
        await done.result(timeout=60)
        await until(lambda: dead_letters(app), 10, "a dead letter")
        client = await client_of(app)

        async def payload(run: str) -> tuple[object, dict[str, str]] | None:
            found = await payload_of(client, await Finder(client).find(run))
            return (json.loads(found[0]), found[1]) if found else None

        assert await payload(queued.id) == ("wait", {"X-Who": "ann"})
        assert await payload(running.id) == ("hold", {"X-Who": "bob"})
        assert await payload(dead.id) == ("die", {})
        assert await payload(done.id) == ("go", {})
        gate.set()


@pytest.mark.parametrize(
    ("reply", "place"),
    [
        ("$JS.ACK.HF_JOBS.default=add.1.42.7.1700000000.0", ("HF_JOBS", 42)),
        ("$JS.ACK.hub.ACCHASH.HF_JOBS.default=add.1.42.7.1700000000.0.token", ("HF_JOBS", 42)),
        ("$JS.ACK.HF_JOBS", None),
        ("_INBOX.x.1.2.3.4.5.6", None),
    ],
)
def test_place_of_a_message_is_read_from_its_acknowledgement(
    reply: str, place: tuple[str, int] | None
) -> None:
    """Both forms of the subject are known; anything else is no place."""
    assert place_of(reply) == place


async def test_dead_letters_of_one_kind_are_one_group(app: Holdfast) -> None:
    """Numbers and quoted parts do not make two kinds of one error; the largest group is first."""

    @app.job(retry=Backoff.never())
    async def fail(text: str) -> None:
        raise ValueError(text)

    async with working(app):
        for text in ("order 1 is 'late'", "order 22 is 'gone'", "no such table", "order 3 is ''"):
            await fail.enqueue(text)
        await until(lambda: _dead(app, 4), 10, "four dead letters")
        client = await client_of(app)
        found = await dead_groups(client, DeadFilter())
        assert [(g.job, len(g.letters)) for g in found.groups] == [("fail", 3), ("fail", 1)]
        assert found.groups[0].kind == "ValueError: order N is '…'"
        assert found.totals == {("default", "fail"): 4}
        assert (await dead_groups(client, DeadFilter(), look=2)).looked == 2


async def _dead(app: Holdfast, count: int) -> bool:
    return len(await dead_letters(app)) == count


async def test_edited_payload_is_what_the_replay_sends(app: Holdfast, seen: Seen) -> None:
    """One letter may be replayed with another payload, and only one."""

    @app.job(retry=Backoff.never())
    async def add(n: int) -> int:
        seen.append(n)
        if n < 0:
            raise ValueError("negative")
        return n

    async with working(app):
        run = await add.options(key="a").enqueue(-1)
        await add.options(key="b").enqueue(-2)
        await until(lambda: _dead(app, 2), 10, "two dead letters")
        letters = DeadLetters(await client_of(app))
        with pytest.raises(InvalidInput, match="one letter"):
            await letters.replay(DeadFilter(), edited=b"5")
        first = next(one for one in await letters.list() if one.run == run.id)
        done = await letters.replay([first.id], edited=b"5")
        assert [one.result for one in done] == ["replayed"]
        assert await run.result(timeout=60) == 5
