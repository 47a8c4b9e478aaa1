"""The parts of an agent: journal, functions, execution, facts."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from chaos.zoo import ZOO
from holdfast import Context, Holdfast
from holdfast.agent.builtins import builtins, cmd_run, file_hash
from holdfast.agent.execution import CommandExecutor
from holdfast.agent.facts import HostFacts
from holdfast.agent.functions import Call, Function, Functions
from holdfast.agent.journal import KEPT, Journal
from holdfast.errors import ConfigError, HoldfastError, InvalidInput
from holdfast.model.fleet import Order, Return
from holdfast.process import run_loop
from tests.support import until

CALL = Call("f1", "web1", 7, 0.0)


def test_journal_outlives_the_process(tmp_path: Path) -> None:
    """What was accepted, done or sent is known in the next life; the file is private."""
    journal = Journal(tmp_path / "agent")
    journal.open()
    journal.enter("f1", 5)
    journal.enter("f2", 6)
    journal.done("f2", b"return")
    journal.enter("f3", 7)
    journal.done("f3", b"x")
    journal.sent("f3")
    journal.raise_epoch("f1", 9)
    journal.close()
    path = tmp_path / "agent" / "runs.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = Journal(tmp_path / "agent")
    again.open()
    found = {run: again.get(run) for run in ("f1", "f2", "f3")}
    assert [(e.epoch, e.state, e.body) for e in found.values() if e] == [
        (9, "accepted", b""),
        (6, "done", b"return"),
        (7, "sent", b""),
    ]
    assert [e.run for e in again.waiting()] == ["f1", "f2"] or len(again.waiting()) == 2
    again.close()


def test_journal_ignores_a_line_that_a_crash_cut_off(tmp_path: Path) -> None:
    """The last line may be half written: it was never accepted."""
    journal = Journal(tmp_path)
    journal.open()
    journal.enter("f1", 5)
    journal.close()
    with (tmp_path / "runs.jsonl").open("ab") as file:
        file.write(b'{"run":"f2","epo')
    again = Journal(tmp_path)
    again.open()
    assert again.get("f1")
    assert again.get("f2") is None
    again.enter("f3", 8)
    again.close()
    last = Journal(tmp_path)
    last.open()
    assert last.get("f3")
    last.close()


def test_journal_that_cannot_be_written_knows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: the run was not accepted, and the half line spoils no other."""
    journal = Journal(tmp_path)
    journal.open()
    journal.enter("f1", 1)
    write = os.write

    def full(descriptor: int, line: bytes) -> int:
        write(descriptor, line[: len(line) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError):
        journal.enter("f2", 2)
    monkeypatch.setattr(os, "write", write)
    assert journal.get("f2") is None
    journal.enter("f3", 3)
    journal.close()
    again = Journal(tmp_path)
    again.open()
    assert [run for run in ("f1", "f2", "f3") if again.get(run)] == ["f1", "f3"]
    again.close()


def test_journal_is_not_shared(tmp_path: Path) -> None:
    """Two processes with one folder would execute twice."""
    journal = Journal(tmp_path)
    journal.open()
    with pytest.raises(ConfigError, match="another agent uses"):
        Journal(tmp_path).open()
    journal.close()


def test_journal_keeps_the_newest_and_what_is_not_sent(tmp_path: Path) -> None:
    """It is bounded, and never forgets what it still has to say."""
    journal = Journal(tmp_path)
    journal.open()
    journal.enter("first", 1)
    for n in range(KEPT + 50):
        journal._seen[f"f{n}"] = type(journal._seen["first"])(f"f{n}", n, "sent")
    journal._rewrite()
    assert journal.get("first")
    assert journal.get("f0") is None
    assert journal.get(f"f{KEPT + 49}")
    assert len(journal._seen) == KEPT
    journal.close()


def test_words_are_read_by_the_signature() -> None:
    """Text stays text where text is wanted; other words are JSON when they are JSON."""

    def take(path: str, depth: int = 1, *rest: str, deep: bool = False) -> None: ...

    function = Function("take", take)
    assert function.bind(Order("take", ("007", "3", "1e3", "deep=true"), raw=True)) == (
        ("007", 3, "1e3"),
        {"deep": True},
    )
    assert function.bind(Order("take", ("a=b",), raw=True)) == (("a=b",), {})
    assert function.bind(Order("take", ("x",), {"depth": 2})) == (("x",), {"depth": 2})
    with pytest.raises(InvalidInput, match="missing"):
        function.bind(Order("take", (), raw=True))


def test_functions_are_an_allow_list() -> None:
    """What is not offered does not exist; `cmd.run` is not offered by itself."""
    facts = HostFacts("web1", Path("nowhere"))

    async def changed() -> None: ...

    plain = {f.name for f in builtins(facts, changed, str, commands=False)}
    assert "cmd.run" not in plain
    assert {"ping", "facts.get", "facts.set", "file.hash", "disk.usage"} <= plain
    assert "cmd.run" in {f.name for f in builtins(facts, changed, str, commands=True)}
    offered = Functions()
    offered.add(Function("ping", lambda: True))
    with pytest.raises(InvalidInput, match="it has ping"):
        offered.get("os.system")
    with pytest.raises(ConfigError, match="offered twice"):
        offered.add(Function("ping", lambda: True))


async def test_jobs_of_an_app_run_on_an_agent() -> None:
    """A job is called with checked arguments, and its context knows run and epoch."""
    app = Holdfast("shop")

    @app.job
    async def greet(name: str, times: int = 1, *, ctx: Context) -> str:
        return f"{name}*{times} {ctx.run} {ctx.epoch} {ctx.node}"

    @app.job
    def plain(n: int) -> int:
        return n + 1

    offered = Functions()
    offered.add_jobs(app)
    function = offered.get("greet")
    args, kwargs = function.bind(Order("greet", ("ann", "times=2"), raw=True))
    assert await function.call(args, kwargs, CALL) == "ann*2 f1 7 web1"
    assert await offered.get("plain").call((4,), {}, CALL) == 5
    with pytest.raises(InvalidInput):
        await offered.get("plain").call(("four",), {}, CALL)


class Ended(list[Return]):
    """Returns as they come."""

    def outcomes(self) -> dict[str, str]:
        return {r.run: r.outcome for r in self}


def executor(ended: Ended, **options: Any) -> CommandExecutor:
    offered = Functions()
    gate = asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    async def fail() -> None:
        raise KeyError("x")

    offered.add(Function("change", wait))
    offered.add(Function("read", wait, mutating=False))
    offered.add(Function("fail", fail))
    offered.add(Function("odd", lambda: object(), mutating=False))
    made = CommandExecutor(
        offered, ended.append, now=time.time, monotonic=time.monotonic, **options
    )
    made.gate = gate  # type: ignore[attr-defined]
    return made


async def test_executor_gives_one_return_for_each_command() -> None:
    """Done, failed, cancelled waiting, cancelled running, out of time, not JSON, unknown."""
    ended = Ended()
    made = executor(ended)
    late = time.time() - 1
    for run, function, deadline in (
        ("a", "change", 0.0),
        ("b", "change", 0.0),
        ("c", "fail", 0.0),
        ("d", "read", 0.0),
        ("e", "read", late),
        ("f", "odd", 0.0),
        ("g", "nothing", 0.0),
        ("h", "read", 0.0),
    ):
        made.submit(Call(run, "web1", 1, deadline), Order(function, deadline=deadline))
    await until(lambda: len(ended) == 3, what="those that end at once")
    assert made.cancel("b", "by ann")
    assert made.cancel("d", "by ann")
    assert not made.cancel("nobody", "by ann")
    made.gate.set()  # type: ignore[attr-defined]
    await until(lambda: len(ended) == 8, what="all")
    assert ended.outcomes() == {
        "a": "ok",
        "b": "cancelled",
        "c": "failed",
        "d": "cancelled",
        "e": "timeout",
        "f": "failed",
        "g": "failed",
        "h": "ok",
    }
    assert made.running == 0


MISBEHAVING = sorted(
    {n for n, a in ZOO.items() if a.fate == "failed"} - {"cancels_itself_and_returns"}
)
"""That one has returned before anybody could notice."""


@pytest.mark.parametrize("name", MISBEHAVING)
async def test_function_that_misbehaves_has_failed(name: str) -> None:
    """Whatever a function raises or cancels is its return; the agent takes the next command."""
    ended, offered, animal = Ended(), Functions(), ZOO[name]
    if animal.is_async:

        async def wild() -> Any:
            return await animal.handler(lambda _: None)

        offered.add(Function("wild", wild))
    else:
        offered.add(Function("wild", lambda: animal.handler(lambda _: None)))
    offered.add(Function("tame", lambda: "well"))
    made = CommandExecutor(offered, ended.append, now=time.time, monotonic=time.monotonic)
    for run, function in (("a", "wild"), ("b", "tame")):
        made.submit(Call(run, "web1", 1, 0.0), Order(function))
    await until(lambda: len(ended) == 2, what="both returns")
    assert ended.outcomes() == {"a": "failed", "b": "ok"}


async def test_executor_is_bounded_and_ends() -> None:
    """A full queue is busy; at the end everything has returned."""
    ended = Ended()
    made = executor(ended, queue_size=2, concurrency=1)
    for run in ("a", "b", "c"):
        assert not made.busy(Order("change"))
        made.submit(Call(run, "web1", 1, 0.0), Order("change"))
    assert made.busy(Order("change"))
    assert not made.busy(Order("read"))
    await made.close(grace=0)
    assert ended.outcomes() == dict.fromkeys("abc", "interrupted")


async def test_cancelled_program_is_gone(tmp_path: Path) -> None:
    """Cancel kills the program and its children, not only the wait for it."""
    child = tmp_path / "child"
    script = f"sleep 600 & echo $! > {child}; wait"
    running = asyncio.create_task(cmd_run("sh", "-c", script))
    await until(lambda: child.exists() and child.read_text().strip(), what="the child")
    pid = int(child.read_text())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await until(lambda: not _lives(pid), what="its end")


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_program_gets_words_and_no_shell() -> None:
    """Nothing is expanded or split; a code other than 0 is a failure with its output."""
    done = await cmd_run("echo", "$HOME; ls *")
    assert done["stdout"] == "$HOME; ls *\n"
    with pytest.raises(HoldfastError, match="code 3: oops"):
        await cmd_run("sh", "-c", "echo oops >&2; exit 3")
    with pytest.raises(InvalidInput, match="cannot be started"):
        await cmd_run("no-such-program-here")
    with pytest.raises(InvalidInput, match="word by word"):
        await cmd_run()


@pytest.mark.parametrize("closes", [True, False], ids=["closes its output", "keeps its output"])
def test_program_that_leaves_a_daemon_behind_has_ended(tmp_path: Path, closes: bool) -> None:
    """The program's own exit ends the call; the daemon lives on, whatever it holds open."""
    told = tmp_path / "daemon"
    redirect = "</dev/null >/dev/null 2>&1" if closes else ""
    script = f"sleep 600 {redirect} & echo $! > {told}; echo started"

    async def main() -> int:
        done = await asyncio.wait_for(cmd_run("sh", "-c", script), 60)
        assert done == {"code": 0, "stdout": "started\n", "stderr": ""}
        return 0

    run_loop(main())  # uvloop, as in production: a test runs on asyncio's loop
    pid = int(told.read_text())
    assert _lives(pid)
    os.kill(pid, signal.SIGKILL)


def test_program_that_prints_without_end_costs_no_memory() -> None:
    """Output past the limit is dropped as it comes, and counted."""
    megabytes = 200
    script = f"head -c {megabytes}M /dev/zero; echo oops >&2"

    async def main() -> int:
        done = await cmd_run("sh", "-c", script)
        assert len(done["stdout"]) < 5 * 1024 * 1024
        assert done["stdout"].endswith("[205,520,896 more bytes were cut off]")
        assert done["stderr"] == "oops\n"
        return 0

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run_loop(main())
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < megabytes * 1024 / 4, f"{grown} kB"


async def test_program_reads_its_input() -> None:
    """More input than a pipe holds reaches the program, and its code is told."""
    done = await cmd_run("wc", "-c", stdin="x" * 300_000)
    assert done["stdout"].strip() == "300000"


def test_file_hash(tmp_path: Path) -> None:
    """The hash of a file; a wrong name or a folder is refused in one sentence."""
    path = tmp_path / "f"
    path.write_bytes(b"abc")
    found = file_hash(str(path))
    assert found["sha256"].startswith("ba7816bf")
    assert found["size"] == 3
    for bad in (str(tmp_path), str(tmp_path / "gone")):
        with pytest.raises(InvalidInput):
            file_hash(bad)


def test_facts_from_host_file_and_hand(tmp_path: Path) -> None:
    """Set ones win over the file's, the file's over what was read; a broken file is ignored."""
    file = tmp_path / "facts.yaml"
    file.write_text("rack: 7\nos: mine\nnested: {a: {b: 1}}\n")
    facts = HostFacts("web1", tmp_path / "agent", str(file))
    facts.open()
    assert facts.get("os") == "mine"
    assert facts.get("nested.a.b") == 1
    assert facts.get("cpu") >= 1
    facts.put("rack", 9)
    assert facts.get("rack") == 9
    file.write_text("[broken")
    assert not facts.look_at_file()
    assert facts.get("os") == "mine"
    file.write_text("os: other\n")
    assert facts.look_at_file()
    again = HostFacts("web1", tmp_path / "agent", str(file))
    again.open()
    assert again.get("rack") == 9
    again.put("rack", None)
    assert again.get("rack") is None
    file.unlink()
    assert not again.look_at_file()  # gone later: what it said stays
    assert again.get("os") == "other"
    with pytest.raises(ConfigError, match="does not exist"):
        HostFacts("web1", tmp_path / "agent", str(file)).open()
    assert again.items()["id"] == "web1"
