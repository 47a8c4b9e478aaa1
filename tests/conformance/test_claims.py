"""What a claim guarantees, in memory as on the server: one holder, and no way around it."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.errors import BrokerError, ClaimLost
from holdfast.model.run import Progress, RunRecord, State, Verdict
from holdfast.names import keyed_run
from holdfast.ownership.claims import Claim
from holdfast.ownership.store import Store
from tests.conformance.places import TTL, FaultyStore, Node, Place

CROWD = 8


def crowd(stores: list[Store]) -> tuple[list[Node], set[str]]:
    """A node for each connection."""
    alive: set[str] = set()
    return [Node(f"node-{n}", store, alive) for n, store in enumerate(stores)], alive


async def winner(nodes: list[Node]) -> Claim:
    """All claim at once: one wins, and every other is told that it is held."""
    answers = await asyncio.gather(*(node.claim() for node in nodes))
    won = [answer for answer in answers if isinstance(answer, Claim)]
    assert len(won) == 1
    assert all(answer is Verdict.HELD for answer in answers if answer is not won[0])
    return won[0]


# ---- one holder


async def test_claim_has_one_winner_among_many_connections(place: Place) -> None:
    """However many workers are handed the same run, one executes it."""
    async with place.open(CROWD) as stores:
        nodes, _ = crowd(stores)
        claim = await winner(nodes)
        assert (await nodes[0].record()).node == claim.record.node
        assert claim.epoch == claim.revision > 0


@pytest.mark.parametrize("forged", [2_000_000, 10**15 - 1])
async def test_claim_counts_nothing_up_from_a_forged_number(place: Place, forged: int) -> None:
    """A number that no run can have reached is not written down: it could grow past any limit."""
    async with place.open(1) as stores:
        nodes, _ = crowd(stores)
        claim = await nodes[0].won(message=forged)
        assert claim.record.message == 1
        assert (await nodes[0].record()).message == 1


async def test_claim_of_a_failed_run_has_one_winner(place: Place) -> None:
    """failed → running is a compare-and-swap too: the retry is neither lost nor doubled."""
    async with place.open(CROWD) as stores:
        nodes, _ = crowd(stores)
        claim = await nodes[0].won()
        await nodes[0].claims.settle(claim, "failed", "failed", error="ValueError: x")
        second = await winner(nodes)
        assert second.record.failures == 1
        assert second.record.attempt == 2
        assert second.epoch > claim.epoch


async def test_take_over_has_one_winner(place: Place) -> None:
    """When a holder is gone, one of all the others takes its run, with the crash written down."""
    async with place.open(CROWD) as stores:
        nodes, alive = crowd(stores)
        claim = await nodes[0].won()
        alive.discard("node-0")
        second = await winner(nodes[1:])
        assert (second.record.crashes, second.record.failures) == (1, 0)
        assert second.record.attempts[-1].outcome == "crashed"
        assert second.record.attempts[-1].node == "node-0"
        assert second.epoch > claim.epoch


async def test_claim_held_by_a_live_node_is_left_alone(place: Place) -> None:
    """A repeat seen while the first is running is held, which means: never acknowledged."""
    async with place.open(2) as stores:
        (holder, other), _ = crowd(stores)
        claim = await holder.won()
        for _ in range(3):
            assert await other.claim() is Verdict.HELD
        assert await holder.claims.owns(claim)
        await holder.claims.settle(claim, "done", "done")


@pytest.mark.parametrize("state", ["done", "cancelled", "dead", "lost"])
async def test_claim_of_an_ended_run_is_a_duplicate(place: Place, state: State) -> None:
    """A run that has ended is not executed again, whatever message comes."""
    async with place.open(2) as stores:
        (one, other), _ = crowd(stores)
        await one.claims.settle(await one.won(), state, "done")
        for message in (1, 2, 99):
            assert await other.claim(message=message) is Verdict.DUPLICATE


async def test_claim_of_an_older_message_is_superseded(place: Place) -> None:
    """Once a retry was parked as a message of its own, the one before it counts no more."""
    async with place.open(2) as stores:
        (one, other), _ = crowd(stores)
        await one.claims.settle(await one.won(), "failed", "failed", message=2, due=99.0)
        assert await other.claim(message=1) is Verdict.SUPERSEDED
        claim = await other.won(message=2)
        assert claim.record.message == 2
        assert await one.claim(message=1) is Verdict.SUPERSEDED


async def test_claim_of_another_job_with_the_same_id_is_foreign(place: Place) -> None:
    """Two jobs that were given one run id by their users are kept apart."""
    async with place.open(2) as stores:
        (one, other), _ = crowd(stores)
        await one.won()
        theirs = RunRecord("running", "default", "other-job")
        assert await other.claim(fresh=theirs) is Verdict.FOREIGN
        assert (await one.record()).job == "job"


async def test_claim_takes_keys_of_any_characters(place: Place) -> None:
    """What a user calls a run never touches another run's record."""
    async with place.open(1) as stores:
        (node,), _ = crowd(stores)
        keys = ["document:created", "*", ">", "a.b", " ", "\r\n", "ü", "=2E"]
        runs = [keyed_run("default", "job", key) for key in keys]
        claims = [await node.won(run) for run in runs]
        for number, claim in enumerate(claims):
            await node.claims.settle(claim, "done", "done", result=b"%d" % number)
        found = [bytes((await node.record(run)).result) for run in runs]
    assert found == [b"%d" % number for number in range(len(keys))]


# ---- zombies


async def test_settle_with_a_stale_revision_is_refused_and_counted(place: Place) -> None:
    """A holder that was replaced changes nothing, whatever it believes."""
    async with place.open(2) as stores:
        (zombie, other), alive = crowd(stores)
        stale = await zombie.won()
        alive.discard("node-0")
        claim = await other.won()
        with pytest.raises(ClaimLost):
            await zombie.claims.settle(stale, "done", "done", result=b'"zombie"')
        assert zombie.fenced == 1
        assert (await other.record()).token == claim.record.token
        await other.claims.settle(claim, "done", "done", result=b'"good"')
        with pytest.raises(ClaimLost):
            await zombie.claims.settle(stale, "failed", "failed")
        record = await other.record()
    assert (record.state, record.node, bytes(record.result)) == ("done", "node-1", b'"good"')
    assert [a.outcome for a in record.attempts] == ["crashed", "done"]


async def test_progress_of_a_replaced_holder_is_refused(place: Place) -> None:
    """Nor does a zombie overwrite the progress of the one that replaced it."""
    async with place.open(2) as stores:
        (zombie, other), alive = crowd(stores)
        stale = await zombie.won()
        alive.discard("node-0")
        claim = await other.won()
        assert not await zombie.claims.owns(stale)
        with pytest.raises(ClaimLost):
            await zombie.claims.progress(stale, Progress(0.9))
        await other.claims.progress(claim, Progress(0.1))
        assert (await other.record()).progress == Progress(0.1)


async def test_a_node_that_came_back_keeps_what_nobody_took(place: Place) -> None:
    """A heartbeat that lapsed for a while costs nothing if nobody looked meanwhile."""
    async with place.open(2) as stores:
        (node, other), alive = crowd(stores)
        claim = await node.won()
        alive.discard("node-0")
        alive.add("node-0")
        assert await other.claim() is Verdict.HELD
        assert await node.claims.owns(claim)
        await node.claims.settle(claim, "done", "done")


# ---- a holder's own writes


async def test_settle_waits_for_progress_on_its_way(place: Place) -> None:
    """A holder's own writes take turns: none is taken for another holder's."""
    async with place.open(1) as stores:
        (node,), _ = crowd(stores)
        claim = await node.won()
        tellers = [node.claims.progress(claim, Progress(n / 10)) for n in range(5)]
        await asyncio.gather(*tellers, node.claims.settle(claim, "done", "done"))
        record = await node.record()
    assert (record.state, record.progress) == ("done", Progress(0.4))
    assert node.fenced == 0


async def test_progress_after_the_end_is_refused(place: Place) -> None:
    """A thread that goes on after its timeout writes nothing any more, nor removes the TTL."""
    async with place.open(1) as stores:
        node = Node("node", stores[0], set(), ttl=TTL)
        claim = await node.won()
        await node.claims.settle(claim, "done", "done")
        assert not await node.claims.owns(claim)
        with pytest.raises(ClaimLost, match="over"):
            await node.claims.progress(claim, Progress(1.0))
        await place.outlive(stores[0], "run")


async def test_settle_recognises_progress_that_was_cut_off(place: Place) -> None:
    """A handler stopped while it told its progress: that write is its own, applied or not."""
    async with place.open(1) as stores:
        store = FaultyStore(stores[0])
        node = Node("node", store, set())
        claim = await node.won()
        store.wrote.clear()
        store.faults = ["cut off"]
        telling = asyncio.create_task(node.claims.progress(claim, Progress(0.5)))
        await store.wrote.wait()
        telling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await telling
        assert await node.claims.owns(claim)
        await node.claims.settle(claim, "done", "done")
        record = await node.record()
    assert record.state == "done"
    assert node.fenced == 0


# ---- unknown outcomes


@pytest.mark.parametrize("fault", ["applied", "dropped"])
async def test_claim_without_an_answer_is_resolved_by_its_token(place: Place, fault: str) -> None:
    """Whether the write was applied or not: the claim is won once, at the revision it has."""
    async with place.open(1) as stores:
        store = FaultyStore(stores[0])
        node = Node("node", store, set())
        store.faults = [fault, fault]
        claim = await node.won()
        entry = await stores[0].get("run")
        assert entry is not None
        assert (claim.revision, claim.epoch) == (entry.revision, entry.revision)
        await node.claims.settle(claim, "done", "done")
        assert (await node.record()).state == "done"


@pytest.mark.parametrize("fault", ["applied", "dropped"])
async def test_settle_without_an_answer_is_resolved_by_its_token(place: Place, fault: str) -> None:
    """A settle whose answer was lost is not mistaken for a lost claim, and counts once."""
    async with place.open(1) as stores:
        store = FaultyStore(stores[0])
        node = Node("node", store, set())
        claim = await node.won()
        store.faults = [fault, fault]
        await node.claims.settle(claim, "failed", "failed", error="x")
        record = await node.record()
        assert (record.failures, len(record.attempts)) == (1, 1)
        assert (await node.won()).record.attempt == 2
        assert node.fenced == 0


@pytest.mark.parametrize("last", ["stored late", ""])
async def test_settle_refused_for_its_own_first_copy_is_repeated(place: Place, last: str) -> None:
    """A leader without followers took it in and refuses the next copy: nobody else holds the run.

    Seen in chaos with an isolated server: the holder took it for a lost claim, and left a run that
    everybody else took for held.
    """
    async with place.open(1) as stores:
        store = FaultyStore(stores[0])
        node = Node("node", store, set())
        claim = await node.won()
        store.faults = ["taken in", "in process", "in process", last]
        await node.claims.settle(claim, "done", "done")
        assert (await node.record()).state == "done"
        assert node.fenced == 0


@pytest.mark.parametrize("last", ["stored late", ""])
async def test_claim_refused_for_its_own_first_copy_is_repeated(place: Place, last: str) -> None:
    """The first copy may still be stored: its token is kept, or nobody would know the claim."""
    async with place.open(1) as stores:
        store = FaultyStore(stores[0])
        node = Node("node", store, set())
        store.faults = ["taken in", "in process", "in process", last]
        claim = await node.won()
        await node.claims.settle(claim, "done", "done")
        assert (await node.record()).state == "done"


async def test_claim_lost_while_unanswered_is_held_by_the_other(place: Place) -> None:
    """When the write was dropped and another was first, the token says whose it is."""
    async with place.open(2) as stores:
        alive: set[str] = set()
        store = FaultyStore(stores[0])
        one, other = Node("one", store, alive), Node("other", stores[1], alive)
        store.faults, store.meanwhile = ["dropped"], other.won
        assert await one.claim() is Verdict.HELD
        assert (await one.record()).node == "other"


@pytest.mark.parametrize("fault", ["applied", "dropped"])
async def test_settle_unanswered_and_taken_over_is_refused(place: Place, fault: str) -> None:
    """Somebody took the run between the lost answer and the repeat: then nothing more is sent."""
    async with place.open(2) as stores:
        alive: set[str] = set()
        store = FaultyStore(stores[0])
        one, other = Node("one", store, alive), Node("other", stores[1], alive)
        claim = await one.won()
        store.faults = [fault]

        async def take_over() -> None:
            alive.discard("one")
            await other.won()

        store.meanwhile = take_over
        with pytest.raises(ClaimLost):
            await one.claims.settle(claim, "failed", "failed")
        assert (await one.record()).node == "other"
        assert (await one.record()).failures == (1 if fault == "applied" else 0)


async def test_settle_is_repeated_until_there_is_room(place: Place) -> None:
    """On a full disk what is held is kept and settled later: left alone, nobody could take it."""
    async with place.open(1) as stores:
        store = FaultyStore(stores[0])
        node = Node("node", store, set())
        store.faults = ["full"]
        with pytest.raises(BrokerError, match="no space"):
            await node.claim()
        claim = await node.won()
        store.faults = ["full"] * 5
        await node.claims.settle(claim, "done", "done")
        assert (await node.record()).state == "done"


# ---- crashes


async def test_crash_limit_makes_a_run_poison(place: Place) -> None:
    """The third worker that dies over a run is the last: it is given up, with every crash."""
    async with place.open(4) as stores:
        nodes, alive = crowd(stores)
        for node in nodes[:3]:
            await node.won()
            alive.discard(node.name)
        assert await nodes[3].claim() is Verdict.POISON
        found = await nodes[3].claims.read("run")
        assert found is not None
        given_up = await nodes[3].claims.give_up("run", *found, state="dead", error="poison")
        assert given_up is not None
        assert await nodes[3].claim() is Verdict.DUPLICATE
        record = await nodes[3].record()
    assert (record.state, record.crashes, record.failures) == ("dead", 3, 0)
    assert [a.node for a in record.attempts] == ["node-0", "node-1", "node-2"]


async def test_failures_do_not_count_as_crashes(place: Place) -> None:
    """A run that fails often is not poison, and one that crashed keeps its retries."""
    async with place.open(1) as stores:
        (node,), alive = crowd(stores)
        for _ in range(5):
            await node.claims.settle(await node.won(), "failed", "failed")
        assert (await node.won()).record.crashes == 0
        alive.clear()
        claim = await node.won()
        assert (claim.record.failures, claim.record.crashes) == (5, 1)


async def test_give_up_leaves_a_run_that_has_moved(place: Place) -> None:
    """A verdict is worth the revision at which it was made: a live holder is not robbed."""
    async with place.open(2) as stores:
        (one, other), alive = crowd(stores)
        await one.won()
        found = await other.claims.read("run")
        assert found is not None
        alive.discard("node-0")
        claim = await other.won()
        assert await one.claims.give_up("run", *found, state="dead", error="late") is None
        assert await other.claims.owns(claim)


async def test_restart_never_makes_a_lost_run(place: Place) -> None:
    """A job that must not be restarted is not: its run is lost, for a person to decide."""
    async with place.open(2) as stores:
        (one, other), alive = crowd(stores)
        fresh = RunRecord("running", "default", "job", restart="never")
        assert isinstance(await one.claim(fresh=fresh), Claim)
        assert await other.claim(fresh=fresh) is Verdict.HELD
        alive.discard("node-0")
        assert await other.claim(fresh=fresh) is Verdict.LOST


async def test_restart_after_grace_waits_for_it(place: Place) -> None:
    """Effects that cannot be fenced get their grace before another starts."""
    async with place.open(2) as stores:
        (one, other), alive = crowd(stores)
        fresh = RunRecord("running", "default", "job", restart="after_grace")
        await one.claim(fresh=fresh)
        alive.discard("node-0")
        other.in_grace.add("node-0")
        assert await other.claim(fresh=fresh) is Verdict.HELD
        other.in_grace.clear()
        assert isinstance(await other.claim(fresh=fresh), Claim)


async def test_last_chances_are_taken_one_at_a_time(place: Place) -> None:
    """A run that kills its process takes no other suspect with it, whichever is claimed first."""
    async with place.open(1) as stores:
        alive: set[str] = set()
        first = Node("first", stores[0], alive, crash_limit=2)
        await first.won("poison")
        await first.won("bystander")
        alive.discard("first")
        second = Node("second", stores[0], alive, crash_limit=2)
        runs = ["poison", "bystander"]
        answers = await asyncio.gather(*map(second.claim, runs))
        (alone,) = [answer for answer in answers if isinstance(answer, Claim)]
        runs.remove(alone.run)
        assert Verdict.CROWDED in answers
        assert isinstance(await second.claim("fresh"), Claim)
        second.claims.release(alone)
        assert isinstance(await second.claim(runs[0]), Claim)


# ---- how long records last


async def test_only_ended_runs_expire(place: Place) -> None:
    """A record lasts as long as its run: a running or waiting one may take weeks."""
    async with place.open(1) as stores:
        node = Node("node", stores[0], set(), ttl=TTL)
        await node.won("running")
        await node.claims.settle(await node.won("waiting"), "failed", "failed")
        told = await node.won("told")
        await node.claims.progress(told, Progress(0.5))
        await node.claims.settle(await node.won("ended"), "done", "done")
        await place.outlive(stores[0], "ended")
        for run in ("running", "waiting", "told"):
            assert await stores[0].get(run) is not None
        assert isinstance(await node.claim("ended"), Claim)
