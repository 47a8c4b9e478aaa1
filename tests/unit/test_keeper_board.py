"""The board that a worker and its keeper share: who may say what about a message, and when."""

from __future__ import annotations

import os

import pytest

from holdfast.keeper.board import QUICK, REPLY_MOST, REVISION_BITS, STARTED, Board

REPLY = "$JS.ACK.HF_JOBS.default=resize.1.7.7.1789.0"


@pytest.fixture
def worker() -> Board:
    return Board.create(4)


@pytest.fixture
def keeper(worker: Board) -> Board:
    """The same memory, mapped once more, as another process has it."""
    return Board(os.dup(worker.descriptor), worker.places)


def test_board_shows_what_is_held(worker: Board, keeper: Board) -> None:
    """A place has the reply from the delivery on, and the run with its claim from its start on."""
    place = worker.take(REPLY, 5.0, QUICK)
    assert [p for p, _ in keeper.taken()] == [place]
    assert (keeper.reply(place), keeper.run(place), keeper.marks[place]) == (REPLY, "", QUICK)
    assert worker.start(place)
    worker.name(place, "resize/=k1", 42)
    assert keeper.run(place) == "resize/=k1"
    assert keeper.marks[place] == QUICK | STARTED | 42 << REVISION_BITS
    assert worker.leave(place)
    assert keeper.taken() == []


def test_board_without_room_holds_nothing_for_a_message(worker: Board) -> None:
    """Neither when it is full, nor for a reply that is too long: the loop extends those."""
    assert worker.take("x" * (REPLY_MOST + 1), 0.0) == -1
    places = [worker.take(REPLY, 0.0) for _ in range(4)]
    assert sorted(places) == [0, 1, 2, 3]
    assert worker.take(REPLY, 0.0) == -1
    assert worker.leave(places[2])
    assert worker.take(REPLY, 0.0) == places[2]


def test_board_message_is_not_let_go_while_it_is_extended(worker: Board, keeper: Board) -> None:
    """The worker waits for the confirmation; the place is not used by another message meanwhile."""
    place = worker.take(REPLY, 0.0)
    keeper.sending[place] = keeper.held[place]
    assert not worker.leave(place)
    assert keeper.held[place] == 0, "from here on the keeper sends nothing about it"
    assert not worker.cleared(place)
    assert place not in [worker.take(REPLY, 0.0) for _ in range(4)]
    keeper.sending[place] = 0
    assert worker.cleared(place)
    assert worker.take(REPLY, 0.0) == place


def test_board_message_that_was_given_back_is_not_started(worker: Board, keeper: Board) -> None:
    """Unless it had been started before; and its place starts clean for the next message."""
    place = worker.take(REPLY, 0.0)
    keeper.gave[place] = keeper.held[place]
    assert not worker.start(place)
    assert worker.leave(place)
    assert worker.take(REPLY, 0.0) == place
    assert worker.start(place)


def test_board_of_a_dead_keeper_blocks_nobody(worker: Board, keeper: Board) -> None:
    """What a keeper was sending when it died is not waited for."""
    place = worker.take(REPLY, 0.0)
    keeper.sending[place] = keeper.held[place]
    assert not worker.leave(place)
    worker.leaving.append(place)
    worker.reclaim()
    assert worker.leaving == [place]
    worker.forget_keeper()
    worker.reclaim()
    assert worker.leaving == []
