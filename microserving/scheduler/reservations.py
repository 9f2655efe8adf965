"""Leases on pages that another engine writes into.

Owns: the life of a lease, and the pages it holds until they are committed, freed or quarantined.
Does not know: descriptors, transports, the clock (``now`` is handed in, seconds, any origin).

    ISSUED --begin_write--> WRITING --end_write(ok)--> ARRIVED --commit--> COMMITTED
       \\________________________|__________________________|____> ENDED   (abort, expiry, end_write(not ok))

A lease that ends while WRITING leaves its pages quarantined until ``end_write``: a writer that was told to stop may
still be in the middle of a write.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, auto

from microserving.errors import InternalError, LeaseError, RequestConflict
from microserving.scheduler.page_allocator import PageAllocator, PageState

REMEMBERED_ENDINGS = 4096
"""How many ended request ids are remembered, so that a late commit is told why (bounded; the oldest go first)."""


class LeaseState(Enum):
    ISSUED = auto()
    WRITING = auto()
    ARRIVED = auto()
    COMMITTED = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class LeasedPages:
    """One lease. The writer fills positions [begin, end) of ``prompt`` into ``pages``, page i for positions from i *
    page_size on.
    """

    lease_id: int
    request_id: str
    prompt: tuple[int, ...]
    begin: int
    end: int
    pages: list[int]
    expires_at: float
    state: LeaseState


class ReservationTable:
    """All leases of one engine. ``len()`` counts the live ones (ISSUED, WRITING, ARRIVED)."""

    def __init__(self, allocator: PageAllocator, ttl_s: float) -> None:
        self._allocator = allocator
        self._ttl_s = ttl_s
        self._next_id = 1
        self._live: dict[str, LeasedPages] = {}
        self._writers: dict[int, LeasedPages] = {}  # lease id -> lease that is being written to, ended or not
        self._endings: OrderedDict[str, str] = OrderedDict()
        self._revoked: list[int] = []

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._live

    def get(self, request_id: str) -> LeasedPages | None:
        """The live lease of a request."""
        return self._live.get(request_id)

    def ending(self, request_id: str) -> str | None:
        """Why the request's last lease ended (``expired``, ``aborted``, ``transfer failed``); None if it did not."""
        return self._endings.get(request_id)

    def take_revoked(self) -> list[int]:
        """The ids of the leases that ended under their writer since the last call: it need not go on."""
        revoked, self._revoked = self._revoked, []
        return revoked

    def request_ids(self) -> list[str]:
        """Of the live leases."""
        return list(self._live)

    @property
    def next_expiry(self) -> float | None:
        return min((lease.expires_at for lease in self._live.values()), default=None)

    def issue(
        self, request_id: str, prompt: tuple[int, ...], begin: int, end: int, pages: int, now: float
    ) -> LeasedPages:
        """Take ``pages`` free pages under a new lease; arrived at once when there is nothing to write.

        Raises RequestConflict when the request has a live lease, InternalError when the pages are not free.
        """
        if request_id in self._live:
            raise RequestConflict(f"request {request_id!r} already has a reservation", param="request_id")
        lease_id = self._next_id
        taken = self._allocator.allocate(pages, PageState.RESERVED, ("lease", lease_id))
        self._next_id += 1
        state = LeaseState.ISSUED if end > begin else LeaseState.ARRIVED
        lease = LeasedPages(lease_id, request_id, prompt, begin, end, taken, now + self._ttl_s, state)
        self._live[request_id] = lease
        self._endings.pop(request_id, None)
        return lease

    def renew(self, request_id: str, now: float) -> float:
        """The new expiry time. Raises LeaseError when there is no live lease."""
        lease = self._require(request_id)
        lease.expires_at = now + self._ttl_s
        return lease.expires_at

    def begin_write(self, request_id: str, lease_id: int, now: float) -> bool:
        """Grant the lease's pages to its one writer. False when the lease ended, or was begun before."""
        lease = self._live.get(request_id)
        if lease is None or lease.lease_id != lease_id or lease.state is not LeaseState.ISSUED:
            return False
        if lease.expires_at <= now:
            return False
        lease.state = LeaseState.WRITING
        lease.expires_at = now + self._ttl_s
        self._writers[lease_id] = lease
        return True

    def end_write(self, lease_id: int, ok: bool, now: float) -> LeasedPages | None:
        """The writer stopped: the KV arrived, or the lease ends. Idempotent; returns the lease when it arrived."""
        lease = self._writers.pop(lease_id, None)
        if lease is None:
            return None
        if lease.state is LeaseState.ENDED:
            self._allocator.release(lease.pages, ("lease", lease_id))
            return None
        if not ok:
            self._end(lease, "transfer failed")
            return None
        lease.state = LeaseState.ARRIVED
        lease.expires_at = now + self._ttl_s
        return lease

    def commit(self, request_id: str, owner: Hashable) -> LeasedPages:
        """The lease's pages become ``owner``'s running pages. Raises LeaseError when not all KV has arrived."""
        lease = self._require(request_id)
        if lease.state is not LeaseState.ARRIVED:
            raise LeaseError(f"the KV of request {request_id!r} has not arrived", param="request_id")
        self._allocator.transfer(lease.pages, ("lease", lease.lease_id), PageState.RUNNING, owner)
        lease.state = LeaseState.COMMITTED
        del self._live[request_id]
        return lease

    def abort(self, request_id: str, reason: str = "aborted") -> bool:
        """End the request's lease. False when it has none."""
        lease = self._live.get(request_id)
        if lease is not None:
            self._end(lease, reason)
        return lease is not None

    def expire(self, now: float) -> list[LeasedPages]:
        """End every lease whose time has come, and return them."""
        late = [lease for lease in self._live.values() if lease.expires_at <= now]
        for lease in late:
            self._end(lease, "expired")
        return late

    def _end(self, lease: LeasedPages, reason: str) -> None:
        if lease.state in (LeaseState.COMMITTED, LeaseState.ENDED):
            raise InternalError(f"lease {lease.lease_id} ended twice")
        owner = ("lease", lease.lease_id)
        if lease.lease_id in self._writers:
            self._allocator.transfer(lease.pages, owner, PageState.QUARANTINED, owner)
            self._revoked.append(lease.lease_id)
        else:
            self._allocator.release(lease.pages, owner)
        lease.state = LeaseState.ENDED
        del self._live[lease.request_id]
        self._endings[lease.request_id] = reason
        while len(self._endings) > REMEMBERED_ENDINGS:
            self._endings.popitem(last=False)

    def _require(self, request_id: str) -> LeasedPages:
        lease = self._live.get(request_id)
        if lease is not None:
            return lease
        reason = self._endings.get(request_id)
        state = "is unknown" if reason is None else f"has ended ({reason})"
        raise LeaseError(f"the reservation of request {request_id!r} {state}", param="request_id")
