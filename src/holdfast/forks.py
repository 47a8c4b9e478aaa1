"""What a forked child must not keep: our sockets.

A handler may fork (`os.fork`, `multiprocessing` with the start method "fork"). The child inherits
every socket of the worker, so when the worker is killed, its connections stay open for as long as
the child lives: the server takes a dead worker for a connected one. Whoever owns sockets registers
with `closed_in_children`; in a forked child they are closed, and nothing is sent on them.

Each descriptor is replaced by `/dev/null` and not freed: objects of the parent's live on in the
child, and would otherwise close a file that got the same number later.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Protocol
from weakref import WeakSet


class Owner(Protocol):
    """Somebody who owns sockets."""

    def filenos(self) -> Iterable[int]:
        """The descriptors that are open now."""
        ...


_owners: WeakSet[Owner] = WeakSet()
_registered = False


def closed_in_children(owner: Owner) -> None:
    """Close the descriptors of `owner` in every child that is forked while it lives."""
    global _registered
    _owners.add(owner)
    if not _registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close)
        _registered = True


def _close() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for owner in list(_owners):
        for number in owner.filenos():
            with contextlib.suppress(OSError):  # one that cannot be closed is no reason to fail
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)
