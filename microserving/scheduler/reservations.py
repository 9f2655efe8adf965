"""Leases on pages that another engine writes into.

Owns: the life of a lease, and the pages it holds until they are committed, freed or quarantined.
Does not know: descriptors, transports, whether there are pages, the clock (``now`` is handed in, seconds, any origin).

    ISSUED --begin_write--> WRITING --end_write(ok)--> ARRIVED --commit--> COMMITTED
       \\________________________|__________________________|____> ENDED   (abort, expiry, end_write(not ok))

A lease that ends while WRITING leaves its own pages quarantined until ``end_write``: a writer that was told to stop may
still be in the middle of a write. Shared pages are never written, so they are unpinned at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from microserving.errors import InternalError, LeaseError, RequestConflict
from microserving.scheduler.page_allocator import PageState
from microserving.scheduler.page_pool import PagePool
from microserving.scheduler.prefix_cache import PageCopy, PrefixHandle

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

    [0, begin) was found in the prefix cache: the first ``shared`` pages are the cache's, and ``copies`` are to be made
    before the lease is handed out, so that the writer has a page of its own from ``begin`` on.
    """

    lease_id: int
    request_id: str
    prompt: tuple[int, ...]
    end: int
    salt: str = ""
    begin: int = 0
    pages: list[int] = field(default_factory=list)
    handle: PrefixHandle | None = None
    copies: list[PageCopy] = field(default_factory=list)
    expires_at: float = 0.0
    state: LeaseState = LeaseState.ISSUED

    @property
    def shared(self) -> int:
        return 0 if self.handle is None else self.handle.shared


class ReservationTable:
    """All leases of one engine. ``len()`` counts the live ones (ISSUED, WRITING, ARRIVED)."""

    def __init__(self, pool: PagePool, ttl_s: float) -> None:
        self._pool = pool
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

    def states(self) -> dict[LeaseState, int]:
        """How many of the live leases are in each state that a live one has."""
        counts = dict.fromkeys((LeaseState.ISSUED, LeaseState.WRITING, LeaseState.ARRIVED), 0)
        for lease in self._live.values():
            counts[lease.state] += 1
        return counts

    def request_ids(self) -> list[str]:
        """Of the live leases."""
        return list(self._live)

    def handles(self) -> Iterator[PrefixHandle]:
        """What the live leases pin."""
        return (lease.handle for lease in self._live.values() if lease.handle is not None)

    @property
    def next_expiry(self) -> float | None:
        return min((lease.expires_at for lease in self._live.values()), default=None)

    def issue(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        end: int,
        now: float,
        *,
        salt: str = "",
        spare: int = 0,
    ) -> LeasedPages | None:
        """A new lease with pages for positions [0, end); arrived at once when nothing is to be written.

        None when that would leave fewer than ``spare`` pages to others. Raises RequestConflict when the request has a
        live lease.
        """
        if request_id in self._live:
            raise RequestConflict(f"request {request_id!r} already has a reservation", param="request_id")
        lease = LeasedPages(self._next_id, request_id, prompt, end, salt)
        # The last token of a prompt is computed in any case, for its logits: never into a shared page.
        limit = min(end, len(prompt) - 1)
        grant = self._pool.open(lease, PageState.RESERVED, prompt[:end], end, shared_limit=limit, spare=spare)
        if grant is None:
            return None
        self._next_id += 1
        lease.begin, lease.copies, lease.expires_at = grant.matched, grant.copies, now + self._ttl_s
        lease.state = LeaseState.ISSUED if end > lease.begin else LeaseState.ARRIVED
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
            self._pool.release_quarantined(lease)
            return None
        if not ok:
            self._end(lease, "transfer failed")
            return None
        lease.state = LeaseState.ARRIVED
        lease.expires_at = now + self._ttl_s
        return lease

    def commit(self, request_id: str, now: float) -> LeasedPages:
        """End the lease well; its pages are the caller's to take from it now.

        Raises LeaseError when there is no live lease, or not all K/V has arrived.
        """
        lease = self._require(request_id)
        if lease.expires_at <= now:
            raise LeaseError(
                f"the reservation of request {request_id!r} has ended (expired)", param="request_id"
            )
        if lease.state is not LeaseState.ARRIVED:
            raise LeaseError(f"the KV of request {request_id!r} has not arrived", param="request_id")
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
        if lease.lease_id in self._writers:
            self._pool.quarantine(lease)
            self._revoked.append(lease.lease_id)
        else:
            self._pool.release(lease)
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
