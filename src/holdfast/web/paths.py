"""Run ids in addresses: `/` separates the parts of an id, and of an address; there it is `~`.

No run id has a `~`, so the way back is certain.
"""

from __future__ import annotations

from holdfast.names import check_run


def run_path(run: str) -> str:
    """A run id as one part of an address: `resize/42` is `resize~42`."""
    return run.replace("/", "~")


def run_of(part: str) -> str:
    """The run id that a part of an address stands for; `InvalidName` when it is none."""
    return check_run(part.replace("~", "/"))
