"""`holdfast auth`: who may log in to the server, and as what."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import Cli, block, emit, given, note, say, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.identity.lint import Flaw
    from holdfast.identity.users import UserFolder

FOLDER = Path("auth")
TAKE_SECONDS = 15.0
"""How long to wait for servers to notice a change and reload."""
MARKS = {"fail": "FAIL", "warn": "WARN"}

DirOption = Annotated[
    Path,
    typer.Option("--dir", metavar="DIR", help="Folder of 'holdfast auth init'.", file_okay=False),
]
PidOption = Annotated[
    Path | None,
    typer.Option(
        "--pid-file",
        metavar="FILE",
        help="Process id of a nats-server on this machine, to let it take the change now.",
    ),
]


def register(app: Cli) -> None:
    """Add `holdfast auth`."""
    auth = app.noun("auth", "Logins, keys and permissions of the server's users.")
    auth.command("init")(init)
    auth.command("agent")(agent)
    auth.command("user")(user)
    auth.command("revoke")(revoke)
    auth.command("renew")(renew)
    auth.command("list")(list_users)
    auth.command("lint")(lint)


def init(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder to make.", file_okay=False)
    ] = FOLDER,
) -> None:
    """Make the account seed, a login for each role, and the server's configuration.

    Nothing that exists is overwritten. The namespace is the one of --namespace.
    """
    from holdfast.cli.common import connection_given
    from holdfast.config import ConnectionConfig, load

    folder = _folder(out)
    namespace = load(ConnectionConfig, **connection_given()).namespace
    made = folder.init(namespace)
    if given().json:
        emit(
            {"folder": str(out), "config": str(folder.config), "credentials": list(map(str, made))}
        )
        return
    say(f"{out}/account.seed   the root of every key: for dispatchers, and a safe place")
    say(f"{out}/auth.conf      accounts and permissions: include it, as nats-server.conf does")
    for path in made:
        say(f"{path}")
    note(
        f"start a server with 'holdfast server --auth {out}', and each process with "
        f"HOLDFAST_CREDENTIALS_FILE set to its file in {out}/credentials"
    )


def agent(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of the agents.")],
    dir: DirOption = FOLDER,
    generation: Annotated[
        int | None,
        typer.Option(help="Newest generation of keys; without: the one that is in use.", min=1),
    ] = None,
    only: Annotated[
        bool, typer.Option("--only", help="Not the generation before: its commands are refused.")
    ] = False,
    pid_file: PidOption = None,
) -> None:
    """Issue the credentials of agents: only their own keys, and the public ones they need.

    They hold the newest generation of keys and the one before. The newest is the one that was
    issued last from this folder or rotated to by 'holdfast secrets rotate', or the dispatchers' in
    the configuration.
    """
    from holdfast.config import DispatcherConfig, load

    folder = _folder(dir)
    newest = generation or max(folder.generation, load(DispatcherConfig).generation)
    oldest = newest if only else max(1, newest - 1)
    made = folder.add_agents(ids, range(oldest, newest + 1))
    if newest > 1:
        note(f"with keys of generation{'' if only else f's {oldest} and'} {newest}")
    _issued(made, folder, pid_file)


def user(
    role: Annotated[str, typer.Argument(metavar="ROLE", help="worker, client, operator, …")],
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Tells users of one role apart.")
    ] = "",
    bucket: Annotated[
        list[str] | None,
        typer.Option("--bucket", metavar="NAME", help="A program's bucket that it may use."),
    ] = None,
    dir: DirOption = FOLDER,
    pid_file: PidOption = None,
) -> None:
    """Issue a login of a role."""
    folder = _folder(dir)
    _issued([folder.add_user(role, name, bucket or ())], folder, pid_file)


def revoke(
    name: Annotated[str, typer.Argument(metavar="ID", help="An agent's id, or a user's name.")],
    dir: DirOption = FOLDER,
    pid_file: PidOption = None,
    files_only: Annotated[
        bool,
        typer.Option("--files-only", help="Only change the folder: you carry it to the servers."),
    ] = False,
) -> None:
    """Take a login back; its connections are cut when the server reloads.

    Exit codes: 0 when every server that is known here has taken it, or was told to, 1 when one has
    not, or none is known: then the login still works there.
    """
    folder = _folder(dir)
    gone = folder.revoke(name)
    if given().json:
        emit(gone)
    else:
        block("\n".join(f"revoked {one.user} ({one.nkey})" for one in gone))
    if files_only:
        note(f"{folder.config} has changed: the login works until the servers have it and reload")
    elif not _in_force(folder, pid_file, name):
        raise typer.Exit(1)


def renew(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="Credentials files outside the folder."),
    ] = None,
    dir: DirOption = FOLDER,
    pid_file: PidOption = None,
) -> None:
    """Rewrite accounts, permissions and the logins' certificates as this version makes them.

    Run it after an upgrade of Holdfast and after a rotation of keys, then carry the credentials
    files to their processes. Logins stay valid. 'holdfast server --auth' takes the change by
    itself; other servers need two reloads, or a restart, on every node.
    """
    folder = _folder(dir)
    renewed, absent = folder.renew(files or ())
    if given().json:
        emit({"config": str(folder.config), "renewed": list(map(str, renewed)), "absent": absent})
    else:
        say("\n".join(map(str, [folder.config, *renewed])))
    if absent:
        note(
            f"no file of {', '.join(absent)} is here: name it as FILE, or revoke the login and "
            "issue another; until then what it asks of others is not signed"
        )
    _reload(folder, pid_file)


def _in_force(folder: UserFolder, pid_file: Path | None, name: str) -> bool:
    """Whether the servers use the configuration without that user; prints what is left to do."""
    from holdfast.identity.takers import wait_taken

    used, not_used = wait_taken(folder.config, TAKE_SECONDS)
    for one in used:
        note(f"{one.server} has taken it: {name} is cut off there")
    for one in not_used:
        note(f"error: {one.server} has not taken it: {one.error or 'it does not look'}")
    if pid_file is not None:
        _signal(folder, pid_file)
        note(
            f"the server of {pid_file} was told to reload: it has taken it when its log says "
            "'Reloaded server configuration'"
        )
    elif not used and not not_used:
        note(
            f"error: no server has taken it: {name} can still log in. No 'holdfast server --auth "
            f"{folder.path}' runs on this machine. Reload your servers, on every node: "
            "'nats-server --signal reload=PID'. Next time name one with --pid-file, or say "
            "--files-only when you carry the folder to them yourself"
        )
        return False
    if not_used:
        note(f"error: {name} can still log in there: restart that server, or look at its log")
    return not not_used


def list_users(dir: DirOption = FOLDER) -> None:
    """List users, also those that were revoked."""
    found = _folder(dir).users()
    if given().json:
        emit(found)
        return
    table(
        ("user", "role", "public key", "issued", "revoked"),
        [(u.user, u.role, u.nkey, u.issued[:19], u.revoked[:19]) for u in found],
    )


def lint(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A server's configuration, or the folder that has it."),
    ],
) -> None:
    """Check a server's configuration without a server.

    Of a folder its nats-server.conf is checked, with what that includes. Exit codes: 0 when nothing
    is wrong (warnings are allowed), 1 when something is.
    """
    from holdfast.cli.common import connection_given
    from holdfast.config import ConnectionConfig, load
    from holdfast.identity.lint import examine

    namespace = load(ConnectionConfig, **connection_given()).namespace
    file = _configuration(file)
    found = examine(file, namespace)
    if given().json:
        emit(found)
    else:
        _show(found, file)
    raise typer.Exit(1 if any(flaw.level == "fail" for flaw in found) else 0)


def _configuration(path: Path) -> Path:
    """The file to check; in a folder, the one a server is started with."""
    from holdfast.errors import ConfigError
    from holdfast.identity.users import EXAMPLE

    if not path.is_dir():
        return path
    if (path / EXAMPLE).is_file():
        return path / EXAMPLE
    others = sorted(str(one) for one in path.glob("*.conf"))
    todo = f", such as {others[0]}" if others else ""
    raise ConfigError(
        f"{str(path)!r} is a folder without {EXAMPLE}: name a server's configuration file{todo}"
    )


def _show(found: Sequence[Flaw], file: Path) -> None:
    for flaw in found:
        say(f"{MARKS[flaw.level]}  {flaw.where}: {flaw.text}")
        say(f"      -> {flaw.todo}")
    if not found:
        say(f"{file}: nothing wrong")


def _folder(path: Path) -> UserFolder:
    import time

    from holdfast.clock import rfc3339
    from holdfast.identity.users import UserFolder

    return UserFolder(path, now=rfc3339(time.time()))


def _issued(made: Sequence[Path], folder: UserFolder, pid_file: Path | None) -> None:
    if given().json:
        emit([str(path) for path in made])
    else:
        block("\n".join(map(str, made)))
    _reload(folder, pid_file)


def _reload(folder: UserFolder, pid_file: Path | None) -> None:
    """Make a server reload its configuration, or say how to."""
    if pid_file is None:
        note(
            f"{folder.config} has changed: 'holdfast server --auth' takes it by itself, others "
            "with 'nats-server --signal reload=PID', on every node"
        )
    else:
        _signal(folder, pid_file)


def _signal(folder: UserFolder, pid_file: Path) -> None:
    from holdfast.errors import ConfigError

    try:
        os.kill(int(pid_file.read_text(encoding="ascii")), signal.SIGHUP)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder.config} has changed, and the server of {str(pid_file)!r} could not be "
            f"signalled: {error}"
        ) from None
