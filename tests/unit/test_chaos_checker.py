"""The checker sees every kind of broken promise, and takes what can be explained for what it is."""

from __future__ import annotations

from pathlib import Path

from chaos import Checker, Fault, History, Line, Verdict, Wound
from chaos.fleet import Exit
from holdfast.model.journal import Parent
from holdfast.model.run import Attempt, RunRecord


def effect(mark: str, run: str = "", epoch: int = 1, at: float = 1.0, member: str = "w1") -> Line:
    return Line("effect", mark, run or f"run-{mark}", epoch, 1, member, at)


def start(mark: str, run: str = "", epoch: int = 1, at: float = 0.5, member: str = "w1") -> Line:
    return Line("start", mark, run or f"run-{mark}", epoch, 1, member, at)


def fail(mark: str, epoch: int = 1, at: float = 0.9) -> Line:
    return Line("fail", mark, f"run-{mark}", epoch, 1, "w1", at)


def wound(kind: str = "kill", target: str = "w1", role: str = "worker", error: str = "") -> Wound:
    return Wound(Fault(1, 0, kind, target, role, 1.0), 2.0, 3.0, error)


def history(tmp_path: Path, **states: str) -> History:
    """Operations by name, each with its state; a chain has two marks."""
    found = History(tmp_path / "history.jsonl")
    for name, state in states.items():
        marks = (name, f"{name}/next") if name.startswith("chain") else (name,)
        found.invoke(name, "keyed", marks)
        if state == "ok":
            found.ok(name, f"run-{name}")
        elif state != "invoked":
            getattr(found, state)(name, "because")
    found.close()
    return found


def check(found: History, *lines: Line, **more: object) -> Verdict:
    wounds = more.pop("wounds", ())
    checker = Checker(found.operations.values(), lines, wounds, **more)  # type: ignore[arg-type]
    return checker.check()


def kinds(verdict: Verdict) -> list[str]:
    return sorted(violation.kind for violation in verdict.violations)


def test_accepted_run_without_effect_is_lost(tmp_path: Path) -> None:
    """Accepted and never seen: lost; seen once: fine."""
    found = history(tmp_path, a="ok", b="ok")
    assert kinds(check(found, effect("a"))) == ["lost"]
    assert not kinds(check(found, effect("a"), effect("b")))


def test_unanswered_operation_may_happen_or_not_but_whole(tmp_path: Path) -> None:
    """Without an answer both are right; half of a chain is not, and neither is twice."""
    found = history(tmp_path, a="unknown", b="invoked", chain="unknown")
    verdict = check(found, effect("a"))
    assert not kinds(verdict)
    assert verdict.unknown_applied == 1
    assert kinds(check(found, effect("chain"))) == ["torn"]
    assert kinds(check(found, effect("a"), effect("a", "other"))) == ["duplicated"]


def test_chain_is_lost_when_its_second_link_is_missing(tmp_path: Path) -> None:
    """Each effect that an accepted operation stands for counts."""
    found = history(tmp_path, chain="ok")
    assert kinds(check(found, effect("chain"))) == ["lost"]
    assert not kinds(check(found, effect("chain"), effect("chain/next")))


def test_effect_of_a_refused_or_unasked_operation_is_a_phantom(tmp_path: Path) -> None:
    """What was refused must not happen, and nothing happens by itself."""
    found = history(tmp_path, a="failed")
    assert kinds(check(found, effect("a"))) == ["phantom"]
    assert kinds(check(found, effect("b"))) == ["phantom"]


def test_repeats_of_a_key_are_one_operation(tmp_path: Path) -> None:
    """One that was made again and refused the second time is accepted all the same."""
    found = history(tmp_path, a="ok")
    found.invoke("a", "keyed", ("a",))
    found.unknown("a", "no answer")
    found.close()
    assert kinds(check(found)) == ["lost"]
    again = History.load(found.path)
    assert again.operations["a"].state == "ok"
    assert again.operations["a"].made == 2


def test_fence_refuses_what_a_zombie_does_late(tmp_path: Path) -> None:
    """A smaller epoch after a larger one is refused; a larger one of the same run is a repeat."""
    found = history(tmp_path, a="ok", b="ok")
    verdict = check(found, effect("a", epoch=2), effect("a", epoch=1))
    assert verdict.stale_refused == 1
    verdict = check(found, effect("a", epoch=1), effect("a", epoch=2), effect("b"))
    assert verdict.repeated_effects == 1
    assert not kinds(verdict)
    assert kinds(check(found, effect("a"), effect("a"), effect("b"))) == ["duplicated"]


def test_second_start_needs_an_explanation(tmp_path: Path) -> None:
    """A fault of its worker, of NATS, or a failure that was meant explain it."""
    found = history(tmp_path, a="ok")
    twice = (start("a"), start("a", epoch=2, at=4.0, member="w2"), effect("a", epoch=2, at=5.0))
    assert kinds(check(found, *twice)) == ["unexplained"]
    assert not kinds(check(found, *twice, wounds=[wound()]))
    assert not kinds(check(found, *twice, wounds=[wound("kill", "nats-1", "nats")]))
    assert not kinds(check(found, *twice, fail("a")))
    assert kinds(check(found, *twice, wounds=[wound(target="w3")])) == ["unexplained"]


def test_process_that_ends_by_itself_needs_an_explanation(tmp_path: Path) -> None:
    """After a fault it may have to; without one it has crashed."""
    found = history(tmp_path)
    assert kinds(check(found, exits=[Exit("w1", 4.0, 1)])) == ["unexplained"]
    assert not kinds(check(found, exits=[Exit("w1", 4.0, 1)], wounds=[wound()]))
    assert kinds(check(found, exits=[Exit("w1", 40.0, 1)], wounds=[wound()])) == ["unexplained"]


def test_two_starts_under_one_epoch_are_two_holders(tmp_path: Path) -> None:
    """One claim, one start, whatever happened to its worker."""
    found = history(tmp_path, a="ok")
    lines = (start("a"), start("a", at=2.5, member="w2"), effect("a"))
    assert kinds(check(found, *lines, wounds=[wound()])) == ["duplicated"]


def test_run_that_starts_at_most_once_may_be_given_up_not_forgotten(tmp_path: Path) -> None:
    """Its worker died: recorded as lost it is accounted for; a second start never is right."""
    found = History(tmp_path / "history.jsonl")
    found.invoke("a", "once", ("a",), at_most_once=True)
    found.ok("a", "run-a")
    found.close()
    lost, left = RunRecord("lost", "g", "j"), RunRecord("running", "g", "j")
    verdict = check(found, start("a"), records={"run-a": lost})
    assert not kinds(verdict)
    assert verdict.written_off == 1
    assert kinds(check(found, start("a"), records={"run-a": left})) == ["lost"]
    twice = (start("a"), start("a", epoch=2, at=4.0), effect("a", epoch=2))
    assert kinds(check(found, *twice, wounds=[wound()])) == ["duplicated"]


def test_settle_of_a_former_holder_is_stale(tmp_path: Path) -> None:
    """A record that is done under a smaller epoch than one that was started: accepted too late."""
    found = history(tmp_path, a="ok")
    lines = (start("a"), start("a", epoch=2, at=3.0, member="w2"), effect("a"))
    old = RunRecord("done", "g", "j", attempts=(Attempt(1, "w1", 1, outcome="done"),))
    new = RunRecord("done", "g", "j", attempts=(Attempt(2, "w2", 2, outcome="done"),))
    assert kinds(check(found, *lines, wounds=[wound()], records={"run-a": old})) == ["stale"]
    assert not kinds(check(found, *lines, wounds=[wound()], records={"run-a": new}))


def test_slots_must_all_happen(tmp_path: Path) -> None:
    """A slot that was due and did nothing was missed; later ones are not phantoms."""
    found = history(tmp_path)
    assert kinds(check(found, effect("slot b"), slots=["slot a"])) == ["missed"]
    assert not kinds(check(found, effect("slot a"), effect("slot b"), slots=["slot a"]))


def test_delayed_run_must_not_be_early(tmp_path: Path) -> None:
    """It may be late; before its time it is wrong."""
    found = History(tmp_path / "history.jsonl")
    found.invoke("a", "delayed", ("a",), not_before=10.0)
    found.ok("a")
    found.close()
    assert kinds(check(found, effect("a", at=9.0))) == ["early"]
    assert not kinds(check(found, effect("a", at=10.1)))


def dropped(bucket: str) -> Wound:
    return Wound(Fault(1, 0, "drop", "records", "records", 1.0, what=bucket), 2.0, 3.0)


def doomed(tmp_path: Path) -> History:
    found = History(tmp_path / "history.jsonl")
    found.invoke("a", "poison", ("a",), doomed=True)
    found.ok("a", "run-a")
    found.close()
    return found


def test_run_that_kills_its_worker_must_be_given_up(tmp_path: Path) -> None:
    """Dead is right for it and wrong for everybody else; nobody waits for its effect."""
    dead = RunRecord("dead", "g", "j", error="3 workers died")
    found = doomed(tmp_path)
    assert not kinds(check(found, start("a"), records={"run-a": dead}))
    assert kinds(check(found, start("a"), records={"run-a": RunRecord("running", "g", "j")})) == [
        "spared"
    ]
    assert kinds(check(found, start("a"), records={"run-a": dead, "run-b": dead})) == ["dead"]


def test_deleted_records_excuse_what_only_they_could_tell(tmp_path: Path) -> None:
    """Without the bucket of runs nobody knows who waits or was given up; other buckets excuse
    nothing."""
    found = doomed(tmp_path)
    assert kinds(check(found, wounds=[dropped("slots")])) == ["spared"]
    late = Wound(dropped("runs").fault, 1e12, 1e12 + 1)
    assert not kinds(check(found, wounds=[late]))


def test_result_of_a_replaced_holder_is_wrong(tmp_path: Path) -> None:
    """What `result()` gives was written by the attempt that ended the run."""
    found = history(tmp_path, a="ok")
    record = RunRecord("done", "g", "j", attempts=(Attempt(2, "w2", 2, outcome="done"),))
    lines = (start("a", epoch=2), effect("a", epoch=2))
    assert not kinds(check(found, *lines, records={"run-a": record}, results={"run-a": 2}))
    assert kinds(check(found, *lines, records={"run-a": record}, results={"run-a": 1})) == ["wrong"]


def test_worker_that_ends_by_a_poison_explains_the_restart_of_its_runs(tmp_path: Path) -> None:
    """Its own end is expected, and the next start of a neighbour has a cause."""
    found = history(tmp_path, a="ok")
    lines = (start("a"), start("a", epoch=2, at=3.0, member="w2"), effect("a", epoch=2))
    ended = [Exit("w1", 2.0, 77, expected=True)]
    verdict = check(found, *lines, exits=ended)
    assert not kinds(verdict)
    assert verdict.repeated_share == 0.5
    assert "unexplained" in kinds(check(found, *lines, exits=[Exit("w1", 2.0, 1)]))


def test_dead_runs_and_open_wounds_are_told(tmp_path: Path) -> None:
    """A run that was given up and a fault that could not be healed are no success."""
    found = history(tmp_path)
    dead = RunRecord("dead", "g", "j", error="gave up")
    verdict = check(found, wounds=[wound(error="no such process")], records={"r": dead})
    assert kinds(verdict) == ["dead", "open"]


def test_more_runs_of_a_key_than_its_limit_are_over(tmp_path: Path) -> None:
    """Three at once of two; a replaced holder that still computes does not count."""
    marks = [f"narrow-{n} @1" for n in range(3)]
    found = history(tmp_path, **dict.fromkeys(marks, "ok"))
    begun = [start(mark, at=1.0 + n / 10) for n, mark in enumerate(marks)]
    ends = [effect(mark, at=2.0 + n / 10) for n, mark in enumerate(marks)]
    assert kinds(check(found, *begun, *ends)) == ["over"]
    later = [start(marks[2], at=2.05), *ends[:2], effect(marks[2], at=2.5)]
    assert not kinds(check(found, *begun[:2], *later))
    zombie = [start(marks[0], epoch=2, at=1.15), effect(marks[0], epoch=2, at=1.18)]
    late = [*begun, *zombie, *ends]
    assert "over" not in kinds(check(found, *late, wounds=[wound("freeze")]))


def test_run_that_overtakes_an_earlier_one_of_its_key_is_told(tmp_path: Path) -> None:
    """The next one starts after the effect of the one before, retries included."""
    first, second = "sorted-1 @0", "sorted-2 @0"
    found = history(tmp_path, **{first: "ok", second: "ok"})
    lines = [start(first, at=1.0), fail(first, at=1.1), start(first, epoch=2, at=2.0)]
    good = [*lines, effect(first, epoch=2, at=2.1), start(second, at=2.2), effect(second, at=2.3)]
    assert not kinds(check(found, *good))
    bad = [*lines, start(second, at=1.5), effect(second, at=1.6), effect(first, epoch=2, at=2.1)]
    assert "overtaken" in kinds(check(found, *bad))


def test_flows_that_have_not_ended_as_they_should_are_told(tmp_path: Path) -> None:
    """A parked flow is stuck, one that fails unasked is dead, a child without a flow an orphan."""
    found = History(tmp_path / "history.jsonl")
    for name, kind in (("f1", "flow"), ("f2", "flow"), ("u1", "undone"), ("c1", "called")):
        found.invoke(name, kind, (f"{name}/first",))
        found.ok(name, f"flow/{name}")
    found.close()
    lines = [effect(f"{name}/first") for name in found.operations]

    def record(state: str, parent: str = "") -> RunRecord:
        where = str(Parent(parent, "g", "j", 1, 0, 3)) if parent else ""
        return RunRecord(state, "g", "j", parent=where)

    good = {
        "flow/f1": record("done"),
        "flow/f2": record("done"),
        "flow/u1": record("dead"),
        "flow/c1": record("cancelled"),
        "child": record("done", "flow/f1"),
        "lost child": record("dead", "flow/c1"),
    }
    assert not kinds(check(found, *lines, records=good))
    assert kinds(check(found, *lines, records=good | {"flow/f1": record("parked")})) == ["stuck"]
    assert "dead" in kinds(check(found, *lines, records=good | {"flow/f1": record("dead")}))
    undone = good | {"flow/u1": record("done")}
    assert kinds(check(found, *lines, records=undone)) == ["dead"]
    waits = good | {"child": record("running", "flow/f1")}
    assert kinds(check(found, *lines, records=waits)) == ["stuck"]
    alone = good | {"child": record("done", "flow/gone")}
    assert kinds(check(found, *lines, records=alone)) == ["orphan"]
    drop = Wound(Fault(1, 0, "drop", "records", "records", 1.0, what="runs"), 2.0, 3.0)
    assert not kinds(check(found, *lines, records=alone, wounds=[drop]))
    assert kinds(check(found, *lines[1:], records=good)) == ["lost"]
