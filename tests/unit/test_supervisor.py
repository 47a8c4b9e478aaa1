"""When a process is started again, when that is hopeless, and how one process is kept running."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.child import ending
from holdfast.worker.supervisor import (
    CONFIG_EXIT,
    LONGEST_WAIT_SECONDS,
    STARTS,
    GivenUp,
    KeptProcess,
    Restarts,
    Spec,
    Supervisor,
)

KILLED = -9


def test_restarts_wait_longer_while_it_keeps_dying() -> None:
    """0.2 s, doubled each time, at most 5 s."""
    restarts = Restarts()
    waits = [restarts.after(KILLED, lived=1, up=True) for _ in range(8)]
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_restarts_start_over_after_a_long_life() -> None:
    """A process that had lived for a while is started again soon."""
    restarts = Restarts()
    for _ in range(5):
        restarts.after(KILLED, lived=1, up=True)
    assert restarts.after(KILLED, lived=60, up=True) == 0.2


def test_restarts_replace_at_once_what_ended_well() -> None:
    """Its share of runs is done: no wait, and earlier deaths are forgotten."""
    restarts = Restarts()
    restarts.after(KILLED, lived=1, up=True)
    assert restarts.after(0, lived=1, up=True) == 0.0
    assert restarts.after(KILLED, lived=1, up=True) == 0.2


def test_restarts_give_up_what_never_comes_up() -> None:
    """Five starts in a row that came to nothing are enough."""
    restarts = Restarts()
    waits = [restarts.after(1, lived=0.1, up=False) for _ in range(STARTS)]
    assert waits[:-1] == [0.2, 0.4, 0.8, 1.6]
    assert waits[-1] is None


def test_restarts_give_up_a_wrong_configuration_at_once_unless_it_has_worked() -> None:
    """Trying again does not help; but a file that is being replaced meanwhile may heal."""
    assert Restarts().after(CONFIG_EXIT, lived=0.1, up=False) is None
    worked = Restarts()
    worked.after(KILLED, lived=60, up=True)
    assert worked.after(CONFIG_EXIT, lived=0.1, up=False) == 0.2


@given(st.lists(st.tuples(st.sampled_from([0, 1, KILLED, CONFIG_EXIT]), st.floats(0, 100))))
def test_restarts_never_give_up_what_comes_up(history: list[tuple[int, float]]) -> None:
    """However often it dies after it was up, it is started again, within five seconds."""
    restarts = Restarts()
    for code, lived in history:
        wait = restarts.after(code, lived=lived, up=True)
        assert wait is not None
        assert 0 <= wait <= LONGEST_WAIT_SECONDS


def test_ending_is_told_in_words() -> None:
    """A signal and an exit code are different things."""
    assert (ending(-9), ending(3)) == ("killed by signal 9", "exit code 3")


def python(code: str, announces: Path | None = None) -> Spec:
    return Spec("process", [sys.executable, "-I", "-S", "-c", code], {}, announces)


async def test_keeper_says_that_it_is_up_and_why_it_is_not(tmp_path: Path) -> None:
    """Up when the announced file exists; after its end the trouble is told."""
    mark = tmp_path / "mark"
    keeper = KeptProcess(python(f"open({str(mark)!r}, 'w'); import time; time.sleep(60)", mark))
    running = asyncio.create_task(keeper.run())
    await keeper.up.wait()
    assert keeper.trouble == ""
    keeper.stop()
    await running
    assert keeper.trouble == "killed by signal 15"


async def test_supervisor_gives_up_on_a_wrong_configuration() -> None:
    """The first process goes first: the others are never started."""
    supervisor = Supervisor([python(f"raise SystemExit({CONFIG_EXIT})")] * 3, stop_seconds=5)
    assert await supervisor.run() == 1
    assert [keeper.starts for keeper in supervisor.keepers] == [1, 0, 0]


async def test_supervisor_kills_what_does_not_end_in_time(tmp_path: Path) -> None:
    """A process that ignores SIGTERM is killed, and the exit code says that it had to be."""
    mark = tmp_path / "mark"
    deaf = f"import signal, time; signal.signal(15, signal.SIG_IGN); open({str(mark)!r}, 'w')"
    supervisor = Supervisor([python(f"{deaf}; time.sleep(60)", mark)], stop_seconds=0.2)
    running = asyncio.create_task(supervisor.run())
    await supervisor.keepers[0].up.wait()
    supervisor.stop()
    assert await running == 1
    assert supervisor.keepers[0].child is not None
    assert supervisor.keepers[0].child.exited.is_set()


async def test_keeper_gives_up_with_the_reason(tmp_path: Path) -> None:
    """What cannot be started raises, with how it ended."""
    keeper = KeptProcess(python("raise SystemExit(3)", tmp_path / "never"), clock=_Hasty())
    with pytest.raises(GivenUp, match="process cannot be started: exit code 3"):
        await keeper.run()
    assert keeper.starts == STARTS


class _Hasty:
    """A clock on which waiting takes no time."""

    def monotonic(self) -> float:
        return 0.0

    def utc(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.01))
