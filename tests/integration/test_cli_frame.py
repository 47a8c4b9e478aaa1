"""The frame of the command line: help, options, errors and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import typer

from holdfast.cli import NOUNS, WORDS, build, main
from holdfast.cli.command import run_cli, with_common_options
from holdfast.cli.options import Given, given
from holdfast.cli.out import table
from holdfast.server import Server
from holdfast.version import __version__

UNREACHABLE = "nats://127.0.0.1:9"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`holdfast …` without a server."""
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *arguments],
        env={**os.environ, "HOLDFAST_CONNECT_TIMEOUT_SECONDS": "0.2", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_version_and_help_need_no_server() -> None:
    """`--version` prints it; help lists every noun; a bare `holdfast` is a call for help."""
    assert run("--version").stdout == f"holdfast {__version__}\n"
    shown = run("--help")
    assert shown.returncode == 0
    sections = shown.stdout.partition("Begin:")[2].partition("Jobs:")[2].partition("Fleet:")[0]
    for noun in ("enqueue", "runs", "jobs", "dead"):
        assert f"\n  {noun} " in sections


@pytest.mark.parametrize("noun", ["runs", "jobs", "dead"])
def test_every_command_takes_json_and_tells_what_it_does(
    noun: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each verb has a sentence of help, `--json`, and the connection's options."""
    group = typer.main.get_command(build()).commands[noun]  # type: ignore[attr-defined]
    for name, command in group.commands.items():
        with pytest.raises(SystemExit, match="0"):
            main([noun, name, "--help"])
        shown = capsys.readouterr().out
        assert "--json" in shown
        assert "--nats-url" in shown
        assert "--namespace" in shown
        assert command.help, name


def test_command_line_imports_nothing_heavy_until_it_is_needed() -> None:
    """Neither rich nor pydantic nor a server library is loaded to build the commands."""
    code = (
        "import sys; from holdfast.cli import build; build(); "
        "heavy = ('rich', 'pydantic', 'holdfast.client', 'holdfast.broker', 'holdfast.server'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


@pytest.mark.parametrize(
    "arguments", [["nope"], ["runs", "list", "--nope"], ["runs", "list", "--limit", "x"], ["runs"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown option, noun or value, and a noun without a verb, are usage errors."""
    assert run_cli(build(), arguments) == 2
    shown = capsys.readouterr()
    assert "--help" in shown.out + shown.err


def test_error_is_one_line_and_exit_1() -> None:
    """What cannot be done is told in one line on standard error, without a traceback."""
    ended = run("runs", "list", "--nats-url", UNREACHABLE)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error: cannot reach NATS at nats://127.0.0.1:9 ")
    assert ended.stderr.count("\n") == 1


def test_debug_shows_where_an_error_came_from() -> None:
    """`--debug`, or HOLDFAST_DEBUG, adds the traceback."""
    assert "Traceback" in run("runs", "list", "--debug", "--nats-url", UNREACHABLE).stderr
    ended = run("runs", "list", HOLDFAST_NATS_URL=UNREACHABLE, HOLDFAST_DEBUG="1")
    assert "Traceback" in ended.stderr


def test_bad_configuration_is_an_error_and_not_a_bug() -> None:
    """A value that cannot work names its source."""
    ended = run("jobs", "list", "--namespace", "No Such!")
    assert ended.returncode == 1
    assert "connection.namespace" in ended.stderr
    assert "bug" not in ended.stderr


def test_command_imports_only_what_it_needs(nats: Server) -> None:
    """A list of runs needs neither metrics nor logins nor JetStream's own client."""
    code = (
        "import sys; from holdfast.cli import build, run_cli; "
        "ended = run_cli(build('runs'), ['runs', 'list', '--nats-url', sys.argv[1]]); "
        "heavy = ('prometheus_client', 'nats.js', 'nacl', 'cronsim', 'aiohttp', 'holdfast.cli.dev',"
        " 'holdfast.config.deployment', 'holdfast.identity.grants', 'holdfast.status.runs'); "
        "print(ended, 'holdfast.status.listing' in sys.modules, "
        "[m for m in heavy if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, nats.url]
    environment = {**os.environ, "HOLDFAST_NAMESPACE": "nowhere"}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "does not exist on this server" in shown.stderr
    assert shown.stdout == "1 True []\n"


@pytest.mark.parametrize("noun", WORDS)
def test_noun_alone_has_the_commands_that_it_has_among_all(noun: str) -> None:
    """The command line with only one noun's module knows that noun's commands."""
    alone: Any = typer.main.get_command(build(noun))
    everything: Any = typer.main.get_command(build())
    assert noun in alone.commands
    for name, command in alone.commands.items():
        verbs = getattr(command, "commands", {})
        assert verbs.keys() == getattr(everything.commands[name], "commands", {}).keys()


def test_common_options_may_stand_before_or_after_the_command() -> None:
    """The later one wins; each command starts from nothing."""
    cli = build()
    seen: list[Given] = []

    @cli.command("probe")
    @with_common_options
    def probe() -> None:
        """Report the options."""
        seen.append(given())

    assert run_cli(cli, ["--json", "--namespace", "a", "probe", "--namespace", "b"]) == 0
    assert run_cli(cli, ["probe", "-v"]) == 0
    assert [(g.json, g.namespace, g.verbose) for g in seen] == [
        (True, "b", None),
        (None, None, True),
    ]


def test_interrupt_exits_with_130_and_a_bug_with_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C is no error; an unexpected exception is told as what it is."""
    cli = build()

    @cli.command("interrupted")
    @with_common_options
    async def interrupted() -> None:
        """As if Ctrl-C were pressed."""
        raise KeyboardInterrupt

    @cli.command("broken")
    @with_common_options
    async def broken() -> None:
        """A bug."""
        raise ZeroDivisionError("by\nzero")

    assert run_cli(cli, ["interrupted"]) == 130
    assert run_cli(cli, ["broken"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ZeroDivisionError: by zero (this is a bug")


def test_table_is_plain_text_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns are aligned, line breaks inside a cell are not kept, markup means nothing."""
    table(("run", "error"), [("r1", "a\nb"), ("longer", "[red]x[/red]")])
    assert capsys.readouterr().out == "RUN     ERROR\nr1      a b\nlonger  [red]x[/red]\n"
    table(("run",), [], empty="no runs")
    assert capsys.readouterr() == ("", "no runs\n")


def test_table_is_drawn_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal the same rows are drawn, and still not read as markup."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    table(("run", "error"), [("r1", "[red]x[/red]")])
    assert "[red]x[/red]" in capsys.readouterr().out


def test_every_noun_has_its_verbs_and_its_help() -> None:
    """A word of the help is a command, or a noun with verbs and a sentence about them."""
    assert len(set(WORDS)) == len(WORDS)
    everything: Any = typer.main.get_command(build())
    assert {w for w, c in everything.commands.items() if hasattr(c, "commands")} == {*NOUNS, "web"}


def test_verbs_keep_their_order_whatever_was_imported_first() -> None:
    """Help and the generated page do not depend on which module registered its commands first."""
    show = "from holdfast.cli import build; print(list(build('runs').registered_groups[0]"
    show += ".typer_instance.registered_commands[i].name for i in range(4)))"
    orders = {
        subprocess.run(
            [sys.executable, "-c", f"{first}; {show}"], capture_output=True, text=True, check=True
        ).stdout
        for first in ("import holdfast.cli.runs", "import holdfast.cli.rerun")
    }
    assert len(orders) == 1
    assert "'list', 'show'" in orders.pop()
