"""The words in which a receiver says which leases hold (the contract in transports/base.py), of every transport."""

from __future__ import annotations

import numpy as np
import pytest

from microserving.errors import LeaseError

from .conformance_harness import TIMEOUT_S, RecordingObserver, WatchingObserver, World, lease


@pytest.mark.case("PD-03")
def test_a_lease_word_holds_from_the_grant_to_the_finish(world: World, observer: RecordingObserver) -> None:
    world.receiver(observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    words = connection.pool.leases
    assert words.dtype == np.int64
    assert words.ctypes.data % 64 == 0
    assert not words.any()
    guards = [connection.begin(lease(number)).result(TIMEOUT_S) for number in (1, 2)]
    assert [guard.lease_id for guard in guards] == [1, 2]
    assert [int(words[guard.word]) for guard in guards] == [1, 2]
    assert np.count_nonzero(words) == 2
    connection.finish(lease(1), True).result(TIMEOUT_S)
    assert words[guards[0].word] == 0
    assert words[guards[1].word] == 2
    connection.finish(lease(2), False).result(TIMEOUT_S)
    assert not words.any()


@pytest.mark.case("PD-03")
def test_a_lease_that_ends_while_it_is_written_clears_its_word_before_revoke_returns(
    world: World, observer: RecordingObserver
) -> None:
    """Whether it was aborted or has expired: the owner of the reservations calls ``revoke``."""
    receiver = world.receiver(observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    words = connection.pool.leases
    ended, stays = (connection.begin(lease(number)).result(TIMEOUT_S) for number in (1, 2))
    receiver.revoke(1)
    assert words[ended.word] == 0
    assert words[stays.word] == 2
    receiver.revoke(1)
    receiver.revoke(99)  # nobody writes it
    assert np.flatnonzero(words).tolist() == [stays.word]
    third = connection.begin(lease(3)).result(TIMEOUT_S)
    connection.finish(lease(1), False).result(TIMEOUT_S)  # late: takes no word from anybody
    assert words[third.word] == 3
    assert words[stays.word] == 2


def test_a_refused_begin_leaves_no_word(world: World, observer: RecordingObserver) -> None:
    observer.grant = False
    world.receiver(observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    for number in (1, 0, 2**63):  # the last two are nobody's ids
        with pytest.raises(LeaseError):
            connection.begin(lease(number)).result(TIMEOUT_S)
    assert not connection.pool.leases.any()
    assert [event for event in observer.events if event[1] != lease(1)] == []


def test_the_word_says_yes_only_between_what_the_observer_hears(world: World) -> None:
    """Clear while the observer decides, and clear again before it hears of the end, when it gives the pages away."""
    observer = WatchingObserver()
    world.receiver(observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    observer.words = connection.pool.leases
    for number, ok in ((1, True), (2, False)):
        connection.begin(lease(number)).result(TIMEOUT_S)
        connection.finish(lease(number), ok).result(TIMEOUT_S)
    connection.begin(lease(3)).result(TIMEOUT_S)
    connection.close()
    observer.wait_for("end", lease(3), False)
    assert observer.held == [[], [], [], [], [], []]


def test_a_lease_that_is_revoked_while_it_is_granted_gets_no_word(world: World) -> None:
    """``revoke`` comes between the owner's yes and the transport's grant."""
    observer = WatchingObserver()
    receiver = world.receiver(observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    observer.words = connection.pool.leases
    observer.on_begin = lambda ours: receiver.revoke(ours.lease_id)
    guard = connection.begin(lease(1)).result(TIMEOUT_S)
    assert guard.lease_id == 1
    assert not connection.pool.leases.any()
    connection.finish(lease(1), False).result(TIMEOUT_S)
    assert observer.events[-1] == ("end", lease(1), False)


def test_words_of_writers_that_went_are_clear(world: World, observer: RecordingObserver) -> None:
    world.receiver(observer)
    leaving, staying = world.transport(), world.transport()
    leaving.connect("d0", "e1", TIMEOUT_S).begin(lease(1)).result(TIMEOUT_S)
    connection = staying.connect("d0", "e1", TIMEOUT_S)
    guard = connection.begin(lease(2)).result(TIMEOUT_S)
    leaving.close()
    observer.wait_for("end", lease(1), False)
    assert np.flatnonzero(connection.pool.leases).tolist() == [guard.word]


@pytest.mark.case("PD-18")
def test_a_receiver_that_closes_clears_every_word_and_its_successor_shares_none(
    world: World, observer: RecordingObserver
) -> None:
    """What was mapped from one epoch never reaches the next one: other memory, other words."""
    old = world.receiver(observer, epoch="e1")
    sender = world.transport()
    before = sender.connect("d0", "e1", TIMEOUT_S)
    guard = before.begin(lease()).result(TIMEOUT_S)
    pool = before.pool
    old.close()
    assert not pool.leases.any()
    world.receiver(RecordingObserver(), epoch="e2")
    after = sender.connect("d0", "e2", TIMEOUT_S)
    again = after.begin(lease(epoch="e2")).result(TIMEOUT_S)
    assert again == guard  # the same word and the same lease id, yet:
    pool.memory[:] = 255
    pool.leases[:] = 99
    assert not after.pool.memory.any()
    assert after.pool.leases[again.word] == 1
    assert np.count_nonzero(after.pool.leases) == 1


def test_words_are_given_again_and_never_to_two(world: World, observer: RecordingObserver) -> None:
    receiver = world.receiver(observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    total = len(connection.pool.leases)
    futures = [connection.begin(lease(number)) for number in range(1, total + 2)]
    guards = [future.result(TIMEOUT_S) for future in futures[:-1]]
    assert len({guard.word for guard in guards}) == total
    with pytest.raises(LeaseError):  # one too many
        futures[-1].result(TIMEOUT_S)
    assert ("begin", lease(total + 1)) not in observer.events
    receiver.revoke(7)  # its writer has not stopped; the word is free all the same
    again = connection.begin(lease(total + 2)).result(TIMEOUT_S)
    assert again.word == guards[6].word
    assert connection.pool.leases[again.word] == total + 2
