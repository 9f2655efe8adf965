"""Which sequences run in the next step, and who holds which KV page.

Owns: batches, page bookkeeping, the prefix cache, leases. Pure: no model, no threads, no asyncio, no wall clock (``now``
is handed in), so a simulator can run the very same code. Knows nothing of the wire or of sampling.
"""

from microserving.scheduler.config import PrefixCacheKind, SchedulerConfig
from microserving.scheduler.page_allocator import PageAllocator, PageCounts, PageState
from microserving.scheduler.page_pool import PagePool
from microserving.scheduler.prefix_cache import PageCopy, PrefixCache
from microserving.scheduler.reservations import LeasedPages, LeaseState, ReservationTable
from microserving.scheduler.scheduler import Scheduler
from microserving.scheduler.sequence import Sequence, SequenceKind, SequenceState
from microserving.scheduler.step import Chunk, Step

__all__ = [
    "Chunk",
    "LeaseState",
    "LeasedPages",
    "PageAllocator",
    "PageCopy",
    "PageCounts",
    "PagePool",
    "PageState",
    "PrefixCache",
    "PrefixCacheKind",
    "ReservationTable",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "SequenceKind",
    "SequenceState",
    "Step",
]
