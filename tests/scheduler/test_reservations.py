"""The life of a lease, step by step."""

import pytest

from microserving.errors import LeaseError, RequestConflict
from microserving.scheduler import LeasedPages, LeaseState, PageAllocator, PagePool, ReservationTable

PROMPT = tuple(range(40))
PAGE = 16


@pytest.fixture
def pool() -> PagePool:
    return PagePool(8, PAGE, prefix_cache=True)


@pytest.fixture
def allocator(pool: PagePool) -> PageAllocator:
    return pool.allocator


@pytest.fixture
def table(pool: PagePool) -> ReservationTable:
    return ReservationTable(pool, ttl_s=10.0)


def issue(
    table: ReservationTable,
    request_id: str,
    end: int = 39,
    now: float = 0.0,
    prompt: tuple[int, ...] = PROMPT,
    spare: int = 0,
) -> LeasedPages:
    lease = table.issue(request_id, prompt, end, now, spare=spare)
    assert lease is not None
    return lease


def arrived(table: ReservationTable, request_id: str, end: int = 39, now: float = 0.0) -> LeasedPages:
    lease = issue(table, request_id, end, now)
    assert table.begin_write(request_id, lease.lease_id, now)
    assert table.end_write(lease.lease_id, ok=True, now=now) is lease
    return lease


def test_a_lease_is_written_committed_and_gone(table: ReservationTable, allocator: PageAllocator) -> None:
    lease = issue(table, "a")
    assert (lease.state, lease.expires_at, allocator.counts.reserved) == (LeaseState.ISSUED, 10.0, 3)
    assert table.begin_write("a", lease.lease_id, now=4.0)
    assert lease.expires_at == 14.0  # traffic renews
    assert table.end_write(lease.lease_id, ok=True, now=5.0) is lease
    assert table.commit("a", now=14.9) is lease
    assert (lease.state, len(lease.pages)) == (LeaseState.COMMITTED, 3)
    assert len(table) == 0
    assert table.ending("a") is None


def test_an_arrived_lease_can_be_committed_only_while_it_lasts(table: ReservationTable) -> None:
    arrived(table, "a", now=5.0)
    with pytest.raises(LeaseError, match="expired"):
        table.commit("a", now=15.0)  # although nobody has called expire yet


def test_pages_that_others_must_be_left_are_not_leased(
    table: ReservationTable, allocator: PageAllocator
) -> None:
    assert table.issue("a", PROMPT, 39, 0.0, spare=6) is None
    assert (allocator.free, len(table)) == (8, 0)
    issue(table, "a", spare=5)


def test_lease_ids_are_unique_over_reuse_of_a_request_id(table: ReservationTable) -> None:
    first = issue(table, "a", 16)
    table.abort("a")
    second = issue(table, "a", 16)
    assert first.lease_id != second.lease_id
    assert not table.begin_write("a", first.lease_id, now=0.0)
    assert table.ending("a") is None  # forgotten with the new lease


def test_a_second_lease_of_a_live_request_is_refused(
    table: ReservationTable, allocator: PageAllocator
) -> None:
    issue(table, "a", 16)
    with pytest.raises(RequestConflict):
        issue(table, "a", 16)
    assert allocator.counts.reserved == 1


def test_commit_before_the_kv_arrived_is_refused_and_keeps_the_lease(table: ReservationTable) -> None:
    lease = issue(table, "a", 16)
    with pytest.raises(LeaseError, match="has not arrived"):
        table.commit("a", now=0.0)
    table.begin_write("a", lease.lease_id, now=0.0)
    with pytest.raises(LeaseError, match="has not arrived"):
        table.commit("a", now=0.0)
    table.end_write(lease.lease_id, ok=True, now=0.0)
    table.commit("a", now=0.0)


@pytest.mark.case("PD-26")
def test_nothing_to_send_counts_as_arrived(table: ReservationTable) -> None:
    lease = issue(table, "a", 0)
    assert lease.state is LeaseState.ARRIVED
    assert not table.begin_write("a", lease.lease_id, now=0.0)
    table.commit("a", now=0.0)


@pytest.mark.case("PD-03")
def test_a_lease_that_expires_under_a_writer_is_quarantined_until_it_stops(
    table: ReservationTable, allocator: PageAllocator
) -> None:
    lease = issue(table, "a")
    table.begin_write("a", lease.lease_id, now=0.0)
    assert table.expire(now=9.9) == []
    assert table.expire(now=10.0) == [lease]
    assert (allocator.free, allocator.counts.quarantined, len(table)) == (5, 3, 0)
    with pytest.raises(LeaseError, match="expired"):
        table.commit("a", now=0.0)
    assert table.end_write(lease.lease_id, ok=True, now=11.0) is None  # too late to count as arrived
    assert (allocator.free, allocator.counts.quarantined) == (8, 0)
    assert table.end_write(lease.lease_id, ok=True, now=11.0) is None  # idempotent


def test_a_lease_that_expires_unwritten_is_free_and_its_writer_is_refused(
    table: ReservationTable, allocator: PageAllocator
) -> None:
    lease = issue(table, "a")
    assert not table.begin_write("a", lease.lease_id, now=10.0)  # late, although nobody has called expire yet
    table.expire(now=10.0)
    assert allocator.free == 8
    assert not table.begin_write("a", lease.lease_id, now=10.0)


@pytest.mark.case("PD-05")
def test_a_failed_write_ends_the_lease_at_once(table: ReservationTable, allocator: PageAllocator) -> None:
    lease = issue(table, "a")
    table.begin_write("a", lease.lease_id, now=0.0)
    table.end_write(lease.lease_id, ok=False, now=1.0)
    assert (allocator.free, table.ending("a")) == (8, "transfer failed")


def test_one_writer_only(table: ReservationTable) -> None:
    lease = issue(table, "a")
    assert not table.begin_write("b", lease.lease_id, now=0.0)
    assert table.begin_write("a", lease.lease_id, now=0.0)
    assert not table.begin_write("a", lease.lease_id, now=0.0)
    table.end_write(lease.lease_id, ok=True, now=0.0)
    assert not table.begin_write("a", lease.lease_id, now=0.0)


def test_renewing(table: ReservationTable) -> None:
    issue(table, "a")
    issue(table, "b", now=1.0)
    assert table.renew("a", now=5.0) == 15.0
    assert table.next_expiry == 11.0
    with pytest.raises(LeaseError, match="unknown"):
        table.renew("c", now=5.0)


def test_ended_requests_are_remembered_but_not_for_ever(
    table: ReservationTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microserving.scheduler.reservations.REMEMBERED_ENDINGS", 3)
    for name in "abcd":
        issue(table, name, 0)
        table.abort(name)
    assert [table.ending(name) for name in "abcd"] == [None, "aborted", "aborted", "aborted"]


def test_live_leases_by_state(table: ReservationTable) -> None:
    arrived(table, "arrived", 16)
    issue(table, "issued", 16)
    writing = issue(table, "writing", 16)
    assert table.begin_write("writing", writing.lease_id, now=0.0)
    ended = arrived(table, "ended", 16)
    table.abort(ended.request_id)
    assert table.states() == {LeaseState.ISSUED: 1, LeaseState.WRITING: 1, LeaseState.ARRIVED: 1}
