"""Closes our sockets in forked children.

A handler may fork (`os.fork`, or `multiprocessing` with start method "fork"). The child inherits
every socket of the worker, so when the worker is killed its connections stay open while the child
lives, and the server considers the dead worker connected. Owners of sockets register with
`closed_in_children`; a forked child closes them without sending anything.

Each descriptor is replaced by `/dev/null` instead of freed: the parent's objects still exist in the
child and would otherwise close an unrelated file that reused the number.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Protocol
from weakref import WeakSet


class Owner(Protocol):
    """Owns sockets."""

    def filenos(self) -> Iterable[int]:
        """The descriptors that are open now."""
        ...


_owners: WeakSet[Owner] = WeakSet()
_registered = False


def closed_in_children(owner: Owner) -> None:
    """Close the owner's descriptors in every child forked while the owner exists."""
    global _registered
    _owners.add(owner)
    if not _registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close)
        _registered = True


def _close() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for owner in list(_owners):
        for number in owner.filenos():
            with contextlib.suppress(OSError):  # best effort: do not break the child
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)
