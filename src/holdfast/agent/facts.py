"""Facts: what an agent reports about its host.

Collected by the agent: os, network and cpu at the start; memory and disk every few minutes. From an
operator's file (JSON or YAML), reread when it changes. Set remotely by `facts.set` and kept in the
agent's folder. Precedence: set > file > collected.

The agent refuses to start if the file is missing: its name is wrong, or whatever creates it has not
run. If the file is unreadable or vanishes later, the facts of its last good state are kept, and
that is logged once.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import socket
from pathlib import Path
from typing import Any, Final

import yaml

from holdfast.errors import ConfigError, InvalidInput, Unreadable
from holdfast.identity.files import write_private
from holdfast.model.fleet import FACTS
from holdfast.model.target import lookup
from holdfast.version import __version__

log = logging.getLogger("holdfast.agent")

LARGEST: Final = 256 * 1024
"""Bytes of one host's facts: a dispatcher keeps those of up to a hundred thousand hosts in
memory."""


def check_file(file: str) -> None:
    """Refuse a missing facts file: without its facts, targets would miss this host."""
    if file and not Path(file).exists():
        raise ConfigError(
            f"facts file {file!r} does not exist: write it (an empty one holds {{}}), or start the "
            "agent without --facts and facts_file"
        )


class HostFacts:
    """The facts of one host."""

    def __init__(self, agent: str, folder: Path, file: str = "") -> None:
        self._agent = agent
        self._kept = folder / "facts.json"
        self._file = Path(file) if file else None
        self._stamp: tuple[int, int] | None = None
        self._complained = ""
        self._read: dict[str, Any] = {}
        self._own: dict[str, Any] = {}
        self._set: dict[str, Any] = {}

    def open(self) -> None:
        """Load all facts once."""
        check_file(str(self._file or ""))
        self._read = {**_still(), **_moving()}
        if self._kept.exists():
            try:
                self._set = FACTS.decode(self._kept.read_bytes())
            except (OSError, Unreadable) as error:
                log.warning(
                    "facts that were set are lost: %s cannot be read: %s", self._kept, error
                )
        self.look_at_file()

    def refresh(self) -> None:
        """Collect the changing facts again."""
        self._read |= _moving()

    def look_at_file(self) -> bool:
        """Reread the operator's file if it has changed; True if its facts differ."""
        if self._file is None:
            return False
        try:
            stat = self._file.stat()
            if self._stamp == (stat.st_mtime_ns, stat.st_size):
                return False
            found = yaml.safe_load(self._file.read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError("it is not an object with names and values")
            found = FACTS.decode(json.dumps(found, default=str).encode())
        except (OSError, ValueError, RecursionError, Unreadable, yaml.YAMLError) as error:
            self._complain(str(error))
            return False
        self._stamp, self._complained = (stat.st_mtime_ns, stat.st_size), ""
        changed, self._own = bool(found != self._own), found
        return changed

    def _complain(self, error: str) -> None:
        text = " ".join(error.split())
        if text != self._complained:
            self._complained = text
            log.warning(
                "facts file %s cannot be used, the facts stay as they are: %s", self._file, text
            )

    # ---- reading and setting

    def items(self) -> dict[str, Any]:
        """All facts."""
        return {"id": self._agent, "version": __version__, **self._read, **self._own, **self._set}

    def get(self, name: str) -> Any:
        """One fact by its dotted name, or None."""
        return lookup(self.items(), name)

    def put(self, name: str, value: Any) -> None:
        """Set a fact permanently; None removes it."""
        if not name or name.startswith("."):
            raise InvalidInput("a fact needs a name")
        changed = {**self._set, name: value}
        if value is None:
            del changed[name]
        body = json.dumps(changed).encode()
        if len(body) > LARGEST:
            raise InvalidInput(f"the facts of one host have at most {LARGEST:,} bytes")
        write_private(self._kept, body, "facts", replace=True)
        self._set = changed


def _still() -> dict[str, Any]:
    """Facts that do not change while the host runs."""
    release = _os_release()
    return {
        "os": platform.system().lower(),
        "os_name": release.get("NAME", platform.system()),
        "os_version": release.get("VERSION_ID", ""),
        "os_id": release.get("ID", ""),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "host": socket.gethostname(),
        "default_ipv4": _default_ipv4(),
        "cpu": os.cpu_count() or 1,
        "python": platform.python_version(),
    }


def _os_release() -> dict[str, str]:
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def _default_ipv4() -> str:
    """The address from which this host would reach others; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def _moving() -> dict[str, Any]:
    """Facts that change: memory and disk, in megabytes, and the load."""
    disk = shutil.disk_usage("/")
    mega = 1024 * 1024
    facts: dict[str, Any] = {
        "disk_total": disk.total // mega,
        "disk_free": disk.free // mega,
        "mem": _memory("SC_PHYS_PAGES"),
        "mem_free": _memory("SC_AVPHYS_PAGES"),
    }
    if hasattr(os, "getloadavg"):
        facts["load"] = round(os.getloadavg()[0], 2)
    return facts


def _memory(pages: str) -> int:
    try:
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") // (1024 * 1024)
    except (ValueError, OSError):  # not available on every system
        return 0
