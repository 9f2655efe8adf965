"""How KV gets from one engine's pool into another's: the contract, its implementations, and their registry.

Knows nothing of models, schedulers or HTTP; pools are bytes, reservations are lease ids.
"""

from microserving.transports.base import (
    Connection,
    Lease,
    LeaseGuard,
    LeaseObserver,
    OnStop,
    RemotePool,
    Transport,
)
from microserving.transports.registry import TRANSPORTS, create_transport

__all__ = [
    "TRANSPORTS",
    "Connection",
    "Lease",
    "LeaseGuard",
    "LeaseObserver",
    "OnStop",
    "RemotePool",
    "Transport",
    "create_transport",
]
