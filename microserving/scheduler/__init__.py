"""Which sequences run in the next step, and who holds which KV page.

Owns: batches, page bookkeeping, leases. Pure: no model, no threads, no asyncio, no wall clock (``now`` is handed in),
so a simulator can run the very same code. Knows nothing of the wire or of sampling.
"""

from microserving.scheduler.page_allocator import PageAllocator, PageCounts, PageState
from microserving.scheduler.reservations import LeasedPages, LeaseState, ReservationTable
from microserving.scheduler.scheduler import Chunk, Scheduler, SchedulerConfig
from microserving.scheduler.sequence import Sequence, SequenceKind, SequenceState

__all__ = [
    "Chunk",
    "LeaseState",
    "LeasedPages",
    "PageAllocator",
    "PageCounts",
    "PageState",
    "ReservationTable",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "SequenceKind",
    "SequenceState",
]
