"""The board: memory that a worker and its keeper share.

Its head holds single numbers: when the loop and the interpreter last moved (on the monotonic clock,
which all processes of a machine share), and what the keeper has confirmed. Below it, each message
that the worker holds has a place with its reply subject. Taking or leaving a place is a plain write
to memory, without a system call: under a microsecond per message.

**A message is not extended after it was released**, because an old reply subject acts on the
message's next delivery. Each side first announces its step and then checks the other's, with a
fence in between: the keeper marks a place as `sending`, and sends only if it is still held; the
worker clears `held`, and acknowledges only when nothing is being sent. An extension counts as being
sent until the server has confirmed it. In the same way `gave` and `STARTED` decide whether the
keeper gives back a message that the worker has not started.

Each number has one writer. Aligned eight-byte writes are atomic on every machine where Python
processes can share memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from typing import Final

WORD: Final = 8
"""Bytes that a processor writes at once, so that no reader sees half of a value."""
HEAD_WORDS: Final = 32
"""Numbers in the head. The worker writes half of them, the keeper the other half; not all are used
yet."""
REPLY_MOST: Final = 448
"""Bytes of a reply subject; a longer one gets no place, and only the loop extends it."""
RUN_MOST: Final = 320
"""Bytes of a run id; a longer one is cut."""
TEXT: Final = REPLY_MOST + RUN_MOST
ARRAYS: Final = 6

STARTED: Final = 1
"""A mark: the worker has started the message."""
QUICK: Final = 2
"""A mark: the message may be given back at once, without reading its claim."""
REVISION_BITS: Final = 8
"""The claim's revision is stored above these bits of the marks."""

# Words of the head that the worker writes.
LOOP: Final = 0
"""When the event loop last moved."""
THREAD: Final = 1
"""When the interpreter last ran another thread."""
PROVED: Final = 2
"""When the worker's own connection to NATS last worked."""
PLACES: Final = 3
"""Places from this one on were never used."""
VERIFIED: Final = 4
"""The gap in heartbeats after which the worker last checked its claims."""
ENDING: Final = 5
"""1: the worker is shutting down and speaks for itself."""
# Words of the head that the keeper writes.
KEEPER: Final = 16
"""When the keeper last moved."""
ACKNOWLEDGED: Final = 17
"""When the last heartbeat confirmed by the server was sent."""
STEADY: Final = 18
"""When the current series of heartbeats without a gap began."""
REVISION: Final = 19
"""The revision of the node's record after the last heartbeat."""
GAP: Final = 20
"""How often the record has lapsed without a verdict."""
LOST: Final = 21
"""1: the node was declared lost."""
EXTENSIONS: Final = 22
"""Extensions sent by the keeper."""

_fence = threading.Lock()
"""Acquiring it is a full memory barrier: earlier writes are visible before later reads. It is never
contended."""


def fence() -> None:
    """Make earlier writes visible before anything is read afterwards."""
    with _fence:
        pass


class Board:
    """Shared memory, used by both sides."""

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
        """Places released while an extension was being sent, without waiting for it."""
        self._generation = 0
        self._highest = 0

    @classmethod
    def create(cls, places: int) -> Board:
        """New zeroed memory; only used pages cost anything."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("holdfast-board")
        else:  # not available on every system
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, _size(places))
        return cls(descriptor, places)

    # ---- the worker's side

    def take(self, reply: str, now: float, mark: int = 0) -> int:
        """Take a place for a message that has arrived; -1 if there is none for it."""
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
        """Mark the message as started; False if the keeper has given it back."""
        self.marks[place] |= STARTED
        with _fence:
            pass
        return self.gave[place] != self.held[place]

    def given_back(self, place: int) -> bool:
        """Whether the keeper has given the message back before it was started."""
        return self.gave[place] == self.held[place]

    def name(self, place: int, run: str, revision: int) -> None:
        """Set the run and the revision of its claim, 0 if it has none."""
        text = run.encode()[:RUN_MOST]
        at = self._texts + place * TEXT + REPLY_MOST
        self._map[at : at + len(text)] = text
        self.lengths[place] += len(text) << 32
        if revision:
            self.marks[place] |= revision << REVISION_BITS

    def leave(self, place: int) -> bool:
        """Release a message; False while the keeper is sending an extension for it.

        Then the caller waits until `cleared` before it acknowledges.
        """
        self.held[place] = 0
        with _fence:
            pass
        if self.sending[place]:
            return False
        self._free.append(place)
        return True

    def cleared(self, place: int) -> bool:
        """Whether a pending extension is over; then the place is free again."""
        if self.sending[place]:
            return False
        self._free.append(place)
        return True

    def reclaim(self) -> None:
        """Free the places in `leaving` for which nothing is being sent."""
        self.leaving = [place for place in self.leaving if not self.cleared(place)]

    def forget_keeper(self) -> None:
        """The keeper is gone and sends nothing: every place in `leaving` is free."""
        for place in range(self._highest):
            self.sending[place] = 0

    # ---- the keeper's side

    def reply(self, place: int) -> str:
        """The reply subject in a place; valid only if the place is held before and after."""
        at = self._texts + place * TEXT
        return self._map[at : at + (self.lengths[place] & 0xFFFF)].decode("ascii", "replace")

    def run(self, place: int) -> str:
        """The run in a place; empty if none is set."""
        at = self._texts + place * TEXT + REPLY_MOST
        return self._map[at : at + (self.lengths[place] >> 32)].decode("utf-8", "replace")

    def taken(self) -> list[tuple[int, int]]:
        """Held places, each with the number of its message."""
        held = self.held[: self.numbers[PLACES]].tolist()
        return [(place, number) for place, number in enumerate(held) if number]


def _size(places: int) -> int:
    return (HEAD_WORDS + ARRAYS * places) * WORD + places * TEXT
