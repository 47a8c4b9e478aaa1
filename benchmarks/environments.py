"""An environment for each peer, `.venv-bench/<peer>`, with what `requirements/<peer>.txt` pins.

Each has its own because their dependencies disagree, and because the product's environment has to
stay as its users have it. A peer that cannot be installed is a sentence in the results.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.plan import ROOT
from benchmarks.services import install_redis

PEERS = ("taskiq-nats", "faststream", "taskiq-redis", "celery", "dramatiq", "arq")
FOLDER = ROOT / ".venv-bench"
PINS = Path(__file__).parent / "requirements"
LOG = FOLDER / "install.log"

_VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"


def python(peer: str) -> Path:
    """The interpreter of a peer's environment."""
    return FOLDER / peer / "bin" / "python"


def install(peers: Sequence[str] = PEERS) -> None:
    """Make what is missing or has other pins now."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / ".gitignore").write_text("*\n")
    install_redis(LOG)
    for peer in peers:
        pins, stamp = (PINS / f"{peer}.txt").read_text(), FOLDER / peer / "installed.txt"
        if stamp.exists() and stamp.read_text() == pins:
            continue
        print(f"installing {peer} …", file=sys.stderr, flush=True)
        if _made(peer):
            stamp.write_text(pins)


def _made(peer: str) -> bool:
    shutil.rmtree(FOLDER / peer, ignore_errors=True)
    pip: list[str | Path] = [
        python(peer),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    with LOG.open("ab") as log:
        steps: tuple[list[str | Path], ...] = (
            [sys.executable, "-m", "venv", FOLDER / peer],
            [*pip, "--requirement", PINS / f"{peer}.txt"],
        )
        for step in steps:
            if subprocess.run(step, stdout=log, stderr=log, check=False).returncode:
                return False
    return True


def missing(peer: str) -> str:
    """Why a peer cannot be measured, or nothing."""
    if (FOLDER / peer / "installed.txt").exists():
        return ""
    return f"could not be installed (see {LOG.relative_to(ROOT)})"


def versions() -> dict[str, str]:
    """Of every peer that is installed, and of Redis."""
    found = {}
    for peer in PEERS:
        if not missing(peer):
            command: list[str | Path] = [python(peer), "-c", _VERSION, peer]
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
            found[peer] = answer.stdout.strip()
    if redis := shutil.which("redis-server"):
        answer = subprocess.run([redis, "--version"], capture_output=True, text=True, check=True)
        words = dict(w.split("=", 1) for w in answer.stdout.split() if "=" in w)
        found["redis-server"] = words.get("v", "unknown")
    return json.loads(json.dumps(found))


if __name__ == "__main__":
    install()
