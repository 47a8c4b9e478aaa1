"""A process that has the command line and the roles loaded, and forks one for each command.

Most of the processor time of each `holdfast …` is imports. A command that is forked here has its
own process, arguments, environment, directory, input, output and exit code, as one that is started
afresh; what a fresh interpreter does is shown by `test_cli_frame` and by every `Command`.

    connect ──► one line: the command, as JSON
            ◄── one line: the id of its process
            ◄── one line, when it has ended: its exit code

It ends when its standard input does, which is when the process that started it has ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import selectors
import socket
import sys

PACKAGES = ("holdfast.cli", "holdfast.client", "holdfast.broker", "holdfast.status")
"""What nearly every command imports."""
ROLES = ("holdfast.worker", "holdfast.coordinator", "holdfast.scheduler", "holdfast.dispatcher")
"""What workers and control planes import besides."""


def load() -> None:
    """Import the command line, and keep the collector from touching what all forks share."""
    for name in PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.iter_modules(package.__path__, f"{name}."):
            importlib.import_module(module.name)
    for name in (*ROLES, "uvloop"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def serve(path: str) -> None:
    """Fork for each connection until standard input ends."""
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(path)
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        os.write(1, b"ready\n")
        while not any(key.fileobj is sys.stdin for key, _ in selector.select()):
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    answer(connection)
            reap()


def reap() -> None:
    """Forget the children that have ended; what they used counts as ours."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def answer(connection: socket.socket) -> None:
    """Run the command of a connection in a child process, and send back its exit code."""
    with connection.makefile("rw") as stream:
        wanted = json.loads(stream.readline())
        if (pid := os.fork()) == 0:
            run(**wanted)
        stream.write(f"{pid}\n")
        stream.flush()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        stream.write(f"{code}\n")
    os._exit(0)


def run(arguments: list[str], env: dict[str, str], cwd: str, files: list[str]) -> None:
    """Become the command: never returns."""
    from holdfast.cli import main

    os.chdir(cwd)
    sys.path[:1] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ.clear()
    os.environ.update(env)
    for number, (file, flags) in enumerate(
        zip(files, (os.O_RDONLY, os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_APPEND), strict=True)
    ):
        os.dup2(os.open(file, flags), number)
    sys.argv[1:] = arguments
    main()


if __name__ == "__main__":
    load()
    serve(sys.argv[1])
