"""The rules of a run's record, driven through histories of crashes, freezes and repeats."""

from __future__ import annotations

import os
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from holdfast.model import run as runs
from holdfast.model.replay import MARK
from tests.unit.run_world import ENDINGS, Process, World

HISTORIES = int(os.environ.get("HOLDFAST_HISTORIES", "4000"))
SEEDS = 4
NODES = ("a", "b", "c")
ALL = 30
STEPS = (ALL, ALL, *range(1, 8))
FATES = ("live", "crash", "freeze")
DISTURBANCES = ("crash", "freeze", "return")
PASSINGS = ("redeliver", "redeliver", "fire", "fire", "forget ids", "publish again")
INTERVENTIONS = ("replay", "replay", "replay", "crash", "cancel")
numbers = st.integers(0, 5)
steps = st.sampled_from(STEPS)


class RunHistories(RuleBasedStateMachine):
    """Anything that workers, operators and the network can do to one run."""

    world: World

    @initialize(restart=st.sampled_from(["immediately", "immediately", "never"]))
    def accept(self, restart: runs.Restart) -> None:
        """The client publishes the run."""
        self.world = World(restart)
        self.world.publish(1, "run")

    @rule(
        which=numbers,
        node=st.sampled_from(NODES),
        ending=st.sampled_from(ENDINGS),
        steps=steps,
        fate=st.sampled_from(FATES),
    )
    def deliver(self, which: int, node: str, ending: str, steps: int, fate: str) -> None:
        """The server hands a message to a node, which begins an attempt and gets so far."""
        world = self.world
        if waiting := [m for m in world.queue if not m.out]:
            msg = waiting[which % len(waiting)]
            msg.out = True
            msg.deliveries += 1
            world.silent.discard(node)  # a fresh process, or one that registered again
            self.take(world.start(node, lambda me: world.attempt(me, msg, ending)), steps)
            self.disturb(node, fate)

    @rule(which=numbers, steps=steps)
    def go_on(self, which: int, steps: int) -> None:
        """A process that stood still takes its next steps."""
        if processes := self.world.processes:
            self.take(processes[which % len(processes)], steps)

    @rule(node=st.sampled_from(NODES), what=st.sampled_from(DISTURBANCES))
    def disturb(self, node: str, what: str) -> None:
        """A node dies, or falls silent and goes on later as a zombie, or is heard of again."""
        world = self.world
        if what in ("crash", "freeze"):
            world.silent.add(node)
            for msg in world.queue:
                msg.out = False  # nobody extends it; if too early, it must not matter
        if what == "crash":
            world.kill(node)
        elif what == "return" and any(p.node == node for p in world.processes):
            world.silent.discard(node)

    @rule(what=st.sampled_from(PASSINGS))
    def let_time_pass(self, what: str) -> None:
        """Deadlines pass: of acknowledgements, of schedules, of the window of message ids."""
        world = self.world
        if what == "redeliver":
            for msg in world.queue:
                msg.out = False
        elif what == "fire":
            for stamp in sorted(world.later):
                world.fire(stamp)
        elif what == "forget ids":
            world.known_ids.clear()
        else:
            world.publish(1, "run")  # by a client that had heard no answer

    @rule(which=numbers, what=st.sampled_from(INTERVENTIONS), steps=steps)
    def intervene(self, which: int, what: str, steps: int) -> None:
        """An operator replays a dead letter or cancels; the tool may stop half-way, for good."""
        world = self.world
        if what == "crash":
            world.kill("operator")
        elif what == "cancel":
            self.take(world.start("operator", world.cancel), steps)
        elif world.letters:
            stamp = world.letters[which % len(world.letters)]
            self.take(world.start("operator", lambda me: world.replay(me, stamp)), steps)

    def take(self, process: Process, steps: int) -> None:
        for _ in range(steps):
            if process in self.world.processes:
                self.world.step(process)

    # ---- what must hold

    @invariant()
    def one_holder(self) -> None:
        """Of all who believe to hold the run at most one could write."""
        world = self.world
        able = [p for p in world.processes if p.epoch and p.revision == world.revision]
        assert len(able) <= 1

    @invariant()
    def never_lost(self) -> None:
        """An accepted run that has not ended has a message, or a dead letter to send again."""
        world = self.world
        if world.record is None:
            assert world.queue or world.later
        elif not world.record.terminal:
            wanted = world.record.message
            carried = [m for m in (*world.queue, *world.later.values()) if m.stamp >= wanted]
            assert carried or (world.record.token.startswith(MARK) and world.letters)

    def teardown(self) -> None:
        """When all faults are over, the run ends."""
        world = self.world
        for node in (*NODES, "operator"):
            world.kill(node)
        heal(world)
        assert world.record is not None
        assert world.record.terminal


def heal(world: World) -> None:
    """One healthy worker takes every message; an operator repeats a replay that was cut off."""
    for round in range(50):
        for stamp in sorted(world.later):
            world.fire(stamp)
        if not world.queue:
            if world.record and world.record.token.startswith(MARK) and not world.record.terminal:
                finish(
                    world, world.start("operator", lambda me: world.replay(me, world.letters[0]))
                )
                continue
            return
        msg = world.queue[0]
        msg.out = True
        msg.deliveries += 1
        node = f"healthy{round}"
        finish(world, world.start(node, lambda me, m=msg: world.attempt(me, m, "done")))


def finish(world: World, process: object) -> None:
    while process in world.processes:
        world.step(process)


def walk(random: Random) -> None:
    """One long history at random."""
    machine = RunHistories()
    machine.accept(restart=random.choice(["immediately", "immediately", "never"]))
    pick = random.choice
    for _ in range(60):
        which, node, steps = random.randrange(6), pick(NODES), pick(STEPS)
        match random.randrange(12):
            case 0 | 1 | 2 | 3:
                endings = pick([ENDINGS, ENDINGS[1:4], ENDINGS[-1:]])
                machine.deliver(which, node, pick(endings), steps, pick(FATES))
            case 4 | 5 | 6:
                machine.go_on(which, steps)
            case 7:
                machine.disturb(node, pick(DISTURBANCES))
            case 8 | 9:
                machine.let_time_pass(pick(PASSINGS))
            case 10:
                machine.intervene(which, pick(INTERVENTIONS), steps)
        machine.one_holder()
        machine.never_lost()
    machine.teardown()


def test_run_survives_any_history() -> None:
    """No order of crashes, freezes, repeats, retries and replays loses a run or gives it twice."""
    run_state_machine_as_test(
        RunHistories,
        settings=settings(max_examples=100, stateful_step_count=40, deadline=None),
    )


@pytest.mark.parametrize("seed", range(SEEDS))
def test_run_survives_long_histories(seed: int) -> None:
    """The same for histories that go through many attempts, dead letters and replays."""
    for number in range(HISTORIES // SEEDS):
        try:
            walk(Random(f"{seed}.{number}"))
        except AssertionError as error:
            raise AssertionError(f"history {seed}.{number}: {error}") from error
