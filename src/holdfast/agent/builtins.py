"""The functions that every agent offers.

`cmd.run` is offered only where the agent's operator has enabled it. It takes a list of words and
never a line for a shell: nothing is split, expanded or quoted on the way.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from holdfast.agent.facts import HostFacts
from holdfast.agent.functions import Function
from holdfast.agent.program import run_program
from holdfast.errors import HoldfastError, InvalidInput

HASHES: Final = ("sha256", "sha512", "sha1", "md5", "blake2b")


class CommandFailed(HoldfastError):
    """A program exited with a nonzero code."""


def builtins(
    facts: HostFacts,
    changed: Callable[[], Awaitable[None]],
    shown: Callable[[str], Any],
    *,
    commands: bool,
) -> list[Function]:
    """The functions that every agent offers; `shown` returns the settings below a path, secrets
    masked."""

    async def facts_set(name: str, value: Any = None) -> Any:
        """Set a fact of this host for good; without a value it is removed."""
        facts.put(name, value)
        await changed()
        return facts.get(name)

    def facts_would_set(name: str, value: Any = None) -> list[dict[str, Any]]:
        before = facts.get(name)
        return [] if before == value else [{"fact": name, "from": before, "to": value}]

    async def facts_refresh() -> int:
        """Read the facts again and publish them."""
        facts.refresh()
        facts.look_at_file()
        await changed()
        return len(facts.items())

    def facts_get(name: str) -> Any:
        """One fact by its dotted name."""
        return facts.get(name)

    def facts_keys() -> list[str]:
        """The names of all facts."""
        return sorted(facts.items())

    def settings_get(path: str) -> Any:
        """A value of this agent's settings by its dotted path; secrets are masked."""
        return shown(path)

    def settings_items() -> Any:
        """All settings of this agent; secrets are masked."""
        return shown("")

    offered = [
        Function("ping", ping, mutating=False, quick=True),
        Function("facts.get", facts_get, mutating=False, quick=True),
        Function("facts.items", facts.items, mutating=False, quick=True),
        Function("facts.keys", facts_keys, mutating=False, quick=True),
        Function("facts.set", facts_set, rehearsal=facts_would_set),
        Function("facts.refresh", facts_refresh),
        Function("file.hash", file_hash, mutating=False),
        Function("disk.usage", disk_usage, mutating=False),
        Function("service.status", service_status, mutating=False),
        Function("settings.get", settings_get, mutating=False, quick=True),
        Function("settings.items", settings_items, mutating=False, quick=True),
    ]
    return (
        [*offered, Function("cmd.run", cmd_run, rehearsal=cmd_would_run)] if commands else offered
    )


def ping() -> bool:
    """Show that this agent answers."""
    return True


def file_hash(path: str, algorithm: str = "sha256") -> dict[str, Any]:
    """The hash and size of a file."""
    if algorithm not in HASHES:
        raise InvalidInput(f"algorithm {algorithm!r} is not one of {', '.join(HASHES)}")
    try:
        with Path(path).open("rb") as file:
            if not Path(path).is_file():
                raise InvalidInput(f"{path!r} is not a plain file")
            digest = hashlib.file_digest(file, algorithm)
            return {"path": path, algorithm: digest.hexdigest(), "size": file.tell()}
    except OSError as error:
        raise InvalidInput(f"{path!r} cannot be read: {error.strerror}") from None


def disk_usage(path: str = "/") -> dict[str, Any]:
    """How full the disk of a path is, in bytes."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        raise InvalidInput(f"{path!r} cannot be inspected: {error.strerror}") from None
    percent = round(100 * usage.used / usage.total, 1) if usage.total else 0.0
    return {"path": path, "total": usage.total, "free": usage.free, "used_percent": percent}


async def service_status(name: str) -> dict[str, Any]:
    """What systemd says about a service."""
    if not name or name.startswith("-"):
        raise InvalidInput(f"{name!r} is not the name of a service")
    wanted = "ActiveState,SubState,UnitFileState,MainPID"
    command = ["systemctl", "show", "--no-pager", f"--property={wanted}", "--", name]
    done = await run_program(command, None, None)
    if done["code"] != 0:
        raise InvalidInput(f"systemctl failed: {done['stderr'].strip() or done['code']}")
    pairs = (line.partition("=") for line in done["stdout"].splitlines())
    found = {key: value for key, _, value in pairs}
    return {
        "name": name,
        "active": found.get("ActiveState") == "active",
        "state": found.get("SubState", ""),
        "enabled": found.get("UnitFileState", ""),
        "pid": int(found.get("MainPID") or 0),
    }


def cmd_would_run(*words: str, cwd: str = "", stdin: str = "") -> list[dict[str, Any]]:
    """The program that would start; what it would change is unknown."""
    found = shutil.which(words[0], path=None) if words else None
    return [{"starts": list(words), "program": found or "not found on this host"}]


async def cmd_run(*words: str, cwd: str = "", stdin: str = "") -> dict[str, Any]:
    """Start a program with these words and return its output; a nonzero exit code is a failure."""
    if not words or not words[0]:
        raise InvalidInput("cmd.run takes a program and its arguments, word by word")
    done = await run_program([str(word) for word in words], cwd or None, stdin or None)
    if done["code"] != 0:
        tail = (done["stderr"] or done["stdout"]).strip()[-2000:]
        raise CommandFailed(f"{words[0]} ended with code {done['code']}{tail and ': '}{tail}")
    return done
