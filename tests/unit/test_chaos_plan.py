"""A chaos plan is data: repeatable, complete, and never unfair."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from chaos import ChaosPlan, Fault, Victim
from chaos.plan import SERVERS

PROCESS = ("kill", "stop", "freeze", "cut", "stall")
VICTIMS = [
    *(Victim(f"worker-{n}", "worker", PROCESS) for n in range(4)),
    *(Victim(f"scheduler-{n}", "scheduler", (*PROCESS, "reclock")) for n in range(2)),
    *(Victim(f"nats-{n}", "nats", ("kill", "stop", "freeze", "isolate")) for n in range(3)),
    Victim("nats-all", "cluster", ("outage",)),
]
seeds = st.integers(0, 10_000)


@given(seeds)
def test_plan_is_the_same_for_the_same_seed(seed: int) -> None:
    """Also when the victims come in another order."""
    plan = ChaosPlan.random(seed, 300, VICTIMS)
    assert plan == ChaosPlan.random(seed, 300, reversed(VICTIMS))
    assert plan.faults != ChaosPlan.random(seed + 1, 300, VICTIMS).faults


@given(seeds)
def test_plan_never_hits_two_servers_at_once(seed: int) -> None:
    """A majority of the servers is lost only when that is the fault itself."""
    plan = ChaosPlan.random(seed, 600, VICTIMS)
    servers = [fault for fault in plan.faults if fault.role in SERVERS]
    assert len(servers) > 5
    for before, after in pairwise(servers):
        assert before.until < after.at


@given(seeds)
def test_plan_leaves_a_victim_alone_until_it_has_recovered(seed: int) -> None:
    """No fault begins on a target that still suffers from the last one, and all end in time."""
    by_target: dict[str, list[Fault]] = defaultdict(list)
    plan = ChaosPlan.random(seed, 600, VICTIMS)
    for fault in plan.faults:
        by_target[fault.target].append(fault)
        assert fault.until <= plan.seconds
    for faults in by_target.values():
        for before, after in pairwise(faults):
            assert before.until < after.at


@given(seeds)
def test_plan_covers_every_fault_of_every_role(seed: int) -> None:
    """Ten minutes have all of them, whatever the seed."""
    plan = ChaosPlan.random(seed, 600, VICTIMS)
    wanted = {(victim.role, kind) for victim in VICTIMS for kind in victim.kinds}
    assert {(fault.role, fault.kind) for fault in plan.faults} == wanted


def test_rolling_plan_restarts_everyone_in_turn() -> None:
    """Each that can be asked to end is, once per round, and nobody else meanwhile."""
    plan = ChaosPlan.rolling(VICTIMS, rounds=2)
    assert {fault.kind for fault in plan.faults} == {"stop"}
    names = [fault.target for fault in plan.faults]
    assert sorted(names) == sorted(2 * [v.name for v in VICTIMS if "stop" in v.kinds])
    for before, after in pairwise(plan.faults):
        assert before.until < after.at
