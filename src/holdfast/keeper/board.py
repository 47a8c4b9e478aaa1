"""The board: memory that a worker and its keeper share.

Its head has single numbers: when the loop and the interpreter last moved (on the monotonic clock,
which all processes of a machine share), what the keeper has confirmed. Below it, each message that
the worker holds has a place with its reply subject. A place is taken and left with plain writes to
memory, no system call and no pipe: under a microsecond for each message.

**A message is not extended after it was let go.** An old reply subject acts on the message's next
delivery. Each side first says what it does and then looks at what the other does, with a fence in
between: the keeper marks a place as `sending`, and sends only if it is still held; the worker takes
its `held` away, and acknowledges only when nothing is being sent. An extension counts as being sent
until the server has confirmed it. In the same way `gave` and `STARTED` decide whether the keeper
gives a message back that the worker has not started.

Each number has one writer. Writes of eight aligned bytes are not torn on any machine that Python
runs on with processes that share memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from typing import Final

WORD: Final = 8
HEAD_WORDS: Final = 32
REPLY_MOST: Final = 448
"""Bytes of a reply subject; a longer one has no place, and is extended by the loop alone."""
RUN_MOST: Final = 320
"""Bytes of a run id; a longer one is cut."""
TEXT: Final = REPLY_MOST + RUN_MOST
ARRAYS: Final = 6

STARTED: Final = 1
"""A mark: the worker is working on the message."""
QUICK: Final = 2
"""A mark: the message may be given back at once, without a look at its claim."""
REVISION_BITS: Final = 8
"""Above these bits of the marks is the revision of the claim."""

# Words of the head that the worker writes.
LOOP: Final = 0
"""When the event loop last moved."""
THREAD: Final = 1
"""When the interpreter last ran another thread."""
PROVED: Final = 2
"""When the worker's own connection to NATS was last seen to work."""
PLACES: Final = 3
"""Places above this one were never used."""
VERIFIED: Final = 4
"""The last gap after which the worker has looked at its claims."""
ENDING: Final = 5
"""1: the worker ends in order and speaks for itself."""
# Words of the head that the keeper writes.
KEEPER: Final = 16
"""When the keeper last moved."""
ACKNOWLEDGED: Final = 17
"""When the last heartbeat that the server has confirmed was sent."""
STEADY: Final = 18
"""Since when heartbeats have come without a break."""
REVISION: Final = 19
GAP: Final = 20
"""How often the record had lapsed without a verdict."""
LOST: Final = 21
"""1: the node was declared lost."""
EXTENSIONS: Final = 22
"""How many extensions the keeper has sent."""

_fence = threading.Lock()
"""Taking it is a full memory barrier: what was written before is visible before what is read
afterwards. Nobody ever waits for it."""


def fence() -> None:
    """Everything written before is visible before anything after is read."""
    with _fence:
        pass


class Board:
    """Shared memory, seen from either side."""

    def __init__(self, descriptor: int, places: int) -> None:
        self.descriptor = descriptor
        self.places = places
        self._map = mmap.mmap(descriptor, _size(places))
        words = memoryview(self._map)[: (HEAD_WORDS + ARRAYS * places) * WORD]
        self.times, self.numbers = words.cast("d"), words.cast("Q")
        arrays = [(HEAD_WORDS + n * places, HEAD_WORDS + (n + 1) * places) for n in range(ARRAYS)]
        self.held, self.lengths, self.marks, self.sending, self.gave = (
            self.numbers[start:end] for start, end in arrays[:5]
        )
        self.extended = self.times[slice(*arrays[5])]
        self._texts = (HEAD_WORDS + ARRAYS * places) * WORD
        self._free = list(range(places - 1, -1, -1))
        self.leaving: list[int] = []
        """Places that were left while an extension was being sent, and not waited for."""
        self._generation = 0
        self._highest = 0

    @classmethod
    def create(cls, places: int) -> Board:
        """New memory, all zero; only pages that are used cost anything."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("holdfast-board")
        else:  # not on every system
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, _size(places))
        return cls(descriptor, places)

    # ---- the worker's side

    def take(self, reply: str, now: float, mark: int = 0) -> int:
        """A place for a message that has arrived; -1 when there is none for it."""
        text = reply.encode()
        length = len(text)
        if not self._free or length > REPLY_MOST:
            return -1
        place = self._free.pop()
        at = self._texts + place * TEXT
        self._map[at : at + length] = text
        self.lengths[place] = length
        self.extended[place] = now
        self.marks[place] = mark
        if place >= self._highest:
            self._highest = place + 1
            self.numbers[PLACES] = self._highest
        self._generation += 1
        self.held[place] = self._generation
        return place

    def start(self, place: int) -> bool:
        """The message is about to be worked on; False when the keeper has given it back."""
        self.marks[place] |= STARTED
        with _fence:
            pass
        return self.gave[place] != self.held[place]

    def given_back(self, place: int) -> bool:
        """Whether the keeper has given the message back, which was not started then."""
        return self.gave[place] == self.held[place]

    def name(self, place: int, run: str, revision: int) -> None:
        """Which run it is, and the revision of its claim; 0 when it has none."""
        text = run.encode()[:RUN_MOST]
        at = self._texts + place * TEXT + REPLY_MOST
        self._map[at : at + len(text)] = text
        self.lengths[place] += len(text) << 32
        if revision:
            self.marks[place] |= revision << REVISION_BITS

    def leave(self, place: int) -> bool:
        """Let a message go; False while the keeper is sending an extension for it.

        Then the caller waits until `cleared`, and acknowledges after that.
        """
        self.held[place] = 0
        with _fence:
            pass
        if self.sending[place]:
            return False
        self._free.append(place)
        return True

    def cleared(self, place: int) -> bool:
        """Whether an extension that was being sent is over; the place is free again then."""
        if self.sending[place]:
            return False
        self._free.append(place)
        return True

    def reclaim(self) -> None:
        """Free the places in `leaving` for which nothing is being sent."""
        self.leaving = [place for place in self.leaving if not self.cleared(place)]

    def forget_keeper(self) -> None:
        """The keeper is gone: it sends nothing, so every place in `leaving` is free."""
        for place in range(self._highest):
            self.sending[place] = 0

    # ---- the keeper's side

    def reply(self, place: int) -> str:
        """The reply subject in a place; valid only if the place is held before and after."""
        at = self._texts + place * TEXT
        return self._map[at : at + (self.lengths[place] & 0xFFFF)].decode("ascii", "replace")

    def run(self, place: int) -> str:
        """The run in a place, or nothing."""
        at = self._texts + place * TEXT + REPLY_MOST
        return self._map[at : at + (self.lengths[place] >> 32)].decode("utf-8", "replace")

    def taken(self) -> list[tuple[int, int]]:
        """Places that are held, each with the number of its message."""
        held = self.held[: self.numbers[PLACES]].tolist()
        return [(place, number) for place, number in enumerate(held) if number]


def _size(places: int) -> int:
    return (HEAD_WORDS + ARRAYS * places) * WORD + places * TEXT
